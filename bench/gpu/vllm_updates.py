"""Measures the time for which vLLM stands still for a version of the weights, split by phase: measurement 5.

    attach ── pause ── start ── update ── finish ── resume ── first token      on a GPU
    attach ── pause ── load ───────────────────────── resume ── first token    on a CPU

The calls are those of vllm_generation.py, while all slots sample.
"""

import asyncio
import json
import os
import statistics
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol
from uuid import uuid4

import numpy as np

from asyncrl.bench.end_to_end.benchmark_model import VOCABULARY
from asyncrl.bench.gpu.bench_device import BenchDevice, NotMeasured, Results
from asyncrl.bench.gpu.language_model import LAYER_BYTES, random_llama
from asyncrl.config.schema import Config
from asyncrl.lanes.weights.arena import open_writer
from asyncrl.lanes.weights.tensor_spec import spec_of

SLOTS = 8
PROMPT = 32
TOKENS = 4096
VERSIONS = 5
DTYPE = "bfloat16"
SAMPLING = {"temperature": 1.0, "max_tokens": TOKENS}
DEADLINE = 120.0
"""Seconds for a token, or for one version."""


class UpdatedEngine(Protocol):
    """The calls of EngineProcess that an update makes."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def call_workers(self, method: str, *arguments: Any) -> list[Any]: ...


@dataclass
class Stopwatch:
    """Keeps the milliseconds of each phase of one version."""

    phases: dict[str, float]
    began: float

    def ended(self, phase: str) -> None:
        now = time.perf_counter()
        self.phases[phase] = 1e3 * (now - self.began)
        self.began = now


def vllm_pause(bench: BenchDevice) -> Results:
    """Measures the phases of an update in the median of several, and the time without tokens that they make."""
    if find_spec("vllm") is None:
        raise NotMeasured("vLLM is not installed in this environment")
    with TemporaryDirectory() as folder:
        model = random_llama(max(bench.largest, LAYER_BYTES), PROMPT + TOKENS)
        model.save_pretrained(folder)
        return asyncio.run(_measured(Path(folder), model, bench.device.partition(":")[0]))


async def update_phases(
    engine: UpdatedEngine, model: Sequence[Any], fields: Sequence[Any], device: str, tokens: asyncio.Event
) -> dict[str, float]:
    """Gives an engine one version, and returns the milliseconds of each phase. fields: of the version, as
    asyncrl_attach takes them. tokens: set at each token that is sampled."""
    version = fields[1]
    watch = Stopwatch({}, time.perf_counter())
    refused = await engine.call_workers("asyncrl_attach", list(model), list(fields))
    if any(refused):
        raise NotMeasured(f"vLLM refused the weights: {refused}")
    watch.ended("attach_ms")
    await engine.pause()
    watch.ended("pause_ms")
    if device == "cpu":
        await engine.call_workers("asyncrl_load", version)
        watch.ended("load_ms")
    else:
        for phase, arguments in (
            ("start_weight_update", ()),
            ("update_weights", ({"version": version},)),
            ("finish_weight_update", ()),
        ):
            await engine.call_workers(phase, *arguments)
            watch.ended(f"{phase.partition('_')[0]}_ms")
    tokens.clear()
    await engine.resume()
    watch.ended("resume_ms")
    async with asyncio.timeout(DEADLINE):
        await tokens.wait()
    watch.ended("first_token_ms")
    still = sum(value for name, value in watch.phases.items() if name != "attach_ms")
    return watch.phases | {"without_tokens_ms": still}


async def sample(stream: AsyncGenerator[tuple[int, float]], sampled: asyncio.Event) -> None:
    """Samples until it is cancelled, and sets the event at each token."""
    async with aclosing(stream) as tokens:
        async for _ in tokens:
            sampled.set()


def medians(found: Sequence[Mapping[str, float]]) -> Results:
    """Returns the median of each phase."""
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


async def _measured(folder: Path, model: Any, device: str) -> Results:
    """Starts vLLM and gives it versions while it samples. The first one, with which it opens the arena, is not
    counted."""
    from asyncrl.engines.generation.vllm.option_problems import set_environment
    from asyncrl.engines.generation.vllm.vllm_generation import ATTACHED, engine_arguments

    vllm = {} if device == "cpu" else {"gpu_memory_utilization": 0.3}
    generation = {"engine": "vllm", "device": device, "slots": SLOTS, "max_new_tokens": TOKENS, "vllm": vllm}
    task = {"prompts": "none", "max_prompt_tokens": PROMPT}
    sections = {"model": {"name": "random", "dtype": DTYPE}, "task": task, "generation": generation}
    config = Config.model_validate(sections)
    set_environment(os.environ, config)
    from asyncrl.engines.generation.vllm.engine_process import EngineProcess

    engine = EngineProcess(engine_arguments(config, folder, json.loads((folder / "config.json").read_text())), None)
    writer = open_writer(f"asyncrl-bench-{uuid4().hex[:12]}", spec_of(model, DTYPE), "ipc")
    sampled = asyncio.Event()
    found = []
    streams = [engine.tokens(f"{number}", _prompt(number), "bench", **SAMPLING) for number in range(SLOTS)]
    running = [asyncio.create_task(sample(stream, sampled), name="sample") for stream in streams]
    try:
        async with asyncio.timeout(DEADLINE):
            await sampled.wait()
        for version in range(1 + VERSIONS):
            published = writer.write(0, version, dict(model.named_parameters(remove_duplicate=False)))
            fields = [getattr(published, name) for name in ATTACHED]
            found.append(await update_phases(engine, [str(folder), DTYPE, None], fields, device, sampled))
    finally:
        for each in running:
            each.cancel()
        await asyncio.wait(running, timeout=DEADLINE)
        engine.close()
        writer.close()
    return medians(found[1:])


def _prompt(number: int) -> Any:
    return np.random.default_rng(number).integers(5, VOCABULARY, PROMPT).astype(np.int32)

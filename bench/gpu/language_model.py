"""A language model of 0.4 billion weights on the device: measurements 13, sampling, and 14, a step of the trainer.

Both take bfloat16 weights of random values. Tokens are counted as the user gets them, time as it passes on the wall.
"""

import asyncio
import json
import os
import statistics
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol
from uuid import uuid4

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.bench.benchmark_model import VOCABULARY, EndlessEngine, make_tokenizer
from asyncrl.bench.generation_speed import complete, generate_in_batches
from asyncrl.bench.gpu.bench_device import BenchDevice, NotMeasured, Results
from asyncrl.config.schema import Config
from asyncrl.engines.generation.engine_interface import SampleRequest
from asyncrl.engines.models.model_loading import load_pretrained
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import run_step
from asyncrl.lanes.weights.arena import open_writer
from asyncrl.lanes.weights.slot_memory import spec_of

WIDTH = 1024
LAYERS = 24
LAYER_BYTES = 2 * (3 * WIDTH**2 + 12 * WIDTH**2)
"""Bytes of a layer in bfloat16."""

SLOTS = 128
PROMPT = 64
FEWEST = 32
MOST = 256
"""Tokens of an answer: as uneven as answers of a reasoning task."""

STEPS = 3
DTYPE = "bfloat16"


def sampling(bench: BenchDevice) -> Results:
    """Measures useful tokens a second of the torch engine, which refills its slots, beside transformers.generate, whose
    batches run to their longest answer. Each side samples half of the requests before it is timed."""
    slots = _slots(bench)
    with _model_folder(bench) as folder:
        work = _requests(2 * slots)
        tokens = sum(request.max_new_tokens for request in work)
        engine = EndlessEngine(folder, _config(bench, slots), version=0)
        complete(engine, work[:slots])
        ours = tokens / bench.timer.seconds(lambda: complete(engine, work))
        plain = load_pretrained(folder, dtype=torch.bfloat16).to(bench.device).eval()
        plain.generation_config.eos_token_id = None
        generate_in_batches(plain, work[:slots], slots)
        theirs = tokens / bench.timer.seconds(lambda: generate_in_batches(plain, work, slots))
    found = {"engine_tokens_s": ours, "transformers_tokens_s": theirs, "engine_over_transformers": ours / theirs}
    return found | {"slots": slots}


def training_step(bench: BenchDevice) -> Results:
    """Measures tokens a second of a trainer's step on the answers of a batch, and floating-point operations a second by
    six for each weight and token (Kaplan et al. 2020, section 2.1), which leaves attention out."""
    with _model_folder(bench) as folder:
        trainer = PolicyTrainer(_config(bench, _slots(bench)), folder)
        rows = [_row(number, request) for number, request in enumerate(_requests(_slots(bench)))]
        tokens = sum(len(row.prompt_ids) + len(row.response_ids) for row in rows)
        run_step(trainer, rows, 1, 0)

        def steps() -> None:
            for _ in range(STEPS):
                assert run_step(trainer, rows, 1, 0).updates

        rate = STEPS * tokens / bench.timer.seconds(steps)
    weights = sum(tensor.numel() for tensor in trainer.named_tensors().values())
    return {"tokens_s": rate, "TFLOP_s": 6 * weights * rate / 1e12, "weights": weights}


def _slots(bench: BenchDevice) -> int:
    return SLOTS if bench.largest >= LAYER_BYTES else 4


def random_llama(largest: int, positions: int) -> LlamaForCausalLM:
    """Returns a Llama in bfloat16 whose layers fit into so many bytes, at most LAYERS; a tiny one where not one does.
    positions: tokens of its longest row."""
    layers = min(largest // LAYER_BYTES, LAYERS)
    width = WIDTH
    if layers == 0:
        layers = 2
        width = 64
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=positions,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(shape).to(torch.bfloat16)


@contextmanager
def _model_folder(bench: BenchDevice) -> Iterator[Path]:
    with TemporaryDirectory(prefix="asyncrl-bench-") as name:
        random_llama(bench.largest, PROMPT + MOST).save_pretrained(name)
        make_tokenizer().save_pretrained(name)
        yield Path(name)


def _config(bench: BenchDevice, slots: int) -> Config:
    sections: dict[str, Any] = {
        "model": {"name": "random", "dtype": DTYPE},
        "task": {"prompts": "none", "max_prompt_tokens": PROMPT},
        "generation": {"slots": slots, "max_new_tokens": MOST, "device": bench.device},
        "training": {"device": bench.device, "precision": DTYPE, "micro_batch_tokens": 16_384, "learning_rate": 1e-6},
    }
    return Config.model_validate(sections)


def _requests(count: int) -> Sequence[SampleRequest]:
    source = np.random.default_rng(0)
    lengths = source.integers(8, PROMPT + 1, count)
    answers = source.integers(FEWEST, MOST + 1, count)
    return [
        SampleRequest((number, 0, 0), source.integers(4, VOCABULARY, prompt).astype(np.int32), number, 1.0, int(answer))
        for number, (prompt, answer) in enumerate(zip(lengths, answers, strict=True))
    ]


def _row(number: int, request: SampleRequest) -> TrainRow:
    source = np.random.default_rng(number)
    length = request.max_new_tokens
    return TrainRow(
        group=number // 8,
        member=number % 8,
        attempt=0,
        incarnation=1,
        prompt_ids=request.prompt.astype(np.int64),
        response_ids=source.integers(4, VOCABULARY, length),
        logprobs=np.full(length, -np.log(VOCABULARY), np.float32),
        versions=np.zeros(length, np.int64),
        advantage=float(source.normal()),
    )


# Measures the time for which vLLM stands still for a version of the weights, split by phase: measurement 5.
#
#     attach ── pause ── start ── update ── finish ── resume ── first token      on a GPU
#     attach ── pause ── load ───────────────────────── resume ── first token    on a CPU
#
# The calls are those of vllm_generation.py, while all slots sample.


VLLM_SLOTS = 8
VLLM_PROMPT = 32
TOKENS = 4096
VERSIONS = 5
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
        model = random_llama(max(bench.largest, LAYER_BYTES), VLLM_PROMPT + TOKENS)
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
    generation = {"engine": "vllm", "device": device, "slots": VLLM_SLOTS, "max_new_tokens": TOKENS, "vllm": vllm}
    task = {"prompts": "none", "max_prompt_tokens": VLLM_PROMPT}
    sections = {"model": {"name": "random", "dtype": DTYPE}, "task": task, "generation": generation}
    config = Config.model_validate(sections)
    set_environment(os.environ, config)
    from asyncrl.engines.generation.vllm.engine_process import EngineProcess

    engine = EngineProcess(engine_arguments(config, folder, json.loads((folder / "config.json").read_text())), None)
    writer = open_writer(f"asyncrl-bench-{uuid4().hex[:12]}", spec_of(model, DTYPE), "ipc")
    sampled = asyncio.Event()
    found = []
    streams = [engine.tokens(f"{number}", _prompt(number), "bench", **SAMPLING) for number in range(VLLM_SLOTS)]
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
    return np.random.default_rng(number).integers(5, VOCABULARY, VLLM_PROMPT).astype(np.int32)

"""The `vllm` engine beside an event loop.

    submit ── requests ── queue ── a task for each sample ──┐            ┌── tokens, as they are sampled
    update ── attach, pause, load, resume ──────────────────┼── AsyncLLM ┤
    pause, resume ──────────────────────────────────────────┘            └── its processes ── the trainer's arena

vLLM schedules, samples and holds the cache. The queue is ours, because requests may have to wait for weights; so are
the ends of samples, which both engines find alike. The version changes while vLLM is paused and every token that it had
sampled is recorded, so that each token has the version that sampled it.
"""

import asyncio
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from asyncrl.config.schema import Config
from asyncrl.engines.canary_logprobs import PROBE_TOKENS
from asyncrl.engines.generation.engine_interface import (
    NO_WEIGHTS,
    Completion,
    EngineLoad,
    Finish,
    Key,
    SampleRequest,
    refuse_too_long,
)
from asyncrl.engines.generation.tokenization import TokenizerWithStops, TurnRenderer, end_ids
from asyncrl.engines.generation.vllm.option_problems import (
    BACKEND,
    cache_tokens,
    head_width,
    set_environment,
    unsupported_heads,
)
from asyncrl.engines.models.lean_imports import import_compiler
from asyncrl.engines.models.model_families import refuse_rotation_by_longest_row
from asyncrl.engines.models.model_folder import context_of, longest_row, refuse_damaged
from asyncrl.engines.models.model_loading import vocabulary_size
from asyncrl.errors import ConfigError, PeerLost, WeightsError
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.protocols.batch import SampleName
from asyncrl.protocols.messages import Published
from asyncrl.protocols.seeds import GAMMA

if TYPE_CHECKING:
    from asyncrl.engines.generation.vllm.engine_process import EngineProcess

# The arguments that vLLM is started with: what asyncrl decides, and what `[generation.vllm]` adds.


EXTENSION = "asyncrl.engines.generation.vllm.worker_extension.WorkerExtension"


def engine_arguments(config: Config, folder: Path, shape: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of AsyncEngineArgs. shape: the contents of the model's config.json, for the size of the
    cache on CPUs: all slots with the longest row, so that no sample is ever preempted."""
    generation = config.generation
    context = context_of(shape)
    # One token is sampled after the canary, which may be as long as the longest row.
    rows = max(longest_row(config, context), PROBE_TOKENS) + 1
    rows = rows if context is None else min(rows, context)
    arguments: dict[str, Any] = {"enforce_eager": True, "seed": 0, "async_scheduling": False}
    if generation.device == "cpu":
        size = cache_bytes(shape, config.model.dtype, rows, generation.slots, generation.layout_tp)
        arguments["kv_cache_memory_bytes"] = size
    transfer = {} if generation.device == "cpu" else {"weight_transfer_config": {"backend": BACKEND}}
    decided = {
        "model": str(folder),
        "dtype": config.model.dtype,
        "max_num_seqs": generation.slots,
        "tensor_parallel_size": generation.layout_tp,
        "max_model_len": rows,
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        "worker_extension_cls": EXTENSION,
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    return {**arguments, **generation.vllm, **decided, **transfer}


def cache_bytes(shape: Mapping[str, Any], dtype: str, tokens: int, rows: int, processes: int = 1) -> int:
    """Returns the bytes of keys and values of this many rows of this many tokens, in blocks, with some to spare, in
    each of the processes that share the heads."""
    shape = shape.get("text_config") or shape
    heads = -(-(shape.get("num_key_value_heads") or shape["num_attention_heads"]) // processes)
    item = {"float32": 4, "bfloat16": 2}[dtype]
    return int(2 * shape["num_hidden_layers"] * heads * head_width(shape) * item * cache_tokens(tokens, rows))


Deliver = Callable[[Sequence[Completion]], None]
ATTACHED = ("incarnation", "version", "arena", "slot", "digest", "digest_of")
"""Fields of Published that vLLM's workers read a version by."""


class VllmGeneration:
    """Samples with the vLLM of a worker. engine: vLLM. shape: the contents of the model's config.json. `version`
    changes only while vLLM is paused and each token that it sampled is recorded. GenerationService calls it, on the
    event loop.
    """

    def __init__(self, worker: WorkerContext, engine: "EngineProcess", tokenizer: Any, shape: dict[str, Any]) -> None:
        folder = worker.facts.model_dir
        self._worker = worker
        self._engine = engine
        self._config = worker.config
        self.tokenizer = TokenizerWithStops(
            tokenizer, worker.config.generation.stop, worker.config.task.template_arguments
        )
        self.end_ids = end_ids(_generation_config(folder), tokenizer)
        self._vocabulary = vocabulary_size(tokenizer)
        self.turns = TurnRenderer(self.tokenizer, self.end_ids)
        self.context = context_of(shape)
        self.version: int = worker.spec.options.get("own_version", NO_WEIGHTS)
        self._waiting: deque[SampleRequest] = deque()  # bounded by the gate, which bounds the groups in flight
        self._running: dict[Key, asyncio.Task[None]] = {}
        self._wakeup = asyncio.Event()
        self._turn = asyncio.Lock()  # held while vLLM is paused, resumed or given weights
        self._paused = False
        self._broken: Exception | None = None
        self._asked = 0

    @classmethod
    async def open(cls, worker: WorkerContext) -> "VllmGeneration":
        """Starts vLLM on the compute thread. Raises ConfigError for a model that cannot be used."""
        folder = worker.facts.model_dir
        refuse_rotation_by_longest_row(folder, worker.config)
        refuse_damaged(folder)
        set_environment(os.environ, worker.config, worker.spec.devices)
        engine = await worker.compute.run(cls._start, worker, folder)
        if adapters := worker.spec.options.get("adapters"):
            await engine._load_saved(adapters)
        return engine

    @classmethod
    def _start(cls, worker: WorkerContext, folder: Path) -> "VllmGeneration":
        import_compiler()
        from asyncrl.engines.generation.vllm.engine_process import EngineProcess

        shape = json.loads((folder / "config.json").read_text())
        if worker.config.generation.device == "cpu" and (unsupported := unsupported_heads(shape)):
            raise ConfigError(f"model.name: {unsupported}")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        rows = (shape.get("text_config") or shape)["vocab_size"]
        allowed = range(vocabulary) if (vocabulary := vocabulary_size(tokenizer)) < rows else None
        engine = EngineProcess(engine_arguments(worker.config, folder, shape), allowed)
        return cls(worker, engine, tokenizer, shape)

    async def submit(self, requests: Sequence[SampleRequest]) -> None:
        refuse_too_long(requests, self._config)
        self._waiting.extend(requests)
        self._wakeup.set()

    def abort(self, keys: Iterable[Key]) -> None:
        wanted = set(keys)
        self._waiting = deque(request for request in self._waiting if request.key not in wanted)
        for key in wanted & self._running.keys():
            self._running[key].cancel()

    def forget(self, samples: Iterable[SampleName], oldest: int) -> None:
        """Does nothing: vLLM finds the keys and values of earlier turns by their tokens, and drops the oldest."""

    def load(self) -> EngineLoad:
        counters = self._engine.counters
        used = counters.cache_used if self._running else 0.0
        return EngineLoad(len(self._running), len(self._waiting), used, counters.preemptions, 0, 0)

    async def pause(self) -> int:
        async with self._turn:
            if not self._paused:
                await self._engine.pause()
                self._paused = True
        return self._engine.sampled

    async def resume(self) -> int:
        async with self._turn:
            if self._paused:
                self._paused = False
                await self._engine.resume()
        return self._engine.sampled

    async def update(self, published: Published) -> None:
        fields = [getattr(published, name) for name in ATTACHED]
        async with self._turn:
            with self._worker.tracer.span("flip", version=published.version):
                with self._worker.occupancy.awaiting_weights():
                    await self._attach(fields)
                with self._worker.occupancy.exchanging():
                    await self._load_weights(published.version)
            self.version = published.version
            if not self._paused:
                await self._engine.resume()
        self._wakeup.set()

    async def logprobs_after(self, prompt: NDArray[np.int64]) -> NDArray[np.float32]:
        return await self._engine.logprobs_after(self._name("canary"), prompt, self._vocabulary)

    async def run(self, deliver: Deliver) -> None:
        """Starts a task for each sample that holds a slot, until cancelled. Raises the error of the first that fails,
        PeerLost when vLLM dies, and WeightsError when weights were loaded in part."""
        async with asyncio.TaskGroup() as samples:
            samples.create_task(self._engine.watch(), name="death of vLLM")
            while True:
                await self._wakeup.wait()
                self._wakeup.clear()
                if self._broken is not None:
                    raise self._broken
                for request in self._startable():
                    task = samples.create_task(self._sample(request, deliver), name=f"sample {request.key}")
                    self._running[request.key] = task
                    task.add_done_callback(self._wake)

    def close(self) -> None:
        self._engine.close()

    @property
    def _model(self) -> list[Any]:
        """Returns the arguments of PolicyModel.read."""
        model = self._config.model
        return [str(self._worker.facts.model_dir), model.dtype, model.lora and model.lora.model_dump()]

    async def _load_saved(self, adapters: str) -> None:
        """Uses the adapters in a folder, of the version that the worker has from its start."""
        await self._engine.call_workers("asyncrl_attach_saved", self._model, adapters, self.version)
        await self._load_weights(self.version)
        await self._engine.resume()

    async def _attach(self, fields: list[Any]) -> None:
        """Has vLLM's workers open a version and check its digest, while samples go on. Raises what they refuse it
        with."""
        for refused in await self._engine.call_workers("asyncrl_attach", self._model, fields):
            if refused:
                kind, _, why = refused.partition(": ")
                raise {"PeerLost": PeerLost, "WeightsError": WeightsError}[kind](why)

    async def _load_weights(self, version: int) -> None:
        """Loads the attached version between two steps, and leaves vLLM paused. An engine that got it in part is dead:
        `run` ends with an error."""
        is_loaded = False
        try:
            if not self._paused:
                await self._engine.pause()
            if self._config.generation.device == "cpu":
                await self._engine.call_workers("asyncrl_load", version)
            else:
                await self._engine.call_workers("start_weight_update")
                await self._engine.call_workers("update_weights", {"version": version})
                await self._engine.call_workers("finish_weight_update")
            if self._config.generation.kv == "recompute":
                await self._engine.drop_cache()
            is_loaded = True
        finally:
            if not is_loaded:
                self._broken = WeightsError(f"vLLM has loaded version {version} in part, and must be started again")
                self._wakeup.set()

    def _startable(self) -> Iterable[SampleRequest]:
        """Takes the requests that may start out of the queue; others keep their place in it."""
        early: deque[SampleRequest] = deque()
        starting = list[SampleRequest]()
        for request in self._waiting:
            has_slot = len(self._running) + len(starting) < self._config.generation.slots
            fresh = self.version != NO_WEIGHTS and request.not_before <= self.version
            (starting if has_slot and fresh else early).append(request)
        self._waiting = early
        return starting

    def _wake(self, _: "asyncio.Task[None]") -> None:
        self._wakeup.set()

    def _name(self, text: str) -> str:
        self._asked += 1
        return f"{text}-{self._asked}"

    async def _sample(self, request: SampleRequest, deliver: Deliver) -> None:
        """Samples one request and delivers it."""
        try:
            with self._worker.occupancy.computing():
                completion = await self._sampled(request)
        finally:
            del self._running[request.key]  # The next turn of this sample has the same key.
        deliver([completion])

    async def _sampled(self, request: SampleRequest) -> Completion:
        clock = asyncio.get_running_loop().time
        sample = OpenSample(request, clock() + request.deadline)
        generation = self._config.generation
        settings = {
            "temperature": request.temperature,
            "top_p": generation.top_p,
            "top_k": generation.top_k,
            "min_p": generation.min_p,
            "seed": sampling_seed(request),
            "max_tokens": request.max_new_tokens,
            "stop_token_ids": self.end_ids.tolist(),
        }
        stream = self._engine.tokens(self._name("sample"), request.prompt, str(self.version), **settings)
        async with aclosing(stream) as tokens:
            async for token, logprob in tokens:
                sample.add(token, logprob, self.version)
                if finish := sample.finish(self.tokenizer, self.end_ids, clock()):
                    return sample.completion(finish, self.tokenizer)
        raise PeerLost("vLLM ended a sample that has neither an end-of-sequence token nor all of its tokens")


def _generation_config(folder: Path) -> Any:
    """Returns the model's generation config, whose end ids those of its config.json are where it has none."""
    try:
        return GenerationConfig.from_pretrained(folder)
    except OSError:
        return GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder))


class OpenSample:
    """Takes tokens as they arrive and says when the sample has ended: after an end-of-sequence token, a stop string,
    the last token that was asked for, or the first token after the deadline. ends_at: in seconds of the clock that
    `add` is told. What arrives later is not part of the sample."""

    def __init__(self, request: SampleRequest, ends_at: float) -> None:
        self.request = request
        self._ends_at = ends_at
        self._sampled = 0
        self._tokens = np.zeros(request.max_new_tokens, np.int32)
        self._logprobs = np.zeros(request.max_new_tokens, np.float32)
        self._versions = np.zeros(request.max_new_tokens, np.int32)

    def add(self, token: int, logprob: float, version: int) -> None:
        self._tokens[self._sampled] = token
        self._logprobs[self._sampled] = logprob
        self._versions[self._sampled] = version
        self._sampled += 1

    def finish(self, tokenizer: TokenizerWithStops, end_ids: NDArray[np.int64], now: float) -> Finish | None:
        """Returns why the sample has ended with its newest token, or None while it goes on."""
        if self._tokens[self._sampled - 1] in end_ids:
            return "stop"
        if tokenizer.stops(self._tokens[: self._sampled]):
            return "stop_string"
        if self._sampled >= self.request.max_new_tokens or now >= self._ends_at:
            return "length"
        return None

    def completion(self, finish: Finish, tokenizer: TokenizerWithStops) -> Completion:
        """Returns a copy of what was recorded."""
        tokens = self._tokens[: self._sampled].copy()
        text = tokenizer.before_stop(tokens) if finish == "stop_string" else tokenizer.decode(tokens)
        logprobs = self._logprobs[: self._sampled].copy()
        versions = self._versions[: self._sampled].copy()
        return Completion(self.request, tokens, logprobs, versions, finish, text)


def sampling_seed(request: SampleRequest) -> int:
    """Returns the seed of vLLM's random numbers for a turn, 63 bits: that of the member, another one in later turns,
    which would draw the numbers of the first turn again."""
    return (request.seed + request.drawn * int(GAMMA)) % 2**63

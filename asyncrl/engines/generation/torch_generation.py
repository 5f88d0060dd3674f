"""The `torch` engine beside an event loop.

    submit ── requests ────┐                          ┌── finished samples ── deliver
    update ── new weights ─┼── compute thread, in turn ┤
                           └── slices of decode steps ─┘

All calls of TorchEngine run on the compute thread, so that a change of weights falls between two decode steps.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.devices import refuse_unusable
from asyncrl.engines.generation.engine_interface import NO_WEIGHTS, Completion, EngineLoad, Key, SampleRequest
from asyncrl.engines.generation.tokenization import TokenizerWithStops, TurnRenderer
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.models.lora import read_adapters
from asyncrl.errors import Refused
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.lanes.weights.transports.transport_ends import WeightReceiver, open_receiver
from asyncrl.protocols.batch import SampleName
from asyncrl.protocols.messages import Published

E = TypeVar("E", bound=TorchEngine)

SLICE_SECONDS = 0.02  # longest wait of another call for the compute thread, plus one decode step


class RunsTorchEngine:
    """Tells what a torch engine, `core`, knows of its model, and the version of its weights."""

    core: TorchEngine

    @property
    def tokenizer(self) -> TokenizerWithStops:
        return self.core.tokenizer

    @property
    def turns(self) -> TurnRenderer:
        return self.core.turns

    @property
    def context(self) -> int | None:
        return self.core.context

    @property
    def version(self) -> int:
        return self.core.version


async def load_engine(worker: WorkerContext, engine: Callable[..., E]) -> E:
    """Loads an engine on the compute thread. Raises ConfigError for a model or device that cannot be used."""
    refuse_unusable("generation.device", worker.config.generation.device)
    version = worker.spec.options.get("own_version", NO_WEIGHTS)
    return await worker.compute.run(engine, worker.facts.model_dir, worker.config, version)


class TorchGeneration(RunsTorchEngine):
    """Runs a TorchEngine, `core`, on the compute thread of a worker, in slices of decode steps. in_place: whether
    weights on the same device are read where the transport has them, under a lease; others are copied. Only the compute
    thread changes `core`: what the event loop asks meanwhile takes effect between two steps. The service calls it.
    """

    def __init__(self, core: TorchEngine, worker: WorkerContext, *, in_place: bool) -> None:
        self.core = core
        self._worker = worker
        self._in_place = in_place
        self._aborted: list[Key] = []
        self._released: list[SampleName] = []  # Parked sequences of these, and of groups before the next, are dropped.
        self._oldest = 0
        self._wakeup = asyncio.Event()
        self._step_lock = threading.Lock()  # guards the two below, which loop and compute thread share
        self._paused = False
        self._steps_begun = 0
        self._receiver: WeightReceiver | None = None

    @classmethod
    async def open(
        cls, worker: WorkerContext, *, copies: bool, engine: Callable[..., TorchEngine] = TorchEngine
    ) -> "TorchGeneration":
        """Loads the model on the compute thread. copies: whether weights are copied even where they need not be. Raises
        ConfigError for a model or device that cannot be used."""
        core = await load_engine(worker, engine)
        if adapters := worker.spec.options.get("adapters"):
            tensors = await worker.compute.run(read_adapters, Path(adapters))
            await worker.compute.run(partial(core.load, share=False), tensors, core.version)
        return cls(core, worker, in_place=not copies)

    async def submit(self, requests: Sequence[SampleRequest]) -> None:
        await self._worker.compute.run(self.core.submit, *requests)
        self._wakeup.set()

    def abort(self, keys: Iterable[Key]) -> None:
        self._aborted += keys
        self._wakeup.set()

    def forget(self, samples: Iterable[SampleName], oldest: int) -> None:
        self._released += samples
        self._oldest = max(self._oldest, oldest)
        self._wakeup.set()

    def load(self) -> EngineLoad:
        core = self.core
        hits = core.parked.hits
        misses = core.parked.misses
        return EngineLoad(core.running, core.waiting, core.cache_used, core.preemptions, hits, misses)

    async def pause(self) -> int:
        return self._set_paused(True)

    async def resume(self) -> int:
        steps = self._set_paused(False)
        self._wakeup.set()
        return steps

    async def put_away(self) -> None:
        """Frees weights, keys and values; `update` goes on with the samples that run."""
        await self._worker.compute.run(self.core.put_away)

    async def update(self, published: Published) -> None:
        if self._worker.handover is not None:
            await self.load_own(published.version)
            return
        if self._receiver is None:
            device = self.core.device.type
            self._receiver = open_receiver(published, self.core.spec, self._worker.weight_network, device)
        with self._worker.occupancy.awaiting_weights():
            fetched = await self._receiver.fetch(published)
        if fetched.bytes:
            size, error = fetched
            self._worker.log.info("weights fetched", version=published.version, bytes=size, error=error)
        await self._worker.compute.run(self._load_weights, self._receiver, published)
        self._wakeup.set()

    async def begin_again(self) -> None:
        """Forgets all requests and the weights, whose next version comes from another trainer. Raises Refused where
        what the receiver has open ends with its process."""
        if self._receiver is not None and not self._receiver.reopens:
            raise Refused(f"{self._worker.spec.instance} receives weights from one trainer only")
        self._aborted = []
        self._released = []
        self._oldest = 0
        self._set_paused(False)
        await self._worker.compute.run(self.core.begin_again)
        self.close()
        self._receiver = None

    async def load_own(self, version: int) -> None:
        """Loads weights that the trainer's rank in this process has gathered. Raises Refused when it holds none."""
        assert self._worker.handover is not None, "the trainer's rank is in this process"
        tensors = self._worker.handover.take(version)
        await self._worker.compute.run(partial(self.core.load, share=True), tensors, version)
        self._wakeup.set()

    async def logprobs_after(self, prompt: NDArray[np.int64]) -> NDArray[np.float32]:
        return await self._worker.compute.run(self.core.logprobs_after, prompt)

    async def run(self, deliver: Callable[[Sequence[Completion]], None]) -> None:
        """Runs slices of decode steps while there are samples, until cancelled. Raises the failure of the engine."""
        self.core.on_failure = partial(self._wake, asyncio.get_running_loop())
        while True:
            # Requests without a slot, while nothing runs, need weights that are on their way.
            occupancy = self._worker.occupancy
            late = self.core.waiting and not self._paused
            with occupancy.awaiting_weights() if late else occupancy.out_of_work():
                await self._wakeup.wait()
            self._wakeup.clear()
            more = True
            while self.core.failure or self._aborted or self._released or (more and not self._paused):
                aborted = self._aborted
                released = self._released
                self._aborted = []
                self._released = []
                done, more = await self._worker.compute.run(self._run_slice, aborted, released)
                deliver(done)
                await asyncio.sleep(0)  # Lets callers run where the compute thread is this event loop.

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()

    def _run_slice(self, aborted: Iterable[Key], released: Iterable[SampleName]) -> tuple[list[Completion], bool]:
        """Ends aborted requests, then steps until a request finishes, another call waits or the slice is over. Returns
        the finished requests, and whether there is more to sample. Keys and values of released samples are dropped."""
        if self.core.failure is not None:
            raise self.core.failure
        self.core.end(aborted, "abort")
        self.core.forget(released, self._oldest)
        tracer = self._worker.tracer
        core = self.core
        tracer.count("samples", running=core.running, waiting=core.waiting)
        with tracer.lane("decode", running=core.running):
            return self._decode(), core.active

    def _decode(self) -> list[Completion]:
        until = time.monotonic() + SLICE_SECONDS
        done: list[Completion] = []
        with self.core.slice():
            while not done and self.core.active:
                with self._step_lock:
                    if self._paused:
                        break
                    self._steps_begun += 1
                done = self.core.step()
                if self._worker.compute.queued > 1 or time.monotonic() >= until:
                    break
        return done

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(self._end_run)

    def _end_run(self) -> None:
        self._worker.log.error("the ranks of the replica cannot go on", error=str(self.core.failure))
        self._wakeup.set()

    def _set_paused(self, paused: bool) -> int:
        """Prevents or allows further steps; returns the number of steps begun."""
        with self._step_lock:
            self._paused = paused
            return self._steps_begun

    def _load_weights(self, receiver: WeightReceiver, published: Published) -> None:
        """Loads weights on the compute thread."""
        with self._worker.occupancy.exchanging(), self._worker.tracer.span("flip", version=published.version):
            tensors = receiver.tensors(published)
            on_device = all(tensor.device == self.core.device for tensor in tensors.values())
            self.core.load(tensors, published.version, share=self._in_place and on_device)
            receiver.check(published)

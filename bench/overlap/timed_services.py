"""Services whose work is only time, booked as that of real ones is: busy, sync, overhead and idle.

They run unchanged in processes and on the virtual clock, because they wait on the event loop. What a wait really took
is what is booked, so a late timer of a busy machine is busy time and not the runtime's.
"""

import asyncio
import heapq
import itertools
import math
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self

import numpy as np

from asyncrl.config.gate_config import GateConfig
from asyncrl.fleet.fleet import ServiceSpec
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.protocols.batch import Array, Batch, BatchRef, Cuts
from asyncrl.protocols.messages import PromptGroup, Published, StepReport
from asyncrl.protocols.service_contracts import Generation, Reference, Reward, Training
from asyncrl.simulation.fakes.fake_service import FakeService, now
from asyncrl.simulation.fakes.generation import FakeGeneration, FakeSequence, Lengths, Spans
from asyncrl.simulation.fakes.scoring import FakeReference, FakeReward
from asyncrl.simulation.fakes.training import FakeTraining, StepCost

# Describes how long the timed stages take, in a form that worker processes get as options.


Update = Literal["in flight", "drain"]


@dataclass(frozen=True, slots=True)
class LengthSpread:
    """Draws the tokens of completions: lognormal with this mean before they are cut at `cap`; all equal at sigma 0."""

    mean: float
    sigma: float = 0.0
    cap: int = 1 << 20

    def lengths(self) -> Lengths:
        middle = math.log(self.mean) - self.sigma**2 / 2

        def draw(chance: random.Random) -> int:
            return max(1, min(self.cap, round(math.exp(chance.gauss(middle, self.sigma)))))

        return draw


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Says how long a step of timed stages takes, in seconds.

    lengths: of completions. A token of each of b running samples takes `token + each * b` (weights are read once for
    all, the cache for each). slots: samples that one generator decodes at one time. update: whether generators take new
    weights between two tokens, or once all their running samples have ended. load: seconds in which a generator loads
    them. score, reference: seconds of a sample; reference 0: the service is left out. step, trained_token: a training
    step takes `step + trained_token * tokens`. publish: seconds in which the trainer writes its weights.
    """

    lengths: LengthSpread
    token: float = 0.0
    each: float = 0.0
    slots: int = 64
    update: Update = "in flight"
    load: float = 0.0
    score: float = 0.0
    reference: float = 0.0
    step: float = 0.0
    trained_token: float = 0.0
    publish: float = 0.0

    def token_seconds(self, running: int) -> float:
        """Returns tau(b) = t0 + t1 b."""
        return self.token + self.each * running

    def options(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        values = dict(options)
        return cls(lengths=LengthSpread(**values.pop("lengths")), **values)


TEXT = np.frombuffer(b"timed", np.uint8)
ROWS_AT_ONCE = 128
"""Rows that the trainer reads in one go; more are copied in a thread, which virtual time does not wait for."""
STAMP_BYTES = 4
"""Bytes of a row for each token: the version that sampled it."""
ROUNDING = 1e-9
"""Tokens by which a completion may be short of its end when its timer fires."""


def timed_services(times: StageTimes, generators: int = 1) -> dict[str, ServiceSpec]:
    """Returns the specifications of the services by name."""
    contracts: dict[type[Any], int] = {Generation: generators, Reward: 1, Training: 1}
    if times.reference:
        contracts[Reference] = 1
    return {
        (name := contract.__name__.lower()): ServiceSpec(
            name,
            contract,
            f"{__name__}:Timed{contract.__name__}",
            replicas,
            options={"times": times.options()},
        )
        for contract, replicas in contracts.items()
    }


class TimedService(FakeService):
    """Works on one thing at a time, as a compute thread does."""

    def __init__(self) -> None:
        self.times = StageTimes.of(self.context.spec.options["times"])
        self._turn_to_compute = asyncio.Lock()

    async def spend(self, seconds: float) -> None:
        async with self._turn_to_compute:
            with self.context.occupancy.computing():
                await asyncio.sleep(seconds)


class TimedGeneration(TimedService, FakeGeneration):
    """Decodes all running samples side by side, a token of each at a time, the slower the more of them run.

    decoded: tokens that a sample which runs from the start would have by now; samples that run keep their end on this
    scale, so nothing is done for tokens between two ends.
    """

    def __init__(self, context: WorkerContext) -> None:
        times = StageTimes.of(context.spec.options["times"])
        self.row_bytes = 512 + STAMP_BYTES * context.config.generation.max_new_tokens
        FakeGeneration.__init__(self, times.slots, times.token, times.lengths.lengths(), times.load, context=context)
        TimedService.__init__(self)
        self.decoded = 0.0
        self._counted_until = 0.0
        self._ends: list[tuple[float, int, FakeSequence]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._draining = False
        self._drained = asyncio.Event()
        self._scope: AbstractContextManager[None] | None = None
        self._flipped_at: list[float] = []

    @property
    def row_slots(self) -> int:
        return GateConfig.of(self.context.config).row_slots

    async def load_weights(self, published: Published) -> None:
        """Takes the weights between two tokens, or when no sample runs; nothing is decoded meanwhile."""
        if self.times.update == "drain" and self._sampling:
            self._draining = True
            self._drained.clear()
            await self._drained.wait()
        self._count()
        self._paused = True
        self._book()
        with self.context.occupancy.exchanging(), self.context.tracer.span("flip", version=published.version):
            await asyncio.sleep(self.flip_time)
        self._draining = self._paused = False
        self._counted_until = now()
        self._flipped_at.append(self.decoded)
        self._book()

    def columns(self, sequence: FakeSequence, spans: Spans) -> dict[str, Array]:
        return {**super().columns(sequence, spans), "text": TEXT}

    async def generate(self, prompts: PromptGroup) -> AsyncIterator[BatchRef]:
        async for samples in super().generate(prompts):
            for row in samples:  # Here, because the arrow begins at the span of this call.
                self.context.tracer.flow_start(f"sample {row.group}.{row.member}.{row.attempt}")
            yield samples

    def _fill_slots(self) -> None:
        if self._draining or self._paused:
            return
        self._count()
        while self._queue and len(self._sampling) < self.slots:
            if self._queue[0].prompts.not_before > self.version:
                super()._fill_slots()  # Which lets others pass.
                break
            sequence = self._queue.popleft()
            self._begin(sequence)
            self._sampling[sequence] = None
        self._book()

    def _begin(self, sequence: FakeSequence) -> None:
        sequence.began = self.decoded
        heapq.heappush(self._ends, (self.decoded + sequence.tokens, next(self._numbers), sequence))

    def _leave_slot(self, sequence: FakeSequence) -> None:
        del self._sampling[sequence]
        self.busy += self.decoded - sequence.began

    def _spans(self, sequence: FakeSequence) -> Spans:
        """Returns the tokens by version: each is sampled by the weights that are there when it begins."""
        flips = [round(at - sequence.began) for at in self._flipped_at[1:]]
        ends = [min(sequence.tokens, max(0, flip)) for flip in flips] + [sequence.tokens]
        spans = zip((version for _, version in self._flips), [0, *ends[:-1]], ends, strict=True)
        return tuple((version, end - start) for version, start, end in spans if end > start)

    def _count(self) -> None:
        """Counts the tokens since the last call, in which the same samples ran."""
        if self._sampling and not self._paused:
            self.decoded += (now() - self._counted_until) / self.times.token_seconds(len(self._sampling))
        self._counted_until = now()

    def _book(self) -> None:
        """Sets the timer of the next end, and books time as busy while samples run."""
        runs = bool(self._sampling) and not self._paused
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and self._ends[0][2] not in self._sampling:
            heapq.heappop(self._ends)
        if runs:
            left = max(0.0, self._ends[0][0] - self.decoded) * self.times.token_seconds(len(self._sampling))
            self._timer = asyncio.get_running_loop().call_later(left, self._end_samples)
        if runs != (self._scope is not None):
            self._set_state(runs)

    def _set_state(self, runs: bool) -> None:
        if self._scope is not None:
            self._scope.__exit__(None, None, None)
        self._scope = self.context.occupancy.computing() if runs else None
        if self._scope is not None:
            self._scope.__enter__()

    def _end_samples(self) -> None:
        self._count()
        done = []
        while self._ends and self._ends[0][0] <= self.decoded + ROUNDING * max(1.0, self.decoded):
            sequence = heapq.heappop(self._ends)[2]
            if sequence in self._sampling:
                done.append((sequence, self._spans(sequence)))
                self._leave_slot(sequence)
        for sequence, spans in done:
            sequence.answers.put_nowait(self.row(sequence, spans))
        if self._draining and not self._sampling:
            self._drained.set()
        self._fill_slots()
        self._book()


class TimedReward(TimedService, FakeReward):
    def __init__(self, context: WorkerContext) -> None:
        FakeReward.__init__(self, 0.0, context=context)
        TimedService.__init__(self)

    def seconds_for(self, samples: BatchRef) -> float:
        return self.times.score * len(samples)


class TimedReference(TimedService, FakeReference):
    row_bytes = 512

    def __init__(self, context: WorkerContext) -> None:
        FakeReference.__init__(self, 0.0, context=context)
        TimedService.__init__(self)

    def seconds_for(self, samples: Any) -> float:
        return self.times.reference * len(samples)


class TimedTraining(TimedService, FakeTraining):
    def __init__(self, context: WorkerContext) -> None:
        times = StageTimes.of(context.spec.options["times"])
        deadline = 2 * context.config.staleness.publish_deadline
        cost = StepCost(times.step, times.trained_token)
        FakeTraining.__init__(self, cost, None, slot_patience=deadline, context=context)
        TimedService.__init__(self)

    async def prefetch(self, samples: BatchRef) -> list[bool]:
        return [False] * len(samples)

    async def read(self, samples: BatchRef, columns: Any) -> Batch:
        starts = range(0, len(samples), ROWS_AT_ONCE)
        parts = [samples.take(range(start, min(start + ROWS_AT_ONCE, len(samples)))) for start in starts]
        return Batch.join([await self.context.reader.read(part, columns) for part in parts])

    async def step(self, cuts: Cuts) -> StepReport:
        for row in cuts.batch:
            self.context.tracer.flow_end(f"sample {row.group}.{row.member}.{row.attempt}")
        return await super().step(cuts)

    async def train(self, cuts: Cuts, rows: Batch) -> StepReport:
        report = await super().train(cuts, rows)
        with self.context.occupancy.exchanging():
            await asyncio.sleep(self.times.publish)
        trained = sum(sample.trained for sample in report.samples)
        return replace(report, metrics={**report.metrics, "tokens/trained": float(trained)})

    async def _wait_for_slot(self) -> None:
        with self.context.occupancy.awaiting_weights():
            await super()._wait_for_slot()

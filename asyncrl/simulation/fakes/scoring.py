"""Reward, reference and critic services whose work is only time."""

import asyncio
import random
from collections.abc import Iterable, Sequence, Sized
from typing import Any

import numpy as np

from asyncrl.errors import LostRows, Refused
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.protocols.batch import BatchRef, Cuts, RowRef, SampleName
from asyncrl.protocols.messages import Checkpointed, Score, ValueReport
from asyncrl.protocols.prompt_row import PackedRow
from asyncrl.protocols.service_contracts import Critic, Reference, Reward
from asyncrl.simulation.fakes.fake_service import FakeService

MANY = 1 << 20
"""Calls at one time that no simulated run makes."""


class FakeReward(FakeService, Reward):
    """Scores half of the samples 1 and the others 0, after about `delay` seconds.

    at_once: calls that it works on at one time. unscorable: share of the samples that get no reward. read_columns:
    columns that it reads before it scores; none: it reads no rows.
    """

    def __init__(
        self,
        delay: float,
        unscorable: float = 0.0,
        read_columns: Sequence[str] = (),
        context: WorkerContext | None = None,
        at_once: int = MANY,
    ) -> None:
        super().__init__("reward", context)
        self._free = asyncio.Semaphore(at_once)
        self.delay = delay
        self.unscorable = unscorable
        self._read_columns = read_columns

    async def score(self, samples: BatchRef, row: dict[str, Any] | PackedRow) -> list[Score]:
        if self._read_columns:
            await self.read_checked(samples, self._read_columns)
        async with self._free:
            await self.spend(self.seconds_for(samples))
        return [self.value_of(sample) for sample in samples]

    def seconds_for(self, samples: BatchRef) -> float:
        return self.delay * random.Random(f"delay {[row.name for row in samples]}").uniform(0.5, 1.5)

    def value_of(self, sample: RowRef) -> Score:
        chance = random.Random(f"reward {sample.key}")
        reward = None if chance.random() < self.unscorable else float(chance.random() < 0.5)
        return Score(reward, {} if reward is None else {"coin": reward})


class FakeReference(FakeService, Reference):
    """Reads the rows and, after `delay` seconds, adds log-probabilities of 0."""

    row_bytes = 16_384

    def __init__(
        self,
        delay: float,
        peers: Iterable[FakeService] = (),
        read_columns: Sequence[str] = ("versions",),
        context: WorkerContext | None = None,
    ) -> None:
        super().__init__("reference", context, peers)
        self.delay = delay
        self._read_columns = read_columns

    async def logprobs(self, samples: BatchRef) -> BatchRef:
        await self.read_checked(samples, self._read_columns)
        await self.spend(self.seconds_for(samples))
        return samples.with_places(
            [self.keep(row.name, {"reference_logprobs": np.zeros(row.tokens, np.float32)}) for row in samples]
        )

    def seconds_for(self, samples: Sized) -> float:
        return self.delay


# A critic whose work is only time; it remembers which samples it has learnt from.


class FakeCritic(FakeService, Critic):
    """Values samples in `delay` seconds and learns from a batch in `cost` seconds; it never runs in a worker.

    signal: "cost" for a critic of costs. learnt: samples in its loss, with the version that the policy had then.
    """

    row_bytes = 64

    def __init__(self, delay: float, cost: float, peers: Iterable[FakeService] = (), signal: str = "") -> None:
        prefix = f"{signal}_" if signal else ""
        super().__init__(f"{prefix}critic", None, peers)
        self.delay = delay
        self.cost = cost
        self.learnt: dict[SampleName, int] = {}
        self._columns = (f"{prefix}values", f"{prefix}valued_at")
        self._version = 0

    def restore(self, version: int) -> None:
        self._version = version

    async def values(self, samples: BatchRef) -> BatchRef:
        await self.read(samples, ())
        await self.spend(self.delay)
        nothing = dict.fromkeys(self._columns, np.zeros(0, np.float32))
        return samples.with_places([self.keep(row.name, nothing) for row in samples])

    async def update(self, cuts: Cuts) -> ValueReport:
        if cuts.incarnation != self.incarnation or cuts.version < self._version:
            raise Refused(
                f"an update from version {cuts.version} was refused: the critic has learnt from {self._version}"
            )
        self._version = cuts.version
        fresh = [row for row in cuts.batch if row.name not in self.learnt]
        if not fresh:
            return self._report(cuts, 0, "learnt before")
        try:
            await self.read(BatchRef(tuple(fresh)), ())
        except LostRows:
            return self._report(cuts, 0, "rows lost")
        self.learnt |= dict.fromkeys((row.name for row in fresh), cuts.version)
        await asyncio.sleep(self.cost)
        return self._report(cuts, 1, "")

    async def undo_update(self) -> None:
        """Learns a batch at its beginning, and then only takes time."""

    async def copy_state(self, incarnation: int, version: int) -> None:
        """Copies nothing: a resumed critic begins anew."""

    async def checkpoint(self, directory: str, incarnation: int, version: int) -> Checkpointed:
        return Checkpointed(version, "", {})

    def _report(self, cuts: Cuts, updates: int, skipped: str) -> ValueReport:
        metrics = {f"{self.service}/updates": float(updates)}
        return ValueReport(cuts.incarnation, cuts.version, updates, skipped, metrics)

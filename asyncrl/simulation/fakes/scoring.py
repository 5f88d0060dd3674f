"""Reward and reference services whose work is only time."""

import asyncio
import random
from collections.abc import Iterable, Sequence, Sized
from typing import Any

import numpy as np

from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.protocols.batch import BatchRef, RowRef
from asyncrl.protocols.messages import Score
from asyncrl.protocols.prompt_row import PackedRow
from asyncrl.protocols.service_contracts import Reference, Reward
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

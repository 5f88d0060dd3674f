"""An environment whose work is only time; how many turns an episode has follows from its sample."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.protocols.batch import BatchRef, RowRef, SampleName
from asyncrl.protocols.messages import Opening, PromptGroup
from asyncrl.protocols.prompt_row import PackedRow
from asyncrl.protocols.service_contracts import Environment
from asyncrl.simulation.fakes.fake_service import KEY, FakeService


class FakeEnvironment(FakeService, Environment):
    """Answers a turn in `delay` seconds, and ends an episode after one to `turns` of them.

    answered: turns that this instance answered, by sample. A repeated call gets the stored row.
    """

    renews = False
    row_bytes = 65_536

    def __init__(
        self,
        delay: float,
        turns: int,
        peers: Iterable[FakeService] = (),
        context: WorkerContext | None = None,
    ) -> None:
        super().__init__("environment", context, peers)
        self.delay = delay
        self.turns = turns
        self.answered: dict[SampleName, RowRef] = {}

    async def reset(self, prompts: PromptGroup, row: dict[str, Any] | PackedRow) -> Opening:
        await self.spend(self.delay)
        return Opening(prompts.prompt)

    async def step(self, samples: BatchRef, row: dict[str, Any] | PackedRow) -> BatchRef:
        known = {sample.name: self.answered.get(sample.name) for sample in samples}
        fresh = tuple(sample for sample in samples if not _is_of_turn(known[sample.name], sample))
        rows = await self.read_checked(BatchRef(fresh), ["versions"])
        await self.spend(self.delay)
        for sample, stamps in zip(fresh, rows["versions"], strict=True):
            assert len(stamps) == sample.tokens, f"{sample} led to the row of another turn"
            columns = {
                "versions": stamps,
                "turn_rewards": np.zeros(sample.turns, np.float32),
                KEY: np.array(sample.name, np.int32),
            }
            finish = "stop" if sample.turns >= self.turns_of(sample) else ""
            self.answered[sample.name] = sample._replace(finish=finish, places=(self.keep(sample.name, columns),))
        return BatchRef(tuple(self.answered[sample.name] for sample in samples))

    async def release(self, samples: list[SampleName], oldest: int) -> None:
        await super().release(samples, oldest)
        self._forget(lambda name: 0 <= name[0] < oldest)
        for group, member, attempt in samples:
            for earlier in range(attempt + 1):
                self.answered.pop((group, member, earlier), None)

    def die(self) -> None:
        self.answered.clear()
        super().die()

    def turns_of(self, sample: RowRef) -> int:
        return random.Random(f"turns {sample.key}").randint(1, self.turns)

    def _forget(self, over: Callable[[SampleName], bool]) -> None:
        self.answered = {name: row for name, row in self.answered.items() if not over(name)}


def _is_of_turn(known: RowRef | None, sample: RowRef) -> bool:
    return known is not None and known.turns == sample.turns

"""The reward service: scores samples with the user's functions, which run in children that can be killed."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.protocols.batch import BatchRef, RowRef
from asyncrl.protocols.contracts import Reward
from asyncrl.protocols.messages import Score
from asyncrl.rewards.functions import function_specs
from asyncrl.rewards.gathering import Gathering
from asyncrl.rewards.here import HerePool
from asyncrl.rewards.pool import Pool
from asyncrl.rewards.sample import Function, Sample, Verdict
from asyncrl.rewards.scoring import score_of
from asyncrl.service import Service, WorkerContext
from asyncrl.together import together

TEXT = "text"
"""The column that is read: the completion as uint8 UTF-8, made by generation."""

SHARE_OF_CALL = 0.9
"""Of a call's deadline that a group may wait for its members, so that there is time left to judge those that came."""


class RewardService(Service, Reward):
    """Each sample is scored by all functions of `reward.functions`; the score is their weighted sum."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        config = context.config
        self._pool: Pool | HerePool = self.make_pool(context)
        patience = SHARE_OF_CALL * min(config.generation.deadline, config.fleet.call_deadline)
        self._gathering = Gathering(self._judge_group, patience, context.tasks)
        self._single = [number for number, spec in enumerate(self._pool.specs) if not spec.group]
        self._grouped = [number for number, spec in enumerate(self._pool.specs) if spec.group]

    @staticmethod
    def make_pool(context: WorkerContext) -> Pool | HerePool:
        """Where the functions run."""
        config = context.config
        return Pool(
            function_specs(config.reward),
            context.tasks,
            workers=config.reward.workers,
            deadline=config.reward.deadline,
            start_deadline=config.fleet.start_deadline,
        )

    async def start(self) -> None:
        await self._pool.start()

    async def stop(self) -> None:
        await self._pool.stop()
        await super().stop()

    @property
    def queued(self) -> int:
        return self._pool.queued

    async def score(self, samples: BatchRef, row: dict[str, Any]) -> list[Score]:
        """Raises RewardError under on_error = "fail", LostRows when a sample is gone."""
        texts = (await self.context.reader.read(samples, [TEXT]))[TEXT]
        return await together(*(self._score(ref, bytes(text), row) for ref, text in zip(samples, texts, strict=True)))

    async def _score(self, ref: RowRef, completion: bytes, row: dict[str, Any]) -> Score:
        text = completion.decode("utf-8", errors="replace")
        judged = Sample(row["prompt"], text, row, ref.group, ref.member, ref.finish, ref.tokens)
        verdicts = await self._verdicts(judged, ref)
        score = score_of(judged, self._pool.specs, verdicts, self.context.config.reward.on_error)
        if score.error:
            self.counters["failed"] = self.counters.get("failed", 0) + 1
            self.context.log.warning("reward failed", group=ref.group, member=ref.member, error=score.error)
        return score

    async def _verdicts(self, sample: Sample, ref: RowRef) -> list[Verdict]:
        """In the order of the functions."""
        async with asyncio.TaskGroup() as tasks:
            single = {number: tasks.create_task(self._run(number, [sample])) for number in self._single}
            grouped = await self._of_group(sample, ref) if self._grouped else []
        found = {number: task.result()[0] for number, task in single.items()}
        found |= dict(zip(self._grouped, grouped, strict=True))
        return [found[number] for number in range(len(self._pool.specs))]

    async def _of_group(self, sample: Sample, ref: RowRef) -> list[Verdict]:
        config = self.context.config
        # Evaluation's groups have negative ids.
        members = config.task.samples_per_prompt if ref.group >= 0 else config.evaluate.samples
        return await self._gathering.judged((ref.group, ref.attempt), members, sample)

    async def _judge_group(self, samples: list[Sample]) -> list[list[Verdict]]:
        by_function = [await self._run(number, samples) for number in self._grouped]
        return [list(verdicts) for verdicts in zip(*by_function, strict=True)]

    async def _run(self, function: int, samples: list[Sample]) -> list[Verdict]:
        with self.context.occupancy.computing():
            return await self._pool.run(function, samples)


def reward_service_of(functions: Sequence[Function]) -> Callable[[WorkerContext], RewardService]:
    """Makes the service for functions that exist in this process only."""

    class Here(RewardService):
        @staticmethod
        def make_pool(context: WorkerContext) -> HerePool:
            return HerePool(functions, context.config.reward.deadline)

    return Here

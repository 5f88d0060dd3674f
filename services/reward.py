"""Scores samples with the functions of the user, which run in child processes that can be killed."""

from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.concurrency import gather
from asyncrl.fleet.worker.service import Service, WorkerContext
from asyncrl.protocols.batch import BatchRef, RowRef
from asyncrl.protocols.contracts import Reward
from asyncrl.protocols.messages import Score
from asyncrl.rewards.execution.child_pool import ChildPool
from asyncrl.rewards.execution.thread_pool import InProcessPool, named
from asyncrl.rewards.functions import FunctionSpec, Scorer, function_specs, load, overlong_specs, section_of
from asyncrl.rewards.group_barrier import GroupBarrier
from asyncrl.rewards.sample import Function, FunctionResult, Sample
from asyncrl.rewards.scoring import score_of

TEXT = "text"
"""Column that generation writes: the completion as uint8 UTF-8."""

SHARE_OF_CALL = 0.9
"""Share of the deadline of a call that a group waits for its members; the rest is for scoring them."""


class RewardService(Service, Reward):
    """Scores each sample with all functions of `reward.functions`; the score is their weighted sum. The service `cost`
    uses the functions of `cost.functions`."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        config = context.config
        self._section = section_of(config, _scorer_of(context))
        self._pool: ChildPool | InProcessPool = self.make_pool(context)
        self._specs: tuple[FunctionSpec, ...] = self._pool.specs
        group_deadline = SHARE_OF_CALL * min(config.generation.deadline, config.fleet.call_deadline)
        self._barrier = GroupBarrier(self._score_group, group_deadline, context.tasks)
        self._single = [number for number, spec in enumerate(self._pool.specs) if not spec.group]
        self._grouped = [number for number, spec in enumerate(self._pool.specs) if spec.group]

    @staticmethod
    def make_pool(context: WorkerContext) -> ChildPool | InProcessPool:
        """Makes the pool of children in which the functions run."""
        service = _scorer_of(context)
        section = section_of(context.config, service)
        return ChildPool(
            function_specs(context.config, service),
            context.tasks,
            workers=section.workers,
            deadline=section.deadline,
            start_deadline=context.config.fleet.start_deadline,
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
        """Scores samples that share the prompt row `row`.

        Raises:
            RewardError: a function failed under on_error = "fail".
            LostRows: a sample is gone.
        """
        async with self.context.reader.views(samples, [TEXT]) as found:
            texts = [_sample(ref, bytes(text), row) for ref, text in zip(samples, found[TEXT], strict=True)]
        results = await self._score_all(samples, texts)
        return [self._weighted_sum(sample, own) for sample, own in zip(texts, results, strict=True)]

    def _weighted_sum(self, sample: Sample, results: list[FunctionResult]) -> Score:
        score = score_of(sample, self._specs, results, self._section.on_error)
        if score.error:
            self.counters["failed"] = self.counters.get("failed", 0) + 1
            self.context.log.warning("reward failed", group=sample.group, member=sample.member, error=score.error)
        return score

    async def _score_all(self, refs: BatchRef, samples: list[Sample]) -> list[list[FunctionResult]]:
        """Returns the results of all functions for each sample, in the order of `_specs`."""
        if not self._pool.specs:
            return [[] for _ in samples]
        singly, in_groups = await gather(
            self._score_singly(samples), self._score_in_groups(samples, refs.rows[0].attempt)
        )
        by_function = dict(zip((*self._single, *self._grouped), (*singly, *in_groups), strict=True))
        return [
            list(of_sample) for of_sample in zip(*(by_function[number] for number in sorted(by_function)), strict=True)
        ]

    async def _score_singly(self, samples: list[Sample]) -> list[list[FunctionResult]]:
        """Returns the results of each function of single samples."""
        return list(await gather(*(self._run(number, samples) for number in self._single)))

    async def _score_in_groups(self, samples: list[Sample], attempt: int) -> list[list[FunctionResult]]:
        """Returns the results of each function of groups, once the other members of the group have arrived."""
        if not self._grouped:
            return []
        by_sample = await gather(*(self._score_member(sample, attempt) for sample in samples))
        return [list(of_function) for of_function in zip(*by_sample, strict=True)]

    async def _score_member(self, sample: Sample, attempt: int) -> list[FunctionResult]:
        config = self.context.config
        # Groups of the evaluation have negative ids.
        members = config.task.samples_per_prompt if sample.group >= 0 else config.evaluate.samples
        return await self._barrier.results((sample.group, attempt), members, sample)

    async def _score_group(self, samples: list[Sample]) -> list[list[FunctionResult]]:
        by_function = [await self._run(number, samples) for number in self._grouped]
        return [list(own) for own in zip(*by_function, strict=True)]

    async def _run(self, function: int, samples: list[Sample]) -> list[FunctionResult]:
        with self.context.occupancy.computing():
            return await self._pool.run(function, samples)


def _scorer_of(context: WorkerContext) -> Scorer:
    return "cost" if context.service == "cost" else "reward"


def _sample(ref: RowRef, completion: bytes, row: dict[str, Any]) -> Sample:
    text = completion.decode("utf-8", errors="replace")
    return Sample(row["prompt"], text, row, ref.group, ref.member, ref.finish, ref.tokens)


def reward_service_of(functions: Sequence[Function]) -> Callable[[WorkerContext], RewardService]:
    """Makes a service class for functions that exist only in this process."""

    class InProcessRewardService(RewardService):
        @staticmethod
        def make_pool(context: WorkerContext) -> InProcessPool:
            shaping = [(spec.name, load(spec)) for spec in overlong_specs(context.config)]
            return InProcessPool([*named(functions), *shaping], context.config.reward.deadline)

    return InProcessRewardService

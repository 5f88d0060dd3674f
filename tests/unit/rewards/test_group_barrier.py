import asyncio

import pytest

from asyncrl.rewards import Sample
from asyncrl.rewards.execution.scoring import GroupBarrier
from asyncrl.rewards.sample import FunctionResult


def sample(member: int, group: int = 7) -> Sample:
    return Sample("p", f"text {member}", {}, group, member, "stop", 1)


class Judge:
    """Each sample's value is how many were judged together."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    async def __call__(self, samples: list[Sample]) -> list[list[FunctionResult]]:
        self.calls.append([each.member for each in samples])
        return [[FunctionResult(float(len(samples))), FunctionResult(float(each.member))] for each in samples]


async def test_all_members_are_valued_at_once_in_order() -> None:
    judge = Judge()
    async with asyncio.TaskGroup() as tasks:
        barrier = GroupBarrier(judge, 60, tasks)
        waiting = [tasks.create_task(barrier.results((7, 0), 3, sample(member))) for member in (2, 0, 1)]
    assert judge.calls == [[0, 1, 2]]
    assert [task.result()[1].value for task in waiting] == [2, 0, 1]
    assert len(barrier) == 0


async def test_attempts_and_groups_are_kept_apart() -> None:
    judge = Judge()
    async with asyncio.TaskGroup() as tasks:
        barrier = GroupBarrier(judge, 60, tasks)
        for key in ((7, 0), (7, 1), (8, 0)):
            tasks.create_task(barrier.results(key, 2, sample(0)))
        assert judge.calls == []
        for key in ((7, 1), (8, 0), (7, 0)):
            tasks.create_task(barrier.results(key, 2, sample(1)))
    assert judge.calls == [[0, 1]] * 3


async def test_those_that_came_are_judged_when_the_rest_does_not_come() -> None:
    judge = Judge()
    async with asyncio.TaskGroup() as tasks:
        barrier = GroupBarrier(judge, 0.05, tasks)
        waiting = [tasks.create_task(barrier.results((7, 0), 4, sample(member))) for member in (1, 3)]
    assert judge.calls == [[1, 3]]
    assert [task.result()[0].value for task in waiting] == [2, 2]
    assert len(barrier) == 0


async def test_a_group_whose_members_were_all_abandoned_is_forgotten() -> None:
    async with asyncio.TaskGroup() as tasks:
        barrier = GroupBarrier(Judge(), 60, tasks)
        for member in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await barrier.results((7, 0), 4, sample(member))
        assert len(barrier) == 0


async def test_one_abandoned_member_does_not_take_the_verdicts_of_the_others() -> None:
    judge = Judge()
    async with asyncio.TaskGroup() as tasks:
        barrier = GroupBarrier(judge, 60, tasks)
        stays = tasks.create_task(barrier.results((7, 0), 3, sample(0)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await barrier.results((7, 0), 3, sample(1))
        assert (await barrier.results((7, 0), 3, sample(2)))[0].value == 3
        assert (await stays)[0].value == 3

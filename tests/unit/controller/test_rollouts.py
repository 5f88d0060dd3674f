"""The request of an attempt, prompts that generation refuses, and groups that deaths of workers are attributed to."""

import asyncio
import sys
from pathlib import Path

import pytest

from asyncrl.algorithms import grpo
from asyncrl.controller.algorithm import Algorithm
from asyncrl.controller.controller import Controller
from asyncrl.controller.rollouts import ATTRIBUTED_AFTER, ISOLATED_AFTER, Attempt, CrashAttribution
from asyncrl.errors import PeerLost, TaskError
from asyncrl.fleet.fleet import Fleet

sys.path.insert(0, str(Path(__file__).parents[1]))
from scene import Scene


@pytest.mark.trap("redone")
@pytest.mark.trap("seeds")
def test_every_attempt_at_a_group_has_its_seed_and_its_prompt_and_other_groups_have_others() -> None:
    def asked(incarnation: int) -> dict[tuple[int, int], tuple[int, object]]:
        found: dict[tuple[int, int], tuple[int, object]] = {}

        async def fail_twice(fleet: Fleet, control: Controller, group: Attempt) -> None:
            assert group.prompts.incarnation == incarnation
            found[group.prompts.id, group.prompts.attempt] = (group.prompts.seed, group.prompts.prompt)
            if group.prompts.attempt < 2:
                raise PeerLost("the worker died")
            await grpo.roll_out(fleet, control, group)

        scene = Scene()
        scene.algorithm = Algorithm(fail_twice, grpo.train)
        if incarnation:
            scene.journal.resume(incarnation, 0)
            for service in (scene.generation, scene.training):
                service.incarnation = incarnation
        scene.play()
        return found

    first, after_a_resume = asked(0), asked(2)
    groups = {group for group, attempt in first if attempt == 2}
    assert all(len({first[group, attempt] for attempt in range(3)}) == 1 for group in groups)
    assert all(first[group, 0] == after_a_resume[group, 0] for group in groups)
    assert len({first[group, 0] for group in groups}) == len(groups) >= 6


def test_a_prompt_that_generation_refuses_is_named() -> None:
    async def refuse(fleet: Fleet, control: Controller, group: Attempt) -> None:
        if group.prompts.id == 1:
            raise TaskError("the prompt has 9 tokens")
        await grpo.roll_out(fleet, control, group)

    scene = Scene()
    scene.algorithm = Algorithm(refuse, grpo.train)
    with pytest.raises(TaskError, match="row 1 of the scene: the prompt has 9 tokens"):
        scene.play()


IN_FLIGHT = range(100)


def died(crashes: CrashAttribution, *running: int) -> int | None:
    return crashes.record_death(running, IN_FLIGHT)


def test_deaths_are_attributed_to_a_group_that_was_present_often_enough() -> None:
    crashes = CrashAttribution()
    attributed = [died(crashes, 3, number) for number in range(10, 10 + ATTRIBUTED_AFTER)]
    assert attributed == [None] * (ATTRIBUTED_AFTER - 1) + [3]
    assert crashes.deaths == ATTRIBUTED_AFTER


def test_calls_of_one_group_count_once_a_death() -> None:
    crashes = CrashAttribution()
    assert died(crashes, *[3] * ATTRIBUTED_AFTER) is None


def test_a_death_without_an_earlier_group_clears_all_counts() -> None:
    for elsewhere in ((), (50, 51)):
        crashes = CrashAttribution()
        for _ in range(ATTRIBUTED_AFTER - 1):
            died(crashes, 3)
        assert died(crashes, *elsewhere) is None
        assert died(crashes, 3) is None


def test_groups_that_are_not_in_flight_any_more_are_forgotten() -> None:
    crashes = CrashAttribution()
    for _ in range(ATTRIBUTED_AFTER):
        assert crashes.record_death([3, -1], in_flight=[3]) in (None, 3)
    assert crashes.record_death([4], in_flight=[4]) is None
    assert crashes._deaths_with == {4: 1}


async def test_isolated_groups_run_one_after_the_other_and_the_others_beside_them() -> None:
    crashes, running, seen = CrashAttribution(), list[int](), list[list[int]]()
    for _ in range(ISOLATED_AFTER):
        died(crashes, 1, 2)

    async def run(group: int) -> None:
        async with crashes.isolation(group):
            running.append(group)
            for _ in range(3):
                await asyncio.sleep(0)
            seen.append(sorted(running))
            running.remove(group)

    async with asyncio.TaskGroup() as tasks:
        for group in (1, 2, 7):
            tasks.create_task(run(group))
    assert seen == [[1, 7], [7], [2]]

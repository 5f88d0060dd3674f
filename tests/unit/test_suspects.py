import asyncio

from asyncrl.suspects import GUILTY, SUSPECT, Suspects

IN_FLIGHT = range(100)


def died(suspects: Suspects, *running: int) -> int | None:
    return suspects.died(running, IN_FLIGHT)


def test_a_group_is_blamed_when_it_was_there_often_enough() -> None:
    suspects = Suspects()
    blamed = [died(suspects, 3, number) for number in range(10, 10 + GUILTY)]
    assert blamed == [None] * (GUILTY - 1) + [3]
    assert suspects.deaths == GUILTY


def test_calls_of_one_group_are_one_presence() -> None:
    suspects = Suspects()
    assert died(suspects, *[3] * GUILTY) is None


def test_a_death_that_needs_none_of_the_suspects_clears_them() -> None:
    for elsewhere in ((), (50, 51)):
        suspects = Suspects()
        for _ in range(GUILTY - 1):
            died(suspects, 3)
        assert died(suspects, *elsewhere) is None
        assert died(suspects, 3) is None


def test_groups_that_are_not_in_flight_any_more_are_forgotten() -> None:
    suspects = Suspects()
    for _ in range(GUILTY):
        assert suspects.died([3, -1], in_flight=[3]) in (None, 3)
    assert suspects.died([4], in_flight=[4]) is None
    assert suspects._present == {4: 1}


async def test_suspects_run_one_after_the_other_and_the_others_beside_them() -> None:
    suspects, running, seen = Suspects(), list[int](), list[list[int]]()
    for _ in range(SUSPECT):
        died(suspects, 1, 2)

    async def run(group: int) -> None:
        async with suspects.turn(group):
            running.append(group)
            for _ in range(3):
                await asyncio.sleep(0)
            seen.append(sorted(running))
            running.remove(group)

    async with asyncio.TaskGroup() as tasks:
        for group in (1, 2, 7):
            tasks.create_task(run(group))
    assert seen == [[1, 7], [7], [2]]

"""Which deaths of a worker end the run, and how long its restart waits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.fleet import supervisor
from asyncrl.fleet.supervisor import DeathCounter


def counter_after(deaths: int, *suspects: int) -> DeathCounter:
    """Returns a counter after so many deaths beside others, and one of a worker that each of the suspects had alone."""
    counter = DeathCounter()
    for number, suspect in enumerate((*([None] * deaths), *suspects)):
        counter.count(f"instance {number}", 0.0, suspect)
    return counter


@pytest.mark.parametrize(
    ("deaths", "suspects", "unexplained"),
    [
        (2, (), 2),
        (2, (7, 7, 7), 2),
        (2, (7, 7, 7, 8, 8), 4),  # A second suspect: whatever the worker does, it dies.
        (1, (7,) * (supervisor.MAX_TESTED + 2), 3),
        (supervisor.MAX_DEATHS, (7,), supervisor.MAX_DEATHS),
    ],
)
def test_deaths_of_the_one_suspect_that_had_the_worker_alone_do_not_count(
    deaths: int, suspects: tuple[int, ...], unexplained: int
) -> None:
    counter = counter_after(deaths, *suspects)
    assert counter.unexplained == unexplained
    assert counter.is_too_often == (unexplained >= supervisor.MAX_DEATHS)
    counter.progressed()
    assert counter.unexplained == 0


@given(st.lists(st.sampled_from(["progress", 0.0, supervisor.LONG_LIFE - 1, supervisor.LONG_LIFE]), max_size=40))
def test_pauses_grow_with_short_lives_and_stay_bounded(events: list[str | float]) -> None:
    """A number: a death after so many seconds of life; else a finished group."""
    deaths = DeathCounter()
    now = 0.0
    since = 0
    pause = supervisor.FIRST_PAUSE / 2
    for number, lived in enumerate(events):
        since = 0 if isinstance(lived, str) else since + 1
        if isinstance(lived, str):
            deaths.progressed()
        else:
            deaths.started_at = now
            now += lived
            assert deaths.count(f"instance {number}", now)
            assert not deaths.count(f"instance {number}", now)
            pause = (
                supervisor.FIRST_PAUSE if lived >= supervisor.LONG_LIFE else min(2 * pause, supervisor.LONGEST_PAUSE)
            )
            assert deaths.pause_of(supervisor.LONGEST_PAUSE) == pause
            assert deaths.is_too_often == (since >= supervisor.MAX_DEATHS)

"""Something is said every ten seconds of loop time, whatever the run does."""

import asyncio
from collections.abc import Callable

import pytest

from asyncrl.controller.journal.ledger import AttemptStarted, Drawn, Dropped, Generated
from asyncrl.controller.observers.events import SampleScored, StepDone
from asyncrl.controller.observers.progress import RunProgress, progress_shown
from asyncrl.protocols.batch import BatchRef, Cuts, RowRef
from asyncrl.protocols.messages import Score, StepReport
from asyncrl.simulation import virtual_loop
from tests import golden

DONE = StepDone(Cuts(0, 6, BatchRef(()), 0, 0), StepReport(0, 7, 1, "", "", {}, (), None), {}, 1.0)
SCORED = SampleScored(RowRef(0, 0, 0, 0, 1, 1, 0, 0, "stop", ()), Score(1.0, {}))


def shown(seconds: float, *actions: tuple[float, Callable[[RunProgress], None]]) -> list[tuple[float, str]]:
    """Returns what is shown within so many virtual seconds, and when. actions: at which second, and what is done."""
    lines: list[tuple[float, str]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with progress_shown(lambda text: lines.append((round(loop.time() - began, 3), text))) as progress:
            for second, action in actions:
                loop.call_at(began + second, action, progress)
            await asyncio.sleep(seconds)

    virtual_loop.run(main())
    return lines


def test_before_the_first_step_it_is_said_what_the_run_waits_for() -> None:
    lines = shown(25, (0, lambda progress: progress.begin("starting the workers")))
    assert lines == [(10, "starting the workers (10 s so far)"), (20, "starting the workers (20 s so far)")]


def test_without_a_step_events_are_counted_in_words() -> None:
    def draw(progress: RunProgress) -> None:
        progress.in_flight = lambda: 12
        for group in range(3):
            progress.observe(Drawn(group, 0, 0))
        progress.observe(Generated(0, 0, ((0, 0, 0, 4), (1, 0, 0, 4))))
        progress.observe(SCORED)
        progress.observe(Dropped(0, (0, 1), "no_signal"))
        progress.observe(Dropped(1, (0,), "stale"))

    (_, first), (_, second) = shown(21, (1, lambda progress: progress.begin("")), (2, draw))
    assert first == (
        "no step has ended yet; in the 9 s since: 3 groups drawn, 2 samples generated, 1 scored, 3 dropped "
        "(2 as no_signal, 1 as stale); 12 in flight"
    )
    assert second.startswith("no step has ended yet; in the 19 s since: 3 groups drawn")


def test_steps_that_end_in_time_are_progress_enough() -> None:
    ends = [(float(second), lambda progress: progress.observe(DONE)) for second in range(1, 60, 9)]
    assert shown(60, *ends) == []
    restarted = (58.0, lambda progress: progress.observe(AttemptStarted(0, 1, (0, 1), "lost")))
    (line,) = shown(69, *ends, restarted)
    assert line[0] == 65
    assert line[1].startswith("the last step was 7; in the 10 s since: 0 groups drawn, 0 samples generated, 2 begun ag")


def drops(*steps: list[str], trained: int) -> str | None:
    """Returns what the end says. steps: reasons of dropped samples before each."""

    async def main() -> str | None:
        progress = RunProgress(print)
        for reasons in steps:
            for reason in reasons:
                progress.observe(Dropped(0, (0,), reason))
            progress.observe(DONE)
        return progress.drops(trained=trained, abandoned=4)

    return virtual_loop.run(main())


def test_the_end_names_what_was_dropped_of_bad_rows_however_few_or_nothing() -> None:
    assert drops([], trained=8) is None
    two = ["no_signal", "no_signal"]
    assert drops(two, trained=800) is None
    golden.says(drops(two, [], trained=8))
    golden.says(drops(["stale", "stale", *two, "no_baseline", "no_baseline", "bad_row"], trained=80_000))


def test_a_line_that_is_printed_is_progress_enough() -> None:
    assert shown(25, (9, RunProgress.note), (18, RunProgress.note)) == []


def test_what_fails_inside_fails_as_itself() -> None:
    async def main() -> None:
        async with progress_shown(print):
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        virtual_loop.run(main())

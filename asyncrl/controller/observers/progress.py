"""Says in words what a run does while no step ends: at least every INTERVAL seconds of loop time, whatever happens."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from asyncrl.concurrency import running_beside
from asyncrl.controller.journal.ledger import AttemptStarted, Drawn, Dropped, Generated
from asyncrl.controller.observers.events import Event, SampleScored, StepDone
from asyncrl.controller.observers.step_metrics import step_of
from asyncrl.rewards.sample import BAD_ROW

INTERVAL = 10.0
"""Seconds. A run that says nothing for longer looks as if it hung."""
MANY = 0.05
"""Share of dropped samples that is worth a line at the end."""
NAMED = 3
"""Reasons of drops in one line."""


class RunProgress:
    """Counts what happened since the last step ended. show: takes one line. stage: what the run does outside the
    training loop, e.g. "starting the workers"; "" inside it."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._now = asyncio.get_running_loop().time
        self._counts = Counter[str]()
        self._dropped = Counter[str]()
        self._dropped_in_all = Counter[str]()
        self._step: int | None = None
        self._since = self._now()
        self._shown_at = self._since
        self._stage = ""
        self.in_flight: Callable[[], int] = int

    def note(self) -> None:
        """Notes that a line was printed, which is progress enough for a while."""
        self._shown_at = self._now()

    def noting(self, say: Callable[[str], None]) -> Callable[[str], None]:
        """Returns `say`, each call of which is noted."""

        def noted(text: str) -> None:
            self.note()
            say(text)

        return noted

    def begin(self, stage: str) -> None:
        """Begins a stage of the run; "" is the training loop."""
        self._stage = stage
        self._since = self._now()

    def observe(self, event: Event) -> None:
        match event:
            case Drawn():
                self._counts["drawn"] += 1
            case Generated(samples=samples):
                self._counts["generated"] += len(samples)
            case SampleScored():
                self._counts["scored"] += 1
            case AttemptStarted(members=members):
                self._counts["begun again"] += len(members)
            case Dropped(members=members, reason=reason):
                self._dropped[reason] += len(members)
                self._dropped_in_all[reason] += len(members)
            case StepDone(report=report):
                self._step = step_of(report)
                self._counts.clear()
                self._dropped.clear()
                self._since = self._now()
                self._shown_at = self._since

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(self._shown_at + INTERVAL - self._now())
            if self._now() - self._shown_at >= INTERVAL:
                self._shown_at = self._now()
                self._show(self.describe())

    def describe(self) -> str:
        seconds = f"{self._now() - self._since:.0f} s"
        if self._stage:
            return f"{self._stage} ({seconds} so far)"
        last = "no step has ended yet" if self._step is None else f"the last step was {self._step}"
        again = f", {self._counts['begun again']:,} begun again" if self._counts["begun again"] else ""
        return (
            f"{last}; in the {seconds} since: {self._counts['drawn']:,} groups drawn, "
            f"{self._counts['generated']:,} samples generated{again}, {self._counts['scored']:,} scored, "
            f"{_dropped(self._dropped)}; {self.in_flight():,} in flight"
        )

    def drops(self, trained: int, abandoned: int) -> str | None:
        """Returns how the samples since this start ended, for the end of a run that dropped many of them or some for
        their rows, else None."""
        dropped = self._dropped_in_all.total()
        if not self._dropped_in_all[BAD_ROW] and (not dropped or dropped < MANY * (trained + dropped)):
            return None
        return f"of the samples {trained:,} were trained, {_dropped(self._dropped_in_all)}, {abandoned:,} abandoned"


def _dropped(reasons: Counter[str]) -> str:
    shown = [*reasons.most_common(NAMED), *((BAD_ROW, reasons[BAD_ROW]),) * bool(reasons[BAD_ROW])]
    named = ", ".join(f"{count:,} as {reason}" for reason, count in dict(shown).items())
    return f"{reasons.total():,} dropped{f' ({named})' if named else ''}"


@asynccontextmanager
async def progress_shown(show: Callable[[str], None]) -> AsyncIterator[RunProgress]:
    """Shows the progress of what runs inside the block."""
    progress = RunProgress(show)
    async with running_beside({"progress": progress.run()}):
        yield progress

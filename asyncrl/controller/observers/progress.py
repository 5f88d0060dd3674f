"""Says what a run does while it goes on.

RunProgress    a line while no step ends: at least every INTERVAL seconds of loop time, whatever happens
RewardOutput   once, where reward functions print
StatusWriter   status.json every few seconds, for `asyncrl monitor`
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from asyncrl.concurrency import running_beside, to_its_end
from asyncrl.controller.gate.gate import Gate
from asyncrl.controller.gate.group_state import IN_FLIGHT, Stage
from asyncrl.controller.journal.journal import Journal
from asyncrl.controller.journal.ledger import AttemptStarted, Drawn, Dropped, Generated
from asyncrl.controller.observers.events import Event, SampleScored, StepDone
from asyncrl.controller.observers.step_metrics import step_of
from asyncrl.fleet.health import HealthPoller
from asyncrl.fleet.remote_worker import RemoteWorker
from asyncrl.protocols.messages import Health
from asyncrl.rewards.sample import BAD_ROW
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.run_status import (
    SECONDS,
    RunStatus,
    WorkerStatus,
    cores_between,
    rates_between,
    shares_between,
    write_status,
)

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
    progress = RunProgress(show)
    async with running_beside({"progress": progress.run()}):
        yield progress


# ---- the output of reward functions --------------------------------------------------------------------------------


@dataclass(slots=True)
class RewardOutput:
    """Looks for the files after each step and each failed reward, until it has said where they are."""

    directory: RunDirectory
    say: Callable[[str], None]
    is_said: bool = False

    def observe(self, event: Event) -> None:
        if self.is_said:
            return
        match event:
            case StepDone():
                self._look()
            case SampleScored(score=score) if score.error:
                self._look()

    def _look(self) -> None:
        if files := sorted(map(str, self.directory.printed())):
            self.is_said = True
            self.say(f"reward functions print something: {', '.join(files)} (the newest 4 to 8 MiB are kept)")


# ---- the state of the run ------------------------------------------------------------------------------------------


@dataclass
class StatusWriter:
    """Writes to `path`. journal: has the samples that ended, those before a resume too. steps: of the whole run. now:
    returns Unix time in seconds. publish: takes each state too. is_paused: returns whether a command paused the run."""

    path: Path
    gate: Gate
    journal: Journal
    poller: HealthPoller
    steps: int
    publish: Callable[[RunStatus], None] = lambda status: None
    is_paused: Callable[[], bool] = bool
    now: Callable[[], float] = time.time
    _before: dict[str, Health] = field(default_factory=dict)
    _instances: dict[str, str] = field(default_factory=dict)
    _starts: Counter[str] = field(default_factory=Counter)

    async def run(self) -> None:
        try:
            while True:
                await self.write()
                await asyncio.sleep(SECONDS)
        finally:
            with suppress(OSError):
                write_status(self.path, replace(self.status(), ended=True))

    async def write(self) -> None:
        await self.poller.poll()
        status = self.status()
        self.publish(status)
        await to_its_end(self._replace(status))  # Or the last state, written meanwhile, would be overwritten.

    async def _replace(self, status: RunStatus) -> None:
        with suppress(OSError):  # Where the disk is full, the journal ends the run and says so.
            await asyncio.to_thread(write_status, self.path, status)

    def status(self) -> RunStatus:
        """Returns the present state, by the newest health of each worker."""
        ledger = self.journal.ledger
        counts = {stage.value: self.gate.counts[stage] for stage in IN_FLIGHT}
        counts |= {Stage.TRAINED.value: ledger.trained, Stage.DROPPED.value: ledger.dropped.total()}
        samples = {stage: count for stage, count in counts.items() if count}
        workers = tuple(self._worker(worker) for worker in self.poller.workers)
        moment = (self.now(), self.gate.version, self.steps, samples, workers)
        return RunStatus(*moment, incarnation=ledger.incarnation, paused=self.is_paused())

    def _worker(self, worker: RemoteWorker) -> WorkerStatus:
        if worker.instance and self._instances.get(worker.name) != worker.instance:
            self._instances[worker.name] = worker.instance
            self._starts[worker.name] += 1
        starts = self._starts[worker.name]
        problem = "" if worker.alive else worker.status
        newest = self.poller.newest.get(worker.name)
        if newest is None or newest.health.instance != worker.instance:
            name = worker.name
            instance = worker.instance
            return WorkerStatus(name, instance, problem, (), 0, {}, 0.0, 0, starts, {}, service=worker.service)
        health = newest.health
        before = self._before.get(worker.name)
        self._before[worker.name] = health
        return WorkerStatus(
            worker.name,
            worker.instance,
            problem,
            health.doing,
            health.queued,
            shares_between(before, health),
            cores_between(before, health),
            health.memory,
            starts,
            health.counters,
            rates_between(before, health),
            health.version,
            health.gpu,
            worker.service,
        )

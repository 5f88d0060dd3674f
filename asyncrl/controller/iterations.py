"""Training iterations, from the samples that the gate picked to the report of the trainer."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from asyncrl.config.schema import MismatchConfig
from asyncrl.controller.alarms.algorithm_checks import refuse_other_cuts
from asyncrl.controller.alarms.policy_mismatch import NO_BOUNDS, PolicyMismatchAlarm
from asyncrl.controller.alarms.skipped_steps import SkippedSteps
from asyncrl.controller.gate.group_state import Cut
from asyncrl.controller.gate.staleness_report import StalenessReport
from asyncrl.controller.observers.events import PoliciesApart, StepBegan, StepDone, StepLost
from asyncrl.controller.sample_tracker import SampleTracker
from asyncrl.errors import (
    AlgorithmError,
    DeadlineExceeded,
    FleetFailed,
    LostRows,
    PeerLost,
    Refused,
)
from asyncrl.objectives.advantages import Advantages
from asyncrl.protocols.batch import BatchRef, Cuts, RowRef
from asyncrl.protocols.contracts import Training
from asyncrl.protocols.messages import StepReport


class Iteration:
    """One iteration as an algorithm gets it: `with iteration as cuts`.

    When rows are lost on the way to the trainer, the block ends without an error: nothing was trained, and the groups
    roll out again. Raises FleetFailed when the trainer or a critic is lost, or does not answer in time.
    """

    def __init__(self, cuts: Cuts, lost: Callable[[LostRows], None]) -> None:
        self._cuts = cuts
        self._lost = lost

    def __enter__(self) -> Cuts:
        return self._cuts

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if isinstance(error, LostRows):
            self._lost(error)
            return True
        if isinstance(error, PeerLost | DeadlineExceeded):
            raise FleetFailed(
                f"the trainer or a critic was lost in the step from version {self._cuts.version}: {error}"
            ) from error
        return False


@dataclass(frozen=True, slots=True)
class RunningIteration:
    """The running iteration. picked: its cuts as the gate names them; began: loop time."""

    picked: tuple[Cut, ...]
    cuts: Cuts
    began: float


class Iterations:
    """Begins and ends iterations, at most one at a time.

    rows_lost: called with cuts that could not be trained because some of their rows are gone, and with the reason.
    mask_truncated: whether completions without an end are in no loss, and so in no denominator.
    """

    def __init__(
        self,
        tracker: SampleTracker,
        advantages: Advantages,
        incarnation: int,
        rows_lost: Callable[[Cuts, str], None],
        mask_truncated: bool = False,
        mismatch: MismatchConfig = NO_BOUNDS,
    ) -> None:
        self.staleness = StalenessReport(tracker.gate.config)
        self._tracker = tracker
        self._gate = tracker.gate
        self._advantages = advantages
        self._incarnation = incarnation
        self._rows_lost = rows_lost
        self._mask_truncated = mask_truncated
        self._mismatch = PolicyMismatchAlarm(mismatch)
        self._skipped_steps = SkippedSteps()
        self._running: RunningIteration | None = None
        self._ended = asyncio.get_running_loop().time()

    @property
    def cuts(self) -> Cuts | None:
        """The cuts of the running iteration; None: no iteration runs."""
        return None if self._running is None else self._running.cuts

    def credit(self, cuts: Cuts, advantages: Sequence[float]) -> Cuts:
        """Returns the running cuts with these advantages, one a sample, and trains them instead.

        Raises:
            AlgorithmError: these are other cuts, or there is not one finite advantage for each sample.
        """
        refuse_other_cuts("control.credit", cuts, self.cuts)
        if len(advantages) != len(cuts.batch) or not all(map(math.isfinite, advantages)):
            raise AlgorithmError(
                f"control.credit got {len(advantages)} advantages for {len(cuts.batch)} samples: write a finite number "
                "for each row of `cuts.batch`"
            )
        assert self._running is not None, "it has cuts"
        rows = zip(cuts.batch, advantages, strict=True)
        credited = replace(cuts, batch=BatchRef(tuple(row.with_advantage(float(number)) for row, number in rows)))
        self._running = replace(self._running, cuts=credited)
        return credited

    def begin(self, picked: tuple[Cut, ...]) -> Iteration:
        """Begins an iteration on the picked samples with their advantages, sorted by (group, member)."""
        rows = self._with_advantages(picked)
        counted = [row for row in rows if self._counts(row)]
        tokens = sum(row.tokens for row in counted)
        cuts = Cuts(self._incarnation, self._gate.version, BatchRef(tuple(rows)), tokens, len(counted))
        self._running = RunningIteration(picked, cuts, asyncio.get_running_loop().time())
        self._tracker.observe(StepBegan(cuts))
        return Iteration(cuts, self.lost)

    def done(self, report: StepReport) -> None:
        """Ends the iteration: the version rises, or the samples of a skipped step are dropped.

        Raises:
            Refused: the report is of another incarnation, or led to an unexpected version.
            NonFiniteLoss: three steps in a row were not finite.
            OnlyTruncated: three steps in a row had no answer with an end.
            PolicyMismatch: the step crossed a bound that ends the run.
            JournalError: the trainer trained other samples than it was given.
        """
        running = self._end()
        self._check(running.cuts, report)
        report = replace(report, metrics=report.metrics | self._mismatch.take_canary())
        if report.skipped:
            self._drop(running.picked, report.skipped)
        else:
            advantages = tuple(row.advantage or 0.0 for row in running.cuts.batch)
            self._tracker.trained(running.picked, report.version, advantages, report.chain)
        self._observe_step(running, report)
        self._skipped_steps.check(running.cuts, report.skipped)
        if warning := self._mismatch.check(report.metrics, report.version):
            self._tracker.observe(PoliciesApart(warning))

    def add_canary(self, difference: float) -> None:
        """Takes in how far a reader is from the trainer, in nats; the next step reports it."""
        self._mismatch.add_canary(difference)

    def lost(self, error: LostRows) -> None:
        """Ends the iteration untrained: rows were gone before the trainer had read them."""
        running = self._end()
        self._tracker.observe(StepLost(running.cuts, str(error)))
        self._tracker.requeue(running.picked)
        self._rows_lost(running.cuts, str(error))

    def _counts(self, row: RowRef) -> bool:
        """Returns whether the sample is part of denominators and statistics."""
        return not (self._mask_truncated and row.finish == "length")

    def _with_advantages(self, picked: tuple[Cut, ...]) -> list[RowRef]:
        advantages = self._advantages(self._tracker.rewarded(picked, self._counts), self._gate.version)
        return [
            row.with_advantage(advantage)
            for (group, members), of_cut in zip(picked, advantages, strict=True)
            for row, advantage in zip(self._tracker.rows(group, members), of_cut, strict=True)
        ]

    def _end(self) -> RunningIteration:
        running = self._running
        assert running is not None, "an iteration ends once, after it began"
        self._running = None
        return running

    def _check(self, cuts: Cuts, report: StepReport) -> None:
        expected = (cuts.incarnation, cuts.version + (not report.skipped))
        if (report.incarnation, report.version) != expected:
            raise Refused(
                f"the trainer reports incarnation {report.incarnation}, version {report.version} after a step that "
                f"should have led to incarnation {expected[0]}, version {expected[1]}"
            )

    def _drop(self, picked: tuple[Cut, ...], reason: str) -> None:
        self._tracker.requeue(picked)
        for group, members in picked:
            self._tracker.drop(group, members, reason)

    def _observe_step(self, running: RunningIteration, report: StepReport) -> None:
        now = asyncio.get_running_loop().time()
        staleness = self.staleness.step(self._gate, report.samples)
        waited = running.began - self._ended
        self._ended = now
        self._tracker.observe(StepDone(running.cuts, report, staleness, waited, now - running.began))


class CheckedTraining:
    """Forwards every call of an algorithm to the trainer; `step` takes the cuts of the running iteration only."""

    def __init__(self, training: Training, iterations: Iterations) -> None:
        self._training = training
        self._iterations = iterations

    def __getattr__(self, name: str) -> Any:
        return getattr(self._training, name)

    async def step(self, cuts: Cuts) -> StepReport:
        """Raises AlgorithmError for other cuts than those of the running iteration: the journal would lack them."""
        refuse_other_cuts("fleet.training.step", cuts, self._iterations.cuts)
        return await self._training.step(cuts)

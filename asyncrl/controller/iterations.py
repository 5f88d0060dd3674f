"""Training iterations: from the samples that the gate picked to the report of the trainer, and the prefetch beside.

The prefetch has the trainer read the rows of the next batch while it still trains. It is a guess and binds no one:
after the iteration the gate picks as it would have picked without, and the trainer reads again what it has not read.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from asyncrl.concurrency import gather
from asyncrl.config.schema import Config
from asyncrl.controller.gate.group_state import Cut
from asyncrl.controller.observers.alarms import PolicyMismatchAlarm, SkippedSteps
from asyncrl.controller.observers.events import StepBegan, StepDone, StepLost, Warned
from asyncrl.controller.observers.staleness_report import StalenessReport
from asyncrl.controller.sample_tracker import SampleTracker
from asyncrl.errors import AlgorithmError, DeadlineExceeded, FleetFailed, LostRows, PeerLost, Refused
from asyncrl.objectives.advantages import Advantages, RewardedCut, group_estimate, turn_advantages
from asyncrl.protocols.batch import BatchRef, Cuts, RowRef
from asyncrl.protocols.messages import CUT_SHORT, LEFT_OUT, StepReport
from asyncrl.protocols.service_contracts import Training
from asyncrl.telemetry.samples_file import RecordedGroups, shown_by_token

Iteration: TypeAlias = AbstractContextManager[Cuts]
"""One iteration as an algorithm gets it: `with iteration as cuts`."""


MOST_LOST_STEPS = 20
"""Steps in a row that may lose rows: each time the groups concerned begin again, so that more have a lasting cause."""


@dataclass
class Iterations:
    """Begins and ends iterations. cuts: of the running one. rows_lost: takes cuts with lost rows, and the reason.

    At most one iteration runs; between two, `cuts` is None. The Controller calls it, and algorithms through
    CheckedTraining.
    """

    tracker: SampleTracker
    advantages: Advantages
    config: Config
    rows_lost: Callable[[Cuts, LostRows], None]
    cuts: Cuts | None = None

    def __post_init__(self) -> None:
        self._gate = self.tracker.gate
        self.staleness = StalenessReport(self._gate.config)
        self.mismatch = PolicyMismatchAlarm(self.config.mismatch)
        self._skipped_steps = SkippedSteps()
        self._recorded = RecordedGroups(self.config.telemetry.samples_per_step)
        self._picked: tuple[Cut, ...] = ()
        self._began = 0.0
        self._changed = asyncio.Event()
        self._prefetched = True
        self._settling = asyncio.Event()
        self._lost_in_a_row = 0

    def begin(self, picked: tuple[Cut, ...]) -> Iteration:
        """Begins an iteration on the picked samples with their advantages, sorted by (group, member)."""
        rewarded = self.tracker.rewarded(picked, self._counts)
        advantages = self.advantages(rewarded, self._gate.version)
        rows = [
            row.with_advantage(advantage, by_turn)
            for (group, members), of_cut, turns in zip(picked, advantages, self._turn_advantages(rewarded), strict=True)
            for row, advantage, by_turn in zip(self.tracker.rows(group, members), of_cut, turns, strict=True)
        ]
        counted = [row for row in rows if self._counts(row)]
        tokens = sum(row.tokens for row in counted)
        incarnation = self.tracker.journal.ledger.incarnation
        recorded = self._recorded.choose(rows)
        shown = shown_by_token(recorded)
        self.cuts = Cuts(incarnation, self._gate.version, BatchRef(tuple(rows)), tokens, len(counted), shown)
        self._picked = picked
        self._began = asyncio.get_running_loop().time()
        self.tracker.observe(StepBegan(self.cuts, tuple(recorded)))
        self._prefetched = False
        self._changed.set()
        return self._running(self.cuts)

    def _turn_advantages(self, cuts: Sequence[RewardedCut]) -> list[list[tuple[float, ...]]]:
        """Returns the advantages of turns, where the config asks for them; else none for each sample."""
        algorithm = self.config.algorithm
        if algorithm.turn_discount is None:
            return [[()] * len(cut.members) for cut in cuts]
        estimate = group_estimate(algorithm.advantage, normalize_std=bool(algorithm.normalize_std))
        return turn_advantages(cuts, estimate, algorithm.turn_discount)

    @contextmanager
    def _running(self, cuts: Cuts) -> Iterator[Cuts]:
        """Ends without an error when rows are lost: their groups roll out again. Raises FleetFailed, with the name of
        the worker, when another call of the iteration failed: what the trainer has learnt is not known then."""
        try:
            yield cuts
        except LostRows as error:
            self.lost(error)
        except (PeerLost, DeadlineExceeded) as error:
            raise FleetFailed(f"a call failed in the step from version {cuts.version}: {error}") from error

    def credit(self, cuts: Cuts, advantages: Sequence[float]) -> Cuts:
        _refuse_other_cuts("control.credit", cuts, self.cuts)
        if len(advantages) != len(cuts.batch) or not all(map(math.isfinite, advantages)):
            raise AlgorithmError(
                f"control.credit got {len(advantages)} advantages for {len(cuts.batch)} samples: write a finite number "
                "for each row of `cuts.batch`"
            )
        rows = zip(cuts.batch, advantages, strict=True)
        self.cuts = replace(cuts, batch=BatchRef(tuple(row.with_advantage(float(number)) for row, number in rows)))
        return self.cuts

    def done(self, report: StepReport) -> None:
        """Ends the iteration: samples that entered the loss are trained, the others are dropped.

        Raises Refused for another incarnation or version, JournalError for other samples, and what the alarms raise.
        """
        cuts = self._end()
        expected = (cuts.incarnation, cuts.version + (not report.skipped))
        if (report.incarnation, report.version) != expected:
            raise Refused(
                f"the trainer reports incarnation {report.incarnation}, version {report.version} after a step that "
                f"should have led to incarnation {expected[0]}, version {expected[1]}"
            )
        report = replace(report, metrics=report.metrics | self.mismatch.take_canary())
        self._lost_in_a_row = 0
        self._settle(cuts, report)
        seconds = asyncio.get_running_loop().time() - self._began
        staleness = self.staleness.step(self._gate, report.samples) | self.tracker.admission_metrics()
        self.tracker.observe(StepDone(cuts, report, staleness, seconds))
        self._skipped_steps.check(cuts, report.skipped)
        if warning := self.mismatch.check(report.metrics, report.version):
            self.tracker.observe(Warned(warning))

    def lost(self, error: LostRows) -> None:
        """Ends the iteration untrained: rows were gone before the trainer had read them."""
        cuts = self._end()
        self.tracker.observe(StepLost(cuts, str(error)))
        self.tracker.requeue(self._picked)
        self._lost_in_a_row += 1
        if self._lost_in_a_row >= MOST_LOST_STEPS:
            raise FleetFailed(
                f"{self._lost_in_a_row} steps in a row from version {cuts.version} lost rows before they were trained. "
                f"The last one: {error}. Look into the logs/ of the worker that is named, and at its network"
            ) from error
        self.rows_lost(cuts, error)

    def undone(self) -> None:
        """Ends the iteration untrained: its samples wait for training again."""
        self.tracker.observe(StepLost(self._end(), "the run ends"))
        self.tracker.requeue(self._picked)

    def _counts(self, row: RowRef) -> bool:
        """Returns whether the sample is in the loss, and so in its denominators."""
        return not (self.config.algorithm.mask_truncated and row.unfinished)

    def _end(self) -> Cuts:
        cuts = self.cuts
        assert cuts is not None, "an iteration ends once, after it began"
        self.cuts = None
        return cuts

    def _settle(self, cuts: Cuts, report: StepReport) -> None:
        """Takes as trained what entered the loss by the trainer's account, and drops every other sample with the reason
        why it did not. Raises Refused for an account that contradicts itself."""
        accounts = {sample.name: sample.untrained_because for sample in report.samples}
        untrained = {row.key: accounts.get(row.name, LEFT_OUT) for row in cuts.batch}
        if bool(report.skipped) == ("" in untrained.values()):
            raise Refused(
                f"the trainer reports {report.updates} updates, skipped as {report.skipped!r}, and "
                f"{sum(not why for why in untrained.values())} of {len(untrained)} samples in their loss"
            )
        for why in dict.fromkeys(filter(None, untrained.values())):
            self._drop(_part_of(self._picked, untrained, why), why)
        if not report.skipped:
            trained = _part_of(self._picked, untrained, "")
            advantages = tuple(row.advantage or 0.0 for row in cuts.batch if not untrained[row.key])
            self.tracker.trained(trained, report.version, advantages, report.chain)

    def _drop(self, cuts: tuple[Cut, ...], reason: str) -> None:
        self.tracker.requeue(cuts)
        if reason == CUT_SHORT:
            return
        for group, members in cuts:
            self.tracker.drop(group, members, reason)

    def state_changed(self) -> None:
        self._settling.set()
        if not self._prefetched:
            self._changed.set()

    async def allow_update(self, training: Training, cuts: Cuts) -> None:
        """Lets the running step change the weights, once the samples of the next batch have their scores. Raises
        PeerLost or DeadlineExceeded when the trainer does not take the call."""
        while not self.tracker.is_settled:
            self._settling.clear()
            await self._settling.wait()
        await training.allow_update(cuts.incarnation, cuts.version)

    async def prefetch(self, training: Training) -> None:
        """Has the trainer prefetch once in an iteration, as soon as the samples of the next batch are ready.

        Runs until cancelled, or until the first error, which becomes a warning. This is a supervised boundary: a run
        trains the same without any prefetch, for the preview changes nothing in the gate, and the trainer reads in its
        steps the rows that it does not hold.
        """
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                await self._prefetch_once(training)
        except Exception as error:  # an optimisation may be left out, whatever it raises
            warning = f"the trainer could not prefetch rows, and reads them in its steps now: {error}"
            self.tracker.observe(Warned(warning))

    async def _prefetch_once(self, training: Training) -> None:
        if self._prefetched or self.cuts is None or not (rows := self.tracker.preview()):
            return
        self._prefetched = True
        # The loss of the trainer ends the run elsewhere; a slow trainer reads the rows in its step.
        with suppress(PeerLost, DeadlineExceeded, FleetFailed):
            await training.prefetch(BatchRef(tuple(rows)))


@dataclass(frozen=True, eq=False)
class CheckedTraining:
    """The trainer as an algorithm sees it, whose `step` takes the cuts of the running iteration only."""

    training: Training
    iterations: Iterations

    def __getattr__(self, name: str) -> Any:
        return getattr(self.training, name)

    async def step(self, cuts: Cuts) -> StepReport:
        """Raises AlgorithmError for other cuts than those of the running iteration: the journal would lack them."""
        _refuse_other_cuts("fleet.training.step", cuts, self.iterations.cuts)
        if self.iterations.config.staleness.admission != "lockstep":
            return await self.training.step(cuts)
        allowing = self.iterations.allow_update(self.training, cuts)
        report, _ = await gather(self.training.step(cuts), allowing)
        return report


def _part_of(cuts: Iterable[Cut], untrained: Mapping[tuple[int, int], str], why: str) -> tuple[Cut, ...]:
    """Returns the members that were left out for this reason, by group; "": that were trained."""
    parts = ((group, tuple(member for member in members if untrained[group, member] == why)) for group, members in cuts)
    return tuple((group, members) for group, members in parts if members)


def _refuse_other_cuts(function: str, cuts: Cuts, running: Cuts | None) -> None:
    """Raises AlgorithmError unless these are the cuts of the running iteration."""
    if cuts != running:
        raise AlgorithmError(
            f"{function} got other cuts than those of the iteration that runs: hand on `cuts` of `with iteration as "
            "cuts`, or what `control.credit(cuts, advantages)` made of them"
        )

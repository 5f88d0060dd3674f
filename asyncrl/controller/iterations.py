"""Training iterations: from the samples that the gate picked to what the trainer made of them."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from asyncrl.books import Books
from asyncrl.config import Mismatch
from asyncrl.errors import (
    DeadlineExceeded,
    FleetFailed,
    LostRows,
    NonFiniteLoss,
    OnlyTruncated,
    PageError,
    PeerLost,
    Refused,
)
from asyncrl.events import PoliciesApart, StepBegan, StepDone, StepLost
from asyncrl.mismatch import NO_BOUNDS, MismatchWatch
from asyncrl.objectives.advantages import Advantages
from asyncrl.page_checks import refuse_other_cuts
from asyncrl.protocols.batch import BatchRef, Cuts, RowRef
from asyncrl.protocols.messages import StepReport
from asyncrl.staleness import Cut
from asyncrl.staleness_report import StalenessReport

IN_A_ROW = 3
"""Steps that trained nothing, all for one reason, that end the run: one comes from a rare batch, three from the run."""


class Iteration:
    """One iteration on a page: `with iteration as cuts`.

    When rows turn out lost on the way to the trainer, the block ends without an error: nothing was trained, and the
    groups roll out again. Raises FleetFailed when the trainer itself is lost, or does not answer in time; so for the
    critic, where there is one.
    """

    def __init__(self, cuts: Cuts, lost: Callable[[LostRows], None]) -> None:
        self._cuts, self._lost = cuts, lost

    def __enter__(self) -> Cuts:
        return self._cuts

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if isinstance(error, LostRows):
            self._lost(error)
            return True
        if isinstance(error, PeerLost | DeadlineExceeded):
            raise FleetFailed(f"what trains was lost in the step from version {self._cuts.version}: {error}") from error
        return False


@dataclass(frozen=True, slots=True)
class Running:
    """The iteration that runs. picked: as the gate names it; began: loop time."""

    picked: tuple[Cut, ...]
    cuts: Cuts
    began: float


class Iterations:
    """Begins and ends iterations, at most one at a time.

    rows_lost: told the cuts that nobody could train because some of their rows are gone, and why.
    mask_truncated: completions without an end are in no loss, so in no denominator either.
    """

    def __init__(
        self,
        books: Books,
        advantages: Advantages,
        epoch: int,
        rows_lost: Callable[[Cuts, str], None],
        *,
        mask_truncated: bool = False,
        mismatch: Mismatch = NO_BOUNDS,
    ) -> None:
        self.staleness = StalenessReport(books.gate.config)
        self._books, self._gate = books, books.gate
        self._advantages, self._epoch, self._mask_truncated = advantages, epoch, mask_truncated
        self._rows_lost, self._mismatch = rows_lost, MismatchWatch(mismatch)
        self._running: Running | None = None
        self._ended = asyncio.get_running_loop().time()
        self._fruitless: dict[str, list[Cuts]] = {}

    @property
    def cuts(self) -> Cuts | None:
        """Of the iteration that runs."""
        return None if self._running is None else self._running.cuts

    def credit(self, cuts: Cuts, advantages: Sequence[float]) -> Cuts:
        """The running cuts with other advantages, one a sample.

        Raises:
            PageError: these cuts are not those that run; another number of advantages, or one that is not finite.
        """
        refuse_other_cuts("gate.credit", cuts, self.cuts)
        if len(advantages) != len(cuts.batch) or not all(map(math.isfinite, advantages)):
            raise PageError(
                f"gate.credit got {len(advantages)} advantages for {len(cuts.batch)} samples: write a finite number "
                "for each row of `cuts.batch`"
            )
        assert self._running is not None, "it has cuts"
        rows = zip(cuts.batch, advantages, strict=True)
        credited = replace(cuts, batch=BatchRef(tuple(row.with_advantage(float(number)) for row, number in rows)))
        self._running = replace(self._running, cuts=credited)
        return credited

    def begin(self, picked: tuple[Cut, ...]) -> Iteration:
        """The picked samples with their advantages, sorted by (group, member)."""
        rows = self._with_advantages(picked)
        counted = [row for row in rows if self._counts(row)]
        tokens = sum(row.tokens for row in counted)
        cuts = Cuts(self._epoch, self._gate.version, BatchRef(tuple(rows)), tokens, len(counted))
        self._running = Running(picked, cuts, asyncio.get_running_loop().time())
        self._books.observe(StepBegan(cuts))
        return Iteration(cuts, self.lost)

    def done(self, report: StepReport) -> None:
        """The trainer's report: the version rises, or the samples of a skipped step are dropped.

        Raises:
            Refused: the report is of another epoch, or led to an unexpected version.
            NonFiniteLoss: three steps in a row were not finite.
            OnlyTruncated: three steps in a row had no answer with an end.
            PolicyMismatch: the step crossed a bound that ends the run.
            JournalError: the trainer trained something else than it was given.
        """
        running = self._end()
        self._check(running.cuts, report)
        report = replace(report, metrics=report.metrics | self._mismatch.canary())
        if report.skipped:
            self._drop(running.picked, report.skipped)
        else:
            advantages = tuple(row.advantage or 0.0 for row in running.cuts.batch)
            self._books.trained(running.picked, report.version, advantages, report.chain)
        self._tell(running, report)
        self._count_fruitless(running.cuts, report.skipped)
        if warning := self._mismatch.see(report.metrics, report.version):
            self._books.observe(PoliciesApart(warning))

    def handed_over(self, canary: float) -> None:
        """A reader took over a version and is so far from the trainer, in nats; told with the next step."""
        self._mismatch.heard(canary)

    def lost(self, error: LostRows) -> None:
        """Rows were gone before the trainer had read them; nothing was trained."""
        running = self._end()
        self._books.observe(StepLost(running.cuts, str(error)))
        self._books.requeue(running.picked)
        self._rows_lost(running.cuts, str(error))

    def _counts(self, row: RowRef) -> bool:
        """Whether it is part of denominators and statistics."""
        return not (self._mask_truncated and row.finish == "length")

    def _with_advantages(self, picked: tuple[Cut, ...]) -> list[RowRef]:
        advantages = self._advantages(self._books.rewarded(picked, self._counts), self._gate.version)
        return [
            row.with_advantage(advantage)
            for (group, members), of_cut in zip(picked, advantages, strict=True)
            for row, advantage in zip(self._books.rows(group, members), of_cut, strict=True)
        ]

    def _end(self) -> Running:
        assert self._running is not None, "an iteration ends once, after it began"
        running, self._running = self._running, None
        return running

    def _check(self, cuts: Cuts, report: StepReport) -> None:
        expected = (cuts.epoch, cuts.version + (not report.skipped))
        if (report.epoch, report.version) != expected:
            raise Refused(
                f"the trainer reports epoch {report.epoch}, version {report.version} after a step that should have "
                f"led to epoch {expected[0]}, version {expected[1]}"
            )

    def _drop(self, picked: tuple[Cut, ...], reason: str) -> None:
        self._books.requeue(picked)
        for group, members in picked:
            self._books.drop(group, members, reason)

    def _tell(self, running: Running, report: StepReport) -> None:
        now = asyncio.get_running_loop().time()
        staleness = self.staleness.step(self._gate, report.samples)
        waited, self._ended = running.began - self._ended, now
        self._books.observe(StepDone(running.cuts, report, staleness, waited, now - running.began))

    def _count_fruitless(self, cuts: Cuts, skipped: str) -> None:
        """skipped: why the step trained nothing; empty when it did."""
        before = self._fruitless.get(skipped, [])
        self._fruitless = {skipped: [*before, cuts][-IN_A_ROW:]} if skipped else {}
        if len(self._fruitless.get(skipped, [])) < IN_A_ROW:
            return
        where = f"{IN_A_ROW} steps in a row from version {cuts.version}"
        if skipped == "truncated":
            raise OnlyTruncated(
                f"{where} had no answer that came to its end, so algorithm.mask_truncated left nothing to train: write "
                "a larger generation.max_new_tokens, or mask_truncated = false"
            )
        if skipped == "not finite":
            samples = [row.key for bad in self._fruitless[skipped] for row in bad.batch]
            raise NonFiniteLoss(
                f"{where} had a loss or gradient that is not finite; their samples (group, member) were {samples}. Try "
                "a smaller learning rate or max_grad_norm"
            )

"""Several ranks of a trainer with copies of its weights, or of parts of them, of which one dies between two exchanges,
or during one.

give ──> all have given ──> each gets what all gave, some time later ──> takes the update ──> the next exchange
                             └── a rank died meanwhile: PeerLost, also where another one had its answer before

A rank learns of the death of one with the same part or of the same copy; it waits for others until such a one ends.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asyncrl.errors import LostRows, PeerLost, Refused
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.fleet.worker.worker_spec import RunFacts
from asyncrl.protocols.batch import Batch, BatchRef, Cuts, RowRef
from asyncrl.protocols.hash_chain import chain
from asyncrl.protocols.messages import StepReport
from asyncrl.protocols.rank_layout import Layout
from asyncrl.simulation.fakes.fake_service import now
from asyncrl.simulation.faults.trial_plan import Trial
from asyncrl.simulation.faults.trial_services import STATE, GroundTruth, TrialTraining

if TYPE_CHECKING:
    from asyncrl.simulation.faults.faulty_platform import SlowDisk

SLOWEST = 1.0
"""Seconds until the answer of an exchange has reached the last rank."""
KEPT_STATE = 60.0
"""Seconds for which a rank that lost another one stays."""


def file_of(part: int) -> str:
    """Returns the name of the file of a part of the state in a checkpoint."""
    return f"part-{part}" if part else STATE


class RankExchange:
    """Connects the ranks of one start of a trainer."""

    def __init__(self, layout: Layout, seed: str) -> None:
        self._layout = layout
        self._size = layout.size
        self._lost = [asyncio.Event() for _ in range(layout.size)]
        self._chance = random.Random(seed)
        self._given: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        self._complete: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)

    async def give(self, number: int, rank: int, value: Any) -> list[Any]:
        """Returns what all ranks gave in the exchange of this number. Raises PeerLost once one is gone that this rank
        is connected to."""
        lost = self._lost[rank]
        self._given[number][rank] = value
        if len(self._given[number]) == self._size:
            self._complete[number].set()
        waits = [asyncio.ensure_future(event.wait()) for event in (self._complete[number], lost)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._chance.uniform(0.0, SLOWEST)):
                await lost.wait()
        if lost.is_set():
            raise PeerLost(f"rank {rank} lost another rank in exchange {number}")
        return [self._given[number][other] for other in range(self._size)]

    def end(self, rank: int) -> None:
        """Ends the connections of a rank whose process is gone."""
        part, copy = self._layout.part(rank), rank // self._layout.parts
        for other, lost in enumerate(self._lost):
            if self._layout.part(other) == part or other // self._layout.parts == copy:
                lost.set()


class RankExchanges:
    """The exchanges of each incarnation of a run, in which the ranks of its trainer start together."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._made: dict[int, RankExchange] = {}

    def of(self, incarnation: int) -> RankExchange:
        if incarnation not in self._made:
            self._made[incarnation] = RankExchange(self._trial.layout, f"exchange {self._trial.seed} {incarnation}")
        return self._made[incarnation]


class TrialTrainingRank(TrialTraining):
    """One of several ranks. weights: version of what it holds, which an update raises before the step has ended."""

    def __init__(self, truth: GroundTruth, disk: "SlowDisk", exchanges: RankExchanges, context: WorkerContext) -> None:
        super().__init__(truth, disk, context)
        self._exchanges_of_run = exchanges
        self._exchange = exchanges.of(context.facts.incarnation)
        self._exchanges = 0
        self._left_ranks = asyncio.Event()

    def restore(self, version: int, link: bytes) -> None:
        super().restore(version, link)
        self.weights = version

    @property
    def held_version(self) -> int:
        return self.weights

    async def start(self) -> None:
        await super().start()
        self.truth.services[self.instance] = self
        if (folder := self.context.facts.checkpoint_dir) is None:
            return
        for part in range(self.truth.trial.parts):
            found = "nothing"
            with suppress(FileNotFoundError):
                found = self._disk.open(str(folder), file_of(part)).read().decode().partition(" ")[0]
            if folder.name != found:
                self.truth.report(f"checkpoint {folder.name} holds of part {part} the weights of version {found}")

    async def renew(self, facts: RunFacts) -> None:
        if not self._left_ranks.is_set():
            raise Refused("it has not left its ranks")
        await super().renew(facts)
        self._exchange = self._exchanges_of_run.of(facts.incarnation)
        self._exchanges = 0
        self._last_step = None
        self._left_ranks.clear()
        self.context.rank_meeting.forget()
        await self.start()

    async def read_checked(self, samples: BatchRef, columns: Any) -> Batch:
        """Reads the rows of this rank. Raises LostRows on all ranks when one of them lost rows."""
        rows: Batch | None = None
        lost: LostRows | None = None
        try:
            rows = await super().read_checked(samples, columns)
        except LostRows as own:
            lost = own
        found = [each for each in await self._give(lost) if each is not None]
        if rows is None or found:
            raise found[0]
        return rows

    async def train(self, cuts: Cuts, rows: Batch) -> StepReport:
        """Trains this rank's rows; what all ranks trained is one step."""
        began = now()
        try:
            await self.spend(self.cost.fixed + self.cost.token * cuts.tokens)
            samples, in_loss = self._compute_loss(cuts.batch, rows)
            self._steps += 1
            given = await self._give([*zip(cuts.batch, samples, in_loss, strict=True)])
            self.busy += now() - began
            accounts = sorted((each for rank in given for each in rank), key=lambda account: account[0].key)
            trained = [(row, stamps) for row, sample, stamps in accounts if sample.trained]
            if trained:
                await self._wait_for_slot()
                self._leases.begin_write(self.version + 1)
                self._update(trained)
            await self._give(None)
        except PeerLost as lost:
            try:
                async with asyncio.timeout(KEPT_STATE):
                    await self._left_ranks.wait()
            except TimeoutError:
                raise lost from None
            return self._report((), "lost ranks")  # The controller has ended.
        if not trained:
            return self._report(samples, self.why_skipped([sample for _, sample, _ in accounts]))
        self.chain = chain(self.chain, [row.name for row, _ in trained])
        self.version = self.weights
        self._leases.end_write(self.version)
        return replace(self._report(samples, ""), updates=1, published=await self.published())

    def _update(self, trained: Sequence[tuple[RowRef, Any]]) -> None:
        """Takes an update on the rows of all ranks, each with the version stamps of its tokens in the loss."""
        self.truth.updated(self.version, BatchRef(tuple(row for row, _ in trained)), [stamps for _, stamps in trained])
        self.weights = self.version + 1

    @property
    def state_file(self) -> str:
        return file_of(self.truth.trial.layout.part(self.context.spec.rank))

    async def leave_ranks(self, incarnation: int, version: int) -> None:
        self._left_ranks.set()
        if self._last_step is not None:
            await asyncio.wait([self._last_step[1]])
        self._check("copy", incarnation, version)
        if self.weights != version:
            raise Refused(f"an update from version {version} was taken, and its step has not ended")

    def ended(self) -> None:
        self._exchange.end(self.context.spec.rank)

    async def _give(self, value: Any) -> list[Any]:
        self._exchanges += 1
        return await self._exchange.give(self._exchanges, self.context.spec.rank, value)

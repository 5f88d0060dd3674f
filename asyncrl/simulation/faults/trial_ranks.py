"""Several ranks of a trainer with copies of its weights, of which one dies between two exchanges, or during one.

give ──> all have given ──> each gets what all gave, some time later ──> takes the update ──> the next exchange
                             └── a rank died meanwhile: PeerLost, also where another one had its answer before
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asyncrl.errors import LostRows, PeerLost
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.protocols.batch import Batch, BatchRef, Cuts, RowRef
from asyncrl.protocols.hash_chain import chain
from asyncrl.protocols.messages import StepReport
from asyncrl.simulation.fakes.fake_service import now
from asyncrl.simulation.faults.trial_plan import Trial
from asyncrl.simulation.faults.trial_services import STATE, GroundTruth, TrialTraining

if TYPE_CHECKING:
    from asyncrl.simulation.faults.faulty_platform import SlowDisk

SLOWEST = 1.0
"""Seconds until the answer of an exchange has reached the last rank."""
LOSS_NOTICE = 60.0
"""Seconds for which a rank that lost another one stays."""


class RankExchange:
    """Connects the ranks of one start of a trainer."""

    def __init__(self, size: int, seed: str) -> None:
        self._size = size
        self._lost = asyncio.Event()
        self._chance = random.Random(seed)
        self._given: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        self._complete: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)

    async def give(self, number: int, rank: int, value: Any) -> list[Any]:
        """Returns what all ranks gave in the exchange of this number. Raises PeerLost once one is gone."""
        self._given[number][rank] = value
        if len(self._given[number]) == self._size:
            self._complete[number].set()
        waits = [asyncio.ensure_future(event.wait()) for event in (self._complete[number], self._lost)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._chance.uniform(0.0, SLOWEST)):
                await self._lost.wait()
        if self._lost.is_set():
            raise PeerLost(f"rank {rank} lost another rank in exchange {number}")
        return [self._given[number][other] for other in range(self._size)]

    def end(self) -> None:
        """Ends the connections of a rank whose process is gone."""
        self._lost.set()


class RankExchanges:
    """The exchanges of each incarnation of a run, in which the ranks of its trainer start together."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._made: dict[int, RankExchange] = {}

    def of(self, incarnation: int) -> RankExchange:
        if incarnation not in self._made:
            self._made[incarnation] = RankExchange(self._trial.ranks, f"exchange {self._trial.seed} {incarnation}")
        return self._made[incarnation]


class TrialTrainingRank(TrialTraining):
    """One of several ranks. weights: version of what it holds, which an update raises before the step has ended."""

    def __init__(self, truth: GroundTruth, disk: "SlowDisk", exchanges: RankExchanges, context: WorkerContext) -> None:
        super().__init__(truth, disk, context)
        self._exchange = exchanges.of(context.facts.incarnation)
        self._exchanges = 0

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
        found = "nothing"
        with suppress(FileNotFoundError):
            found = self._disk.open(str(folder), STATE).read().decode().partition(" ")[0]
        if folder.name != found:
            self.truth.report(f"checkpoint {folder.name} holds the weights of version {found}")

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
        except PeerLost:
            await asyncio.sleep(LOSS_NOTICE)
            raise
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

    def ended(self) -> None:
        self._exchange.end()

    async def _give(self, value: Any) -> list[Any]:
        self._exchanges += 1
        return await self._exchange.give(self._exchanges, self.context.spec.rank, value)

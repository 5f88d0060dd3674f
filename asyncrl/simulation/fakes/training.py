"""A training service whose steps only take time; versions, staleness, leases and the chain are those of a real one."""

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

from asyncrl.errors import DeadlineExceeded, Refused
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.lanes.data.row_file import READY_ROWS, RowFileWriter
from asyncrl.lanes.data.row_reader import RowPrefetch
from asyncrl.lanes.weights.leases import Leases, UpdatePermit, slot_of
from asyncrl.protocols.batch import Batch, BatchRef, Cuts
from asyncrl.protocols.hash_chain import GENESIS, chain
from asyncrl.protocols.messages import Checkpointed, Published, StepReport, TrainedSample
from asyncrl.protocols.service_contracts import ENDED, UNDONE, Training
from asyncrl.protocols.staleness import live
from asyncrl.simulation.fakes.fake_service import KEY, FakeService, inline, now

WriteCopy: TypeAlias = Callable[[str], dict[str, str]]
STEPS_OF_A_CHECKPOINT = 2
"""Writing a checkpoint takes the fixed seconds of so many steps."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Gives the seconds of a step: `fixed`, plus `token` for each response token; the chance that its update is not
    finite, so that it trains nothing; and the chance that a correction rejects a sample."""

    fixed: float
    token: float = 0.0
    not_finite: float = 0.0
    rejected: float = 0.0


class FakeTraining(FakeService, Training):
    """Trains by compare-and-set on (incarnation, version), and publishes into two slots that readers lease.

    In a worker a repeated step gets the stored report, and a step that has begun is finished. Called directly, a
    repeated step is refused: no handle repeats it.

    limit: how many versions old a token in the loss may be; None admits every token. read_columns: columns of a row
    that a step reads. slot_patience: seconds to wait for the readers of the slot of the next version. arena: name of
    the weight arena in what is published.

    trained: version stamps of the tokens in the loss by (group, member), and the version that it was trained at.
    samples_trained: how many samples were trained, repetitions included. oldest: staleness of the oldest token in the
    loss. in_loss: number of tokens in the loss. busy: seconds in steps; blocked: seconds spent waiting for a slot.
    """

    arena = "fake"

    def __init__(
        self,
        cost: StepCost,
        limit: int | None,
        peers: Iterable[FakeService] = (),
        seed: int = 0,
        read_columns: Sequence[str] = ("versions",),
        slot_patience: float = 60.0,
        context: WorkerContext | None = None,
        in_lockstep: bool = False,
    ) -> None:
        super().__init__("training", context, peers)
        self._in_lockstep = in_lockstep
        self._permit = UpdatePermit()
        self._is_undone = False
        self.cost = cost
        self.limit = limit
        self.busy = 0.0
        self.blocked = 0.0
        self.trained: dict[tuple[int, int], tuple[Any, int]] = {}
        self.samples_trained = 0
        self.oldest = 0
        self.in_loss = 0
        self._seed = seed
        self._steps = 0
        self._read_columns = read_columns
        self._slot_patience = slot_patience
        self._lease_changed = asyncio.Event()
        self._turn = asyncio.Lock()
        self._copy: tuple[tuple[int, int], str, WriteCopy] = ((-1, -1), "", lambda directory: {})
        self._last_step: tuple[object, asyncio.Task[StepReport]] | None = None
        self._prefetched = RowPrefetch(self.context.reader, [*read_columns, KEY])
        self.restore(0, GENESIS)

    def restore(self, version: int, chain: bytes) -> None:
        self.version = version
        self.chain = chain
        self._leases = Leases()
        self._leases.end_write(version)

    def learn(self, cuts: Cuts, rows: Batch) -> None:
        """Changes the weights."""

    def on_trained(self, batch: BatchRef, in_loss: Sequence[Any]) -> None:
        """Observes a step that trains these samples, before its version rises. in_loss: version stamps of the tokens of
        each sample in the loss, at least one."""
        for row, stamps in zip(batch, in_loss, strict=True):
            self.trained[row.key] = (stamps, self.version)
            self.oldest = max([self.oldest, *(self.version - stamps).tolist()])
        self.samples_trained += len(batch)
        self.in_loss += sum(map(len, in_loss))

    def write_weights(self, version: int) -> None:
        """Writes the weights of this version into their slot."""

    def state_copy(self) -> WriteCopy:
        """Copies the state. Returns what writes the copy into a directory, and returns the digest of each file."""
        return lambda directory: {}

    def write_file(self, directory: str, file: str, data: bytes) -> None:
        """Writes a file of a checkpoint."""
        if self.disk is None:
            (Path(directory) / file).write_bytes(data)
        else:
            self.disk.put(directory, file, data)

    async def published(self) -> Published:
        return Published(self.incarnation, self.version, self.arena, slot_of(self.version), "")

    @property
    def finished(self) -> int:
        return super().finished + self._permit.periods

    async def allow_update(self, incarnation: int, version: int) -> None:
        self._permit.allow(incarnation, version)

    async def undo_step(self, incarnation: int, version: int) -> list[str]:
        if (incarnation, version) != (self.incarnation, self.version):
            return [ENDED]
        self._is_undone = True
        return [UNDONE]

    async def using(self, readers: tuple[str, ...], version: int) -> None:
        for reader in readers:
            self._leases.using(reader, version)
        self._lease_changed.set()

    async def detached(self, reader: str) -> None:
        self._leases.detach(reader)
        self._lease_changed.set()

    async def copy_state(self, incarnation: int, version: int) -> None:
        async with self._turn:
            self._check("copy", incarnation, version)
            self._copy = (incarnation, version), self.chain.hex(), self.state_copy()

    async def checkpoint(self, directory: str, incarnation: int, version: int) -> Checkpointed:
        position, chain_then, write = self._copy
        if position != (incarnation, version):
            raise Refused(f"a checkpoint of version {version} was refused: the copy is of version {position[1]}")
        await asyncio.sleep(STEPS_OF_A_CHECKPOINT * self.cost.fixed)
        return Checkpointed(version, chain_then, write(directory))

    async def save_rows(self, directory: str, samples: BatchRef) -> Checkpointed:
        writer = RowFileWriter(file := BytesIO(), self.context.reader, inline)
        await writer.save(samples)
        self.write_file(directory, READY_ROWS, file.getvalue())
        return Checkpointed(self.version, "", {READY_ROWS: writer.digest}, tuple(writer.saved))

    async def prefetch(self, samples: BatchRef) -> list[bool]:
        return await super().prefetch(samples) if self.is_direct else await self._prefetched.prefetch(samples)

    async def read(self, samples: BatchRef, columns: Sequence[str]) -> Batch:
        return await self._prefetched.read(samples)

    async def step(self, cuts: Cuts) -> StepReport:
        old = [row.name for row in cuts.batch if row.incarnation != self.incarnation]
        assert not old, f"the samples {old} are of another incarnation of the run than {self.incarnation}"
        asked = (cuts.incarnation, cuts.version, [row.name for row in cuts.batch])
        async with self._turn:
            if self._last_step is not None and self._last_step[0] == asked:
                return await asyncio.shield(self._last_step[1])
            self._check("step", cuts.incarnation, cuts.version)
            rows = await self.read_checked(cuts.batch, self._read_columns)
            if self.is_direct:
                return await self.train(cuts, rows)
            work = self.context.tasks.create_task(self.train(cuts, rows), name="step")
            self._last_step = asked, work
            report = await asyncio.shield(work)
            if report.skipped:
                self._last_step = None
            return report

    def _check(self, call: str, incarnation: int, version: int) -> None:
        """Raises Refused unless this is the version that the trainer is at."""
        if (incarnation, version) != (self.incarnation, self.version):
            at = f"the trainer is at version {self.version} of incarnation {self.incarnation}"
            raise Refused(f"a {call} from version {version} of incarnation {incarnation} was refused: {at}")

    async def train(self, cuts: Cuts, rows: Batch) -> StepReport:
        """Trains the tokens that are young enough and publishes the next version."""
        seconds = self.cost.fixed + self.cost.token * cuts.tokens
        began = now()
        await self.spend(seconds)
        self.busy += now() - began
        if self._in_lockstep:
            await self._permit.wait(cuts.incarnation, cuts.version)
        self._steps += 1
        samples, in_loss = self._compute_loss(cuts.batch, rows)
        trained = [index for index, sample in enumerate(samples) if sample.trained]
        if not trained:
            return self._report(samples, self.why_skipped(samples))
        await self._wait_for_slot()
        if self._is_undone:
            raise Refused("the step was undone, because the run ends")
        self._leases.begin_write(self.version + 1)
        self.learn(cuts, rows)
        self.on_trained(cuts.batch.take(trained), [in_loss[index] for index in trained])
        self.chain = self.next_link(samples)
        self.version += 1
        self.write_weights(self.version)
        self._leases.end_write(self.version)
        return replace(self._report(samples, ""), updates=1, published=await self.published())

    def next_link(self, samples: Iterable[TrainedSample]) -> bytes:
        """Returns the chain after a step that trained some of these samples."""
        return chain(self.chain, [sample.name for sample in samples if sample.trained])

    def why_skipped(self, samples: Iterable[TrainedSample]) -> str:
        """Returns why a step trained none of its samples."""
        reasons = {sample.untrained_because for sample in samples}
        return next(why for why in ("not finite", "rejected", "stale") if why in reasons)

    def _compute_loss(self, batch: BatchRef, rows: Batch) -> tuple[tuple[TrainedSample, ...], list[Any]]:
        """Returns the account of each sample, and the version stamps of its tokens that are young enough to train."""
        in_loss = list(rows["versions"])
        if self.limit is not None:
            in_loss = [stamps[live(stamps, self.version, self.limit)] for stamps in in_loss]
        chance = random.Random(f"step {self._seed} {self._steps}")
        finite = chance.random() >= self.cost.not_finite
        samples = []
        for row, stamps in zip(batch, in_loss, strict=True):
            kept = len(stamps)
            masked = row.tokens - len(stamps)
            if chance.random() < self.cost.rejected:
                samples.append(TrainedSample(*row.name, 0, masked, "stale" if masked else "", kept))
            elif finite:
                samples.append(TrainedSample(*row.name, kept, masked, "stale" if masked else ""))
            else:
                samples.append(TrainedSample(*row.name, 0, row.tokens, "not finite"))
        return tuple(samples), in_loss

    async def _wait_for_slot(self) -> None:
        """Waits until every reader has left the slot of the next version, which holds the version before this one."""
        began = now()
        try:
            async with asyncio.timeout(self._slot_patience):
                while self._leases.holders(self.version + 1):
                    self._lease_changed.clear()
                    await self._lease_changed.wait()
        except TimeoutError as error:
            holders = ", ".join(self._leases.holders(self.version + 1))
            raise DeadlineExceeded(
                f"slot {slot_of(self.version + 1)} was not free within {self._slot_patience:g} s; {holders} read it"
            ) from error
        self.blocked += now() - began

    def _report(self, samples: tuple[TrainedSample, ...], skipped: str) -> StepReport:
        return StepReport(self.incarnation, self.version, 0, skipped, self.chain.hex(), {}, samples, None)

"""Trains the policy and publishes each new version into the weight arena."""

import asyncio
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asyncrl.engines.devices import refuse_unusable
from asyncrl.engines.training.interface import StepOutcome, TrainingEngine, TrainRow
from asyncrl.engines.training.ranks import Alone, Meeting, Processes, Ranks
from asyncrl.engines.training.rows import batch_digest, columns_of, train_rows
from asyncrl.engines.training.state import digests
from asyncrl.engines.training.torch import TorchTraining
from asyncrl.errors import ArenaFull, ConfigError, DeadlineExceeded, FleetFailed, LostRows, PeerLost, Refused
from asyncrl.protocols.batch import BatchRef, Cuts
from asyncrl.protocols.chain import GENESIS, chain
from asyncrl.protocols.contracts import Training
from asyncrl.protocols.messages import Checkpointed, Published, StepReport, TrainedSample
from asyncrl.rows_ahead import RowsAhead
from asyncrl.service import Service, WorkerContext
from asyncrl.weights.arena import Writer, open_writer
from asyncrl.weights.session import slot_of
from asyncrl.weights.spec import WeightsSpec
from asyncrl.workers import DEATH_NOTICE


@dataclass(slots=True)
class Iteration:
    """A step under way. read: set once all ranks have read their rows, or have said that some are gone. lost: these.
    work: all of it up to the engine's outcome, None where rows are gone."""

    digest: str
    read: asyncio.Event = field(default_factory=asyncio.Event)
    lost: LostRows | None = None
    work: "asyncio.Task[StepOutcome | None] | None" = None


@dataclass(frozen=True, slots=True)
class Done:
    """The last step that led to a new version."""

    digest: str
    report: StepReport


class TrainingService(Service, Training):
    """One rank, one engine. `step` is a compare-and-set on (epoch, version), on every rank with the rows of its share.

    A step that has begun is finished whatever becomes of the call: half a step would be weights of no version, and
    other ranks wait for this one. A repeated call with the same batch waits for it, or gets the stored report. Whether
    all rows are there is decided together; so is, in the engine, whether there is an update.

    All ranks hold the same weights. The first publishes them and keeps the readers' leases.
    """

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._engine: TrainingEngine
        self._ranks: Ranks
        self._writer: Writer | None = None
        self._published: Published
        self._version, self._chain = 0, GENESIS
        self._iteration: Iteration | None = None
        self._last: Done | None = None
        self._turn = asyncio.Lock()
        self._ahead = RowsAhead(context.reader, columns_of(context.config.algorithm))
        self._leases_changed = asyncio.Event()

    async def start(self) -> None:
        """Load the model, or the checkpoint the run resumes from, and publish its version.

        Raises:
            ConfigError: torch has no such device; the model is none that the engine trains, or not whole; the
                checkpoint is of other ranks; there is no room for two versions of the weights.
            PeerLost: another rank did not come.
        """
        await self.context.compute.run(self._load)
        self._published = await self.context.compute.run(self._write, self._version)

    async def stop(self) -> None:
        if self._writer is not None:
            self._writer.close()
        await super().stop()

    # ---- endpoints ---------------------------------------------------------------------------------------

    async def step(self, cuts: Cuts) -> StepReport:
        digest = batch_digest(cuts)
        async with self._turn:
            stored = self._stored(cuts, digest)
            if stored is not None:
                return stored
            iteration = await self._under_way()
            self._refuse_elsewhere(cuts, digest, iteration)
            return await self._complete(iteration or self._begin(cuts, digest))

    async def foresee(self, samples: BatchRef) -> list[bool]:
        return await self._ahead.foresee(samples)

    async def published(self) -> Published:
        return self._published

    async def using(self, reader: str, version: int) -> None:
        if self._publishes:
            self._writing.leases.using(reader, version)
            self._leases_changed.set()

    async def detached(self, reader: str) -> None:
        if self._publishes:
            self._writing.leases.detach(reader)
            self._leases_changed.set()

    async def checkpoint(self, directory: str, epoch: int, version: int) -> Checkpointed:
        async with self._turn:
            if (epoch, version) != self._at or await self._under_way() is not None:
                raise Refused(
                    f"a checkpoint of {_named((epoch, version))} was asked for; the trainer is at {self._state}"
                )
            try:
                files = await self.context.compute.run(self._save, Path(directory))
            except PeerLost as lost:
                await asyncio.sleep(DEATH_NOTICE)
                raise FleetFailed(str(lost)) from lost  # To ask again would not help: ranks exchange nothing any more.
            return Checkpointed(version, self._chain.hex(), files)

    # ---- a step ------------------------------------------------------------------------------------------

    def _stored(self, cuts: Cuts, digest: str) -> StepReport | None:
        """The report of this very step, when it is the one that led here."""
        repeated = (cuts.epoch, cuts.version + 1) == self._at and self._last is not None
        return self._last.report if repeated and self._last is not None and self._last.digest == digest else None

    async def _under_way(self) -> Iteration | None:
        """The iteration that an earlier call left behind; none, if rows of it were gone."""
        iteration = self._iteration
        if iteration is None:
            return None
        await iteration.read.wait()
        return None if iteration.lost else iteration

    def _refuse_elsewhere(self, cuts: Cuts, digest: str, iteration: Iteration | None) -> None:
        if (cuts.epoch, cuts.version) != self._at:
            raise Refused(
                f"a step from {_named((cuts.epoch, cuts.version))} was asked for; the trainer is at {self._state}"
            )
        if iteration is not None and iteration.digest != digest:
            raise Refused(
                f"a step from {self._state} was asked for with batch {digest[:16]}, but batch "
                f"{iteration.digest[:16]} is being trained from there"
            )

    def _begin(self, cuts: Cuts, digest: str) -> Iteration:
        """As a task of the worker: what it raises ends the worker, whose weights are unknown then."""
        self._iteration = iteration = Iteration(digest)
        name = f"step from version {cuts.version}"
        iteration.work = self.context.tasks.create_task(self._work(iteration, cuts), name=name)
        return iteration

    async def _work(self, iteration: Iteration, cuts: Cuts) -> StepOutcome | None:
        try:
            rows = await self._read(cuts.batch)
        except LostRows as lost:
            rows, iteration.lost = [], lost
        try:
            if await self.context.compute.run(self._any_lost, iteration.lost is not None):
                iteration.lost = iteration.lost or LostRows("another rank of the trainer found rows of its share gone")
                return None
            iteration.read.set()
            return await self._run_engine(cuts, rows)
        except PeerLost:
            await asyncio.sleep(DEATH_NOTICE)  # Whoever died is told of before those that miss it.
            raise
        finally:
            iteration.read.set()

    async def _read(self, batch: BatchRef) -> list[TrainRow]:
        rows = train_rows(batch, await self._ahead.read(batch), self.context.config.generation.temperature)
        for row in batch:
            self.context.tracer.flow_end(f"sample {row.group}.{row.member}.{row.attempt}")
        return rows

    def _any_lost(self, lost: bool) -> bool:
        """On the compute thread: whether any rank misses rows of its share."""
        return bool(self._ranks.largest(torch.tensor([float(lost)])).item())

    async def _run_engine(self, cuts: Cuts, rows: list[TrainRow]) -> StepOutcome:
        """A micro-batch at a time, so that other work of this thread gets its turn between them."""
        run = self._engine.begin(rows, cuts.epoch, cuts.version)
        while await self.context.compute.run(run.advance):
            self.counters["micro_batches"] = self.counters.get("micro_batches", 0) + 1
        return run.outcome

    async def _complete(self, iteration: Iteration) -> StepReport:
        """Raises LostRows, with nothing changed, when rows of any rank are gone."""
        assert iteration.work is not None
        outcome = await asyncio.shield(iteration.work)
        if outcome is None:
            assert iteration.lost is not None
            self._iteration = None
            raise iteration.lost
        if outcome.skipped:
            self._iteration = None
            self.context.log.warning("step skipped", reason=outcome.skipped, samples=outcome.culprits)
            return self._report(outcome, None)
        version = self._version + 1
        if self._publishes:
            await self._slot_free(version)
        self._published = await self.context.compute.run(self._write, version)
        self._version, self._chain = version, chain(self._chain, outcome.batch)
        report = self._report(outcome, self._published if self._publishes else None)
        self._iteration, self._last = None, Done(iteration.digest, report)
        return report

    async def _slot_free(self, version: int) -> None:
        """Until no reader reads what `version` will overwrite; from then on none may. A reader that does not let go
        within `staleness.publish_deadline` is killed by the controller; it gets as long again to be gone."""
        deadline = 2 * self.context.config.staleness.publish_deadline
        try:
            with self.context.clock.state("sync"):
                async with asyncio.timeout(deadline):
                    while self._writing.leases.holders(version):
                        self._leases_changed.clear()
                        await self._leases_changed.wait()
                    self._writing.leases.begin(version)
        except TimeoutError:
            holders = ", ".join(self._writing.leases.holders(version))
            raise DeadlineExceeded(
                f"weights of version {version} could not be written within {deadline:g} s: {holders} still read the "
                f"slot; raise staleness.publish_deadline if they are only slow"
            ) from None

    def _report(self, outcome: StepOutcome, published: Published | None) -> StepReport:
        samples = tuple(TrainedSample(*s.key, s.trained, s.masked, s.reason, s.rejected) for s in outcome.samples)
        epoch, version = self._at
        return StepReport(
            epoch, version, outcome.updates, outcome.skipped, self._chain.hex(), outcome.metrics, samples, published
        )

    # ---- state -------------------------------------------------------------------------------------------

    @property
    def _at(self) -> tuple[int, int]:
        return (self.context.epoch, self._version)

    @property
    def _state(self) -> str:
        return _named(self._at)

    @property
    def _publishes(self) -> bool:
        return self.context.rank == 0

    @property
    def _writing(self) -> Writer:
        assert self._writer is not None, "calls come after start"
        return self._writer

    def _load(self) -> None:
        """On the compute thread."""
        refuse_unusable("training.device", self.context.config.training.device)
        self._ranks = self.open_ranks()
        self._engine, extra = self.open_engine(self._ranks)
        self._version, self._chain = extra.get("version", 0), bytes.fromhex(extra.get("chain", GENESIS.hex()))
        if self._publishes:
            self._writer = self._open_writer(self._engine.weights_spec)

    def _open_writer(self, spec: WeightsSpec) -> Writer:
        try:
            return open_writer(self.context.weights_arena, spec, self.context.config.fleet.wire)
        except ArenaFull as full:
            raise ConfigError(
                f"two versions of the weights have to fit into shared memory: {full}; or take a smaller model "
                "(model.name), or half the bytes (model.dtype)"
            ) from full

    def open_ranks(self) -> Ranks:
        """The other ranks. option `meeting`: the file where they meet."""
        context, fleet = self.context, self.context.config.fleet
        if context.layout.size == 1:
            return Alone()
        meeting = Meeting(Path(context.options["meeting"]), fleet.start_deadline, fleet.call_deadline)
        waiting = partial(context.clock.state, "sync")
        return Processes(meeting, context.rank, context.layout.size, context.config.training.device, waiting)

    def open_engine(self, ranks: Ranks) -> tuple[TrainingEngine, dict[str, Any]]:
        """The engine and what was saved beside its state; of a first start: nothing. option `pretrain`: the file of
        the texts that are learnt beside."""
        context = self.context
        texts = Path(context.options["pretrain"]) if context.config.algorithm.pretrain_coefficient > 0 else None
        if context.checkpoint_dir is None:
            return TorchTraining(context.config, context.model_dir, ranks, texts), {}
        return TorchTraining.resume(context.config, context.checkpoint_dir, ranks, texts)

    def _write(self, version: int) -> Published:
        """On the compute thread. Ranks but the first only note the version: they have no arena."""
        if not self._publishes:
            return Published(self.context.epoch, version, "", slot_of(version), "")
        with self.context.clock.state("sync"):
            written = self._writing.write(self.context.epoch, version, self._engine.named_tensors())
        return replace(written, canary=self._engine.canary())

    def _save(self, directory: Path) -> dict[str, str]:
        """On the compute thread."""
        directory.mkdir(parents=True, exist_ok=True)
        extra: dict[str, Any] = {"version": self._version, "epoch": self.context.epoch, "chain": self._chain.hex()}
        self._engine.save(directory, extra)
        return digests(directory, self.context.rank)


def _named(state: tuple[int, int]) -> str:
    return f"version {state[1]} of epoch {state[0]}"

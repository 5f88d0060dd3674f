"""Trains the policy and publishes each new version into the weight arena."""

import asyncio
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asyncrl.engines.devices import refuse_unusable
from asyncrl.engines.training.batch.train_rows import TrainRow, batch_digest, columns_of, train_rows
from asyncrl.engines.training.data_parallel import DistributedRanks, Ranks
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.trainer_checkpoint import file_digests
from asyncrl.engines.training.training_step import StepOutcome
from asyncrl.errors import ArenaFull, ConfigError, DeadlineExceeded, FleetFailed, LostRows, PeerLost, Refused
from asyncrl.fleet.replicas import DEATH_NOTICE
from asyncrl.fleet.worker.service import Service, WorkerContext
from asyncrl.lanes.data.row_reader import RowPrefetch
from asyncrl.lanes.weights.arena import Writer, open_writer
from asyncrl.lanes.weights.leases import slot_of
from asyncrl.lanes.weights.tensor_spec import WeightsSpec
from asyncrl.protocols.batch import BatchRef, Cuts
from asyncrl.protocols.contracts import Training
from asyncrl.protocols.hash_chain import GENESIS, chain
from asyncrl.protocols.messages import Checkpointed, Published, StepReport


@dataclass(slots=True)
class StepInProgress:
    """Holds the state of a running step.

    digest: of its batch. rows_checked: set once all ranks have read their rows or reported lost rows. lost: the error
    of lost rows. work: the task up to the outcome of the engine; its result is None when rows are lost.
    """

    digest: str
    rows_checked: asyncio.Event = field(default_factory=asyncio.Event)
    lost: LostRows | None = None
    work: "asyncio.Task[StepOutcome | None] | None" = None


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """Holds the report of the step that made the present version. digest: of its batch."""

    digest: str
    report: StepReport


class TrainingService(Service, Training):
    """Runs one rank with one engine. `step` is a compare-and-set on (incarnation, version); every rank trains its share
    of the rows.

    A step that has begun is finished even if its call ends: half a step would leave weights without a version, and
    other ranks wait for this one. A repeated call with the same batch waits for the running step or returns its report.
    All ranks decide together whether rows are lost, and, in the engine, whether there is an update.

    All ranks hold the same weights. The first rank publishes them and manages the leases of the readers.
    """

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._engine: PolicyTrainer
        self._ranks: Ranks
        self._writer: Writer | None = None
        self._published: Published
        self._version = 0
        self._chain = GENESIS
        self._step: StepInProgress | None = None
        self._last: FinishedStep | None = None
        self._lock = asyncio.Lock()
        self._row_prefetch = RowPrefetch(context.reader, columns_of(context.config.algorithm))
        self._leases_changed = asyncio.Event()

    async def start(self) -> None:
        """Loads the model, or the checkpoint of a resumed run, and publishes its version.

        Raises:
            ConfigError: torch lacks the device; the engine cannot train the model, or its files are incomplete; the
                checkpoint has another number of ranks; shared memory cannot hold two versions of the weights.
            PeerLost: another rank did not start.
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
        async with self._lock:
            if (report := self._finished_report(cuts, digest)) is not None:
                return report
            step = await self._running_step()
            self._refuse_other_step(cuts, digest, step)
            return await self._complete(step or self._begin(cuts, digest))

    async def prefetch(self, samples: BatchRef) -> list[bool]:
        return await self._row_prefetch.prefetch(samples)

    async def published(self) -> Published:
        return self._published

    async def using(self, reader: str, version: int) -> None:
        if self._publishes:
            self._started_writer.leases.using(reader, version)
            self._leases_changed.set()

    async def detached(self, reader: str) -> None:
        if self._publishes:
            self._started_writer.leases.detach(reader)
            self._leases_changed.set()

    async def checkpoint(self, directory: str, incarnation: int, version: int) -> Checkpointed:
        async with self._lock:
            if (incarnation, version) != self._position or await self._running_step() is not None:
                raise Refused(
                    f"cannot save a checkpoint of {_position_text(incarnation, version)}: the trainer is at "
                    f"{_position_text(*self._position)}"
                )
            try:
                files = await self.context.compute.run(self._save, Path(directory))
            except PeerLost as lost:
                await asyncio.sleep(DEATH_NOTICE)
                raise FleetFailed(str(lost)) from lost  # A retry would fail too: ranks have lost contact.
            return Checkpointed(version, self._chain.hex(), files)

    # ---- a step ------------------------------------------------------------------------------------------

    def _finished_report(self, cuts: Cuts, digest: str) -> StepReport | None:
        """Returns the report of this step if it made the present version."""
        repeated = (cuts.incarnation, cuts.version + 1) == self._position
        return self._last.report if repeated and self._last is not None and self._last.digest == digest else None

    async def _running_step(self) -> StepInProgress | None:
        """Returns the step that an earlier call began; None if its rows are lost."""
        if (step := self._step) is None:
            return None
        await step.rows_checked.wait()
        return None if step.lost else step

    def _refuse_other_step(self, cuts: Cuts, digest: str, step: StepInProgress | None) -> None:
        position = _position_text(*self._position)
        if (cuts.incarnation, cuts.version) != self._position:
            raise Refused(
                f"cannot train from {_position_text(cuts.incarnation, cuts.version)}: the trainer is at {position}"
            )
        if step is not None and step.digest != digest:
            raise Refused(
                f"cannot train batch {digest[:16]} from {position}: batch {step.digest[:16]} is trained from there"
            )

    def _begin(self, cuts: Cuts, digest: str) -> StepInProgress:
        """Starts a task of the worker: an error in it ends the worker, because its weights are unknown then."""
        self._step = step = StepInProgress(digest)
        name = f"step from version {cuts.version}"
        step.work = self.context.tasks.create_task(self._work(step, cuts), name=name)
        return step

    async def _work(self, step: StepInProgress, cuts: Cuts) -> StepOutcome | None:
        try:
            rows = await self._read(cuts.batch)
        except LostRows as lost:
            rows = []
            step.lost = lost
        try:
            if await self.context.compute.run(self._any_rank_lost_rows, step.lost is not None):
                step.lost = step.lost or LostRows("another rank of the trainer lost rows of its share")
                return None
            step.rows_checked.set()
            return await self._run_engine(cuts, rows)
        except PeerLost:
            await asyncio.sleep(DEATH_NOTICE)  # Reports the death of the other rank before the end of this one.
            raise
        finally:
            step.rows_checked.set()

    async def _read(self, batch: BatchRef) -> list[TrainRow]:
        rows = train_rows(batch, await self._row_prefetch.read(batch), self.context.config.generation.temperature)
        for row in batch:
            self.context.tracer.flow_end(f"sample {row.group}.{row.member}.{row.attempt}")
        return rows

    def _any_rank_lost_rows(self, lost: bool) -> bool:
        """Asks all ranks whether one of them lost rows; runs on the compute thread."""
        return bool(self._ranks.largest(torch.tensor([float(lost)])).item())

    async def _run_engine(self, cuts: Cuts, rows: list[TrainRow]) -> StepOutcome:
        """Runs one micro-batch at a time, so that other work of the compute thread can run between them."""
        run = self._engine.begin(rows, cuts.incarnation, cuts.version)
        while await self.context.compute.run(run.advance):
            self.counters["micro_batches"] = self.counters.get("micro_batches", 0) + 1
        return run.outcome

    async def _complete(self, step: StepInProgress) -> StepReport:
        """Waits for the step and publishes the new version; raises LostRows, without a change, if a rank lost rows."""
        assert step.work is not None
        outcome = await asyncio.shield(step.work)
        if outcome is None:
            assert step.lost is not None
            self._step = None
            raise step.lost
        if outcome.skipped:
            self._step = None
            self.context.log.warning("step skipped", reason=outcome.skipped, samples=outcome.culprits)
            return self._report(outcome, None)
        version = self._version + 1
        if self._publishes:
            await self._wait_for_slot(version)
        self._published = await self.context.compute.run(self._write, version)
        self._version = version
        self._chain = chain(self._chain, outcome.batch)
        report = self._report(outcome, self._published if self._publishes else None)
        self._step = None
        self._last = FinishedStep(step.digest, report)
        return report

    async def _wait_for_slot(self, version: int) -> None:
        """Waits until no reader uses the slot of `version`, and closes the slot for readers. The controller kills a
        reader that uses it for longer than `staleness.publish_deadline`; the same time again is for that to take
        effect."""
        deadline = 2 * self.context.config.staleness.publish_deadline
        try:
            with self.context.clock.state("sync"):
                async with asyncio.timeout(deadline):
                    while self._started_writer.leases.holders(version):
                        self._leases_changed.clear()
                        await self._leases_changed.wait()
                    self._started_writer.leases.begin_write(version)
        except TimeoutError:
            holders = ", ".join(self._started_writer.leases.holders(version))
            raise DeadlineExceeded(
                f"weights of version {version} could not be written within {deadline:g} s: {holders} still read the "
                f"slot; raise staleness.publish_deadline if they are only slow"
            ) from None

    def _report(self, outcome: StepOutcome, published: Published | None) -> StepReport:
        incarnation, version = self._position
        return StepReport(
            incarnation,
            version,
            outcome.updates,
            outcome.skipped,
            self._chain.hex(),
            outcome.metrics,
            outcome.samples,
            published,
        )

    # ---- state -------------------------------------------------------------------------------------------

    @property
    def _position(self) -> tuple[int, int]:
        """Returns incarnation and version of the weights."""
        return (self.context.incarnation, self._version)

    @property
    def _publishes(self) -> bool:
        return self.context.rank == 0

    @property
    def _started_writer(self) -> Writer:
        assert self._writer is not None, "started before any call"
        return self._writer

    def _load(self) -> None:
        """Opens ranks, engine and weight arena; runs on the compute thread."""
        refuse_unusable("training.device", self.context.config.training.device)
        self._ranks = self.open_ranks()
        self._engine, extra = self.open_engine(self._ranks)
        self._version = extra.get("version", 0)
        self._chain = bytes.fromhex(extra.get("chain", GENESIS.hex()))
        if self._publishes:
            self._writer = self._open_writer(self._engine.weights_spec)

    def _open_writer(self, spec: WeightsSpec) -> Writer:
        try:
            return open_writer(self.context.weights_arena, spec, self.context.config.fleet.wire)
        except ArenaFull as full:
            raise ConfigError(
                f"two versions of the weights have to fit into shared memory: {full}; or use a smaller model "
                "(model.name), or half the bytes (model.dtype)"
            ) from full

    def open_ranks(self) -> Ranks:
        """Connects the ranks. options: `meeting`: the file of their rendezvous."""
        context, fleet = self.context, self.context.config.fleet
        if context.layout.size == 1:
            return Ranks()
        return DistributedRanks(
            Path(context.options["meeting"]),
            context.rank,
            context.layout.size,
            context.config.training.device,
            waiting=partial(context.clock.state, "sync"),
            start=fleet.start_deadline,
            exchange=fleet.call_deadline,
        )

    def open_engine(self, ranks: Ranks) -> tuple[PolicyTrainer, dict[str, Any]]:
        """Makes the engine; returns it with the values saved beside its state, none at the first start.

        options: `pretrain`: the file of texts for the pretraining loss.
        """
        context = self.context
        texts = Path(context.options["pretrain"]) if context.config.algorithm.pretrain_coefficient > 0 else None
        if context.checkpoint_dir is None:
            return PolicyTrainer(context.config, context.model_dir, ranks, texts), {}
        return PolicyTrainer.resume(context.config, context.checkpoint_dir, ranks, texts)

    def _write(self, version: int) -> Published:
        """Writes the weights on the compute thread; only the first rank has an arena."""
        if not self._publishes:
            return Published(self.context.incarnation, version, "", slot_of(version), "")
        with self.context.clock.state("sync"):
            written = self._started_writer.write(self.context.incarnation, version, self._engine.named_tensors())
        return replace(written, canary=self._engine.canary())

    def _save(self, directory: Path) -> dict[str, str]:
        """Saves the state of this rank; runs on the compute thread."""
        directory.mkdir(parents=True, exist_ok=True)
        extra: dict[str, Any] = {
            "version": self._version,
            "incarnation": self.context.incarnation,
            "chain": self._chain.hex(),
        }
        self._engine.save(directory, extra)
        return file_digests(directory, self.context.rank)


def _position_text(incarnation: int, version: int) -> str:
    return f"version {version} of incarnation {incarnation}"

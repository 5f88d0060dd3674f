"""Trains the policy, a language model or one that acts, and publishes each new version into the weight arena.

TrainerService has the calls, versions and leases of any trainer; TrainingService has the engine of a language model,
ActingTrainingService that of a policy that acts (`acting.env`).
"""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from asyncrl.engines.acting.acting_trainer import ActingStep, ActingTrainer
from asyncrl.engines.acting.stepping.spaces import read_spaces
from asyncrl.engines.acting.transitions import COLUMNS, transition_rows
from asyncrl.engines.devices import refuse_unusable
from asyncrl.engines.models.prompt_pictures import PromptPictures, read_pictures
from asyncrl.engines.ranks.rank_mesh import RankMesh
from asyncrl.engines.ranks.weight_gathering import gather_for_generation, regrouping_of
from asyncrl.engines.training.policy_trainer import PolicyStep, PolicyTrainer
from asyncrl.engines.training.train_rows import batch_digest, columns_of, train_rows
from asyncrl.engines.training.trainer_checkpoint import HeldCopy, StateCopy, copy_of, tensor_digests
from asyncrl.engines.training.training_step import AdvancingStep, StepOutcome, TrainedPolicy
from asyncrl.errors import ArenaFull, ConfigError, DeadlineExceeded, FleetFailed, LostRows, PeerLost, Refused
from asyncrl.fleet.remote_worker import DEATH_NOTICE
from asyncrl.fleet.weight_transport import transport_of
from asyncrl.fleet.worker.rank_meeting import MeetingPlace
from asyncrl.fleet.worker.service import Service, WorkerContext
from asyncrl.lanes.data.row_file import READY_ROWS, write_rows
from asyncrl.lanes.data.row_reader import RowPrefetch, run_for_rows
from asyncrl.lanes.weights.leases import Leases, UpdatePermit, slot_of
from asyncrl.lanes.weights.transports.transport_ends import WeightSender, open_sender
from asyncrl.lanes.weights.version_folder import folder_of_start
from asyncrl.protocols.batch import Batch, BatchRef, Cuts
from asyncrl.protocols.hash_chain import GENESIS, chain
from asyncrl.protocols.messages import Checkpointed, HeldWeights, Published, StepReport
from asyncrl.protocols.service_contracts import ENDED, RUNNING, UNDONE, Training
from asyncrl.services.ranks import agree_on_lost_rows, find_meeting, open_mesh, warn_of_whole_load

# ---- the two slots for versions of the weights ---------------------------------------------------------------------


async def wait_for_slot(leases: Leases, version: int, changed: asyncio.Event, deadline: float) -> None:
    """Waits until no reader uses the slot of `version`, and closes the slot for readers. changed: is set when leases
    change. deadline: twice that after which the controller kills a reader, which has to take effect. Raises
    DeadlineExceeded."""
    try:
        async with asyncio.timeout(deadline):
            while leases.holders(version):
                changed.clear()
                await changed.wait()
            leases.begin_write(version)
    except TimeoutError:
        raise DeadlineExceeded(
            f"weights of version {version} could not be written within {deadline:g} s: "
            f"{', '.join(leases.holders(version))} still read the slot; raise staleness.publish_deadline if they "
            "are only slow"
        ) from None


# ---- the step that runs, from its first call to its report, or to the loss of rows ---------------------------------


LOSS_NOTICE = 60.0
"""Seconds for which a rank that lost another one stays, so that the death of the other one is reported first: as long
as the controller may take to notice it. All ranks end then, and the run goes on from its newest checkpoint."""


@dataclass(slots=True)
class StepInProgress:
    """Holds a running step. digest: of its batch. rows_checked: set once all ranks have read their rows or reported
    lost rows. run: of the engine, once it is begun. work: the task up to the outcome of the engine; its result is None
    when rows are lost. random: state of torch's generator before it."""

    digest: str
    run: AdvancingStep | None = None
    work: "asyncio.Task[StepOutcome | None]" = field(init=False)
    rows_checked: asyncio.Event = field(default_factory=asyncio.Event)
    random: torch.Tensor = field(default_factory=torch.get_rng_state)
    lost: LostRows | None = None


EngineOfPolicy = TypeVar("EngineOfPolicy", bound=TrainedPolicy)


class TrainerService(Service, Training, Generic[EngineOfPolicy]):
    """Runs one rank, which trains its share of the rows. `step` is a compare-and-set on (incarnation, version).

    A step that has begun is finished even if its call ends: half a step would leave weights without a version, and
    other ranks wait for this one. A repeated call with the same batch waits for the running step or returns its report.
    All ranks decide together whether rows are lost, and, in the engine, whether there is an update. The first rank
    publishes the weights, of which the others hold copies or shards; it also manages the leases of the readers.
    """

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._engine: EngineOfPolicy
        self._mesh: RankMesh
        self._published: Published
        self._writer: WeightSender | None = None  # stays None on every rank but the first
        self._version = 0
        self._chain = GENESIS
        self._step: StepInProgress | None = None
        self._last_report: dict[str, StepReport] = {}  # of the step that made this version, by the digest of its batch
        self._lock = asyncio.Lock()
        self._copy: HeldCopy | None = None
        self._row_prefetch = RowPrefetch(context.reader, self.columns_read())
        self._leases_changed = asyncio.Event()
        self._gathered: dict[str, float] = {}  # metrics of the newest version, where ranks sample themselves
        self._permit = UpdatePermit()
        self._is_undone = False  # the step from this version, and every later one

    async def start(self) -> None:
        """Loads the model, or the checkpoint of a resumed run, and publishes its version. Raises ConfigError when
        device, model, checkpoint or shared memory cannot be used, and PeerLost when another rank did not start."""
        await self.context.compute.run(self._load, await self.find_meeting())
        if self.context.spec.rank == 0 and self._has_readers:
            self._writer = await self._open_weights()
        self._published = await self._publish(self._version)

    async def stop(self) -> None:
        if self._writer is not None:
            self._writer.close()
        await super().stop()

    async def step(self, cuts: Cuts) -> StepReport:
        digest = await run_for_rows(cuts.batch, batch_digest, cuts)
        async with self._lock:
            if (report := self._last_report.get(digest)) is not None:
                return report
            step = await self._running_step()
            position = _position_text(*self._position)
            if (cuts.incarnation, cuts.version) != self._position:
                wanted = _position_text(cuts.incarnation, cuts.version)
                raise Refused(f"cannot train from {wanted}: the trainer is at {position}")
            if self._is_undone:
                raise Refused(f"cannot train from {position}: the run ends, and its last checkpoint is of there")
            if step is not None and step.digest != digest:
                raise Refused(
                    f"cannot train batch {digest[:16]} from {position}: batch {step.digest[:16]} is trained from there"
                )
            if step is None:
                self._step = step = StepInProgress(digest)
                # A task of the worker: an error in it ends the worker, because its weights are unknown then.
                work = self._work(step, cuts)
                step.work = self.context.tasks.create_task(work, name=f"step from version {cuts.version}")
            return await self._complete(step)

    @property
    def finished(self) -> int:
        return super().finished + self._permit.periods

    @property
    def weights_version(self) -> int | None:
        return self._version

    async def tensor_digests(self) -> Mapping[str, tuple[str, float]]:
        return await self.context.compute.run(tensor_digests, self._engine.named_tensors())

    async def held_weights(self) -> list[HeldWeights]:
        place = self.context.spec.layout.place(self.context.spec.rank)
        if place.tp or place.dp:
            return []  # The first rank of the stage answers.
        async with self._lock:
            if await self._running_step() is not None:
                raise Refused(f"the weights change: a step from {_position_text(*self._position)} runs")
            tensors = dict(await self.tensor_digests())
            return [HeldWeights(self.context.spec.instance, place.pp, *self._position, tensors)]

    async def allow_update(self, incarnation: int, version: int) -> None:
        self._permit.allow(incarnation, version)

    async def undo_step(self, incarnation: int, version: int) -> list[str]:
        if (incarnation, version) != self._position:
            return [ENDED]
        if (step := self._step) is not None and step.run is not None and not step.run.forgo_updates():
            return [RUNNING]
        self._is_undone = True
        self._permit.allow(incarnation, version)  # A step that waits goes on to learn that it is undone.
        return [UNDONE]

    async def prefetch(self, samples: BatchRef) -> list[bool]:
        return await self._row_prefetch.prefetch(samples)

    async def published(self) -> Published:
        return self._published

    async def using(self, readers: tuple[str, ...], version: int) -> None:
        if self._writer is not None:
            for reader in readers:
                self._writer.leases.using(reader, version)
            self._leases_changed.set()

    async def detached(self, reader: str) -> None:
        if self._writer is not None:
            self._writer.forget(reader)
            self._leases_changed.set()

    async def copy_state(self, incarnation: int, version: int) -> None:
        async with self._lock:
            runs = not self._is_undone and await self._running_step() is not None
            if (incarnation, version) != self._position or runs:
                wanted = _position_text(incarnation, version)
                position = _position_text(*self._position)
                raise Refused(f"cannot save a checkpoint of {wanted}: the trainer is at {position}")
            facts = {"version": version, "incarnation": incarnation, "chain": self._chain.hex()}
            async with self._contact():
                copied = await self._copied(facts)
            self._copy = HeldCopy(incarnation, version, self._chain.hex(), copied, self.context.config.training)

    async def _copied(self, facts: dict[str, Any]) -> StateCopy:
        """Copies the state, also beside a step that was undone, whose passes may take a minute. Raises PeerLost."""
        step = self._step if self._is_undone else None
        if step is None or step.work.done():
            copied = await self.context.compute.run(self._engine.copy_state, facts)
        elif (beside := await asyncio.to_thread(self._engine.copy_beside_pass, facts)) is not None:
            copied = beside
        else:
            await asyncio.wait([step.work])
            copied = await self.context.compute.run(self._engine.copy_state, facts)
        return copied if step is None else replace(copied, state={**copied.state, "rng": step.random})

    async def checkpoint(self, directory: str, incarnation: int, version: int) -> Checkpointed:
        return await copy_of(self._copy, incarnation, version).write(Path(directory), self.context.tasks)

    async def save_rows(self, directory: str, samples: BatchRef) -> Checkpointed:
        if self.context.spec.rank > 0:
            return Checkpointed(self._version, "", {})
        writer = await write_rows(Path(directory) / READY_ROWS, self.context.reader, samples)
        if left_out := len(samples) - len(writer.saved):
            self.context.log.warning("rows not saved: a resume samples them again", samples=left_out)
        return Checkpointed(self._version, "", {READY_ROWS: writer.digest}, tuple(writer.saved))

    async def _running_step(self) -> StepInProgress | None:
        """Returns the step that an earlier call began; None if its rows are lost."""
        if (step := self._step) is None:
            return None
        await step.rows_checked.wait()
        return None if step.lost else step

    async def _work(self, step: StepInProgress, cuts: Cuts) -> StepOutcome | None:
        """Reads the rows and runs the engine by micro-batches, so that other work can run between them."""
        context = self.context
        own: LostRows | None = None
        try:
            columns = await self.read_rows(cuts.batch)
        except LostRows as lost_here:
            own = lost_here
        try:
            step.lost = await context.compute.run(agree_on_lost_rows, self._mesh, own)
            if step.lost is not None:
                return None
            step.rows_checked.set()
            if context.handover is not None:
                await context.handover.put_away()
            for row in cuts.batch:
                context.tracer.flow_end(f"sample {row.group}.{row.member}.{row.attempt}")
            if context.handover is not None:
                await context.compute.run(self._engine.trained_weights.hold_apart)
            step.run = run = await context.compute.run(self.begin_step, cuts, columns)
            if self._is_undone and not run.forgo_updates():
                step.lost = LostRows("the run ends")
                return None
            while await context.compute.run(run.advance):
                self.add_to_counters(micro_batches=1)
                if run.is_computed:
                    await self._wait_for_samples(cuts)
            return run.outcome
        except PeerLost:
            await asyncio.sleep(LOSS_NOTICE)
            raise
        finally:
            step.rows_checked.set()

    async def _wait_for_samples(self, cuts: Cuts) -> None:
        """Waits until the next batch is sampled with the present weights."""
        with self.context.occupancy.out_of_work():
            await self._permit.wait(cuts.incarnation, cuts.version)

    async def _complete(self, step: StepInProgress) -> StepReport:
        """Waits for the step and publishes the new version; raises LostRows, without a change, if a rank lost rows."""
        outcome = await asyncio.shield(step.work)
        if outcome is None:
            assert step.lost is not None
            self._step = None
            raise step.lost
        if outcome.skipped:
            self._step = None
            self.context.log.warning("step skipped", reason=outcome.skipped, samples=outcome.culprits)
            await self._hand_over(self._version)
            return self._report(outcome)
        version = self._version + 1
        if self._writer is not None:
            deadline = 2 * self.context.config.staleness.publish_deadline
            with self.context.occupancy.awaiting_weights():
                await wait_for_slot(self._writer.leases, version, self._leases_changed, deadline)
        self._published = await self._publish(version)
        self._version = version
        self._chain = chain(self._chain, outcome.trained)
        report = self._report(outcome)
        self.add_to_counters(samples=len(report.samples), tokens=sum(sample.trained for sample in report.samples))
        self._step = None
        self._last_report = {step.digest: report}
        return report

    @asynccontextmanager
    async def _contact(self) -> AsyncIterator[None]:
        """Raises FleetFailed when ranks lose contact in the block, so that a retry would fail too, once the death of
        the other rank had time to be noticed."""
        try:
            yield
        except PeerLost as lost:
            await asyncio.sleep(DEATH_NOTICE)
            raise FleetFailed(str(lost)) from lost

    def _report(self, outcome: StepOutcome) -> StepReport:
        announces = self._published.arena or self.context.handover is not None
        published = self._published if announces and not outcome.skipped else None
        chain_hex = self._chain.hex()
        metrics = outcome.metrics | self._gathered
        samples = outcome.samples
        return StepReport(*self._position, outcome.updates, outcome.skipped, chain_hex, metrics, samples, published)

    @property
    def _position(self) -> tuple[int, int]:
        """Returns incarnation and version of the weights."""
        return (self.context.facts.incarnation, self._version)

    def _load(self, meeting: MeetingPlace | None) -> None:
        context = self.context
        refuse_unusable("training.device", context.config.training.device)
        self._mesh = self.open_mesh(meeting)
        self._engine, extra = self.open_engine(self._mesh)
        self._engine.lane = self.context.tracer.lane
        self._version = extra.get("version", 0)
        self._chain = bytes.fromhex(extra.get("chain", GENESIS.hex()))

    async def _open_weights(self) -> WeightSender:
        """Opens the trainer's end of the weight lane. Raises ConfigError when shared memory has no room for it, or
        `weights.folder` cannot be used."""
        context = self.context
        chosen = transport_of(context.config)
        folder = folder_of_start(context.config.weights.folder, context.facts.run_dir, context.facts.run)
        ends = context.facts.weights_arena, self._engine.weights_spec, context.weight_network, folder
        try:
            if chosen.facts.listens:
                return open_sender(chosen.name, *ends)  # Listens on the event loop.
            return await context.compute.run(open_sender, chosen.name, *ends)
        except ArenaFull as full:
            raise ConfigError(
                f"two versions of the weights have to fit into shared memory: {full}; or use a smaller model "
                "(model.name), or half the bytes (model.dtype)"
            ) from full

    async def find_meeting(self) -> MeetingPlace | None:
        """Returns where the ranks meet; None where there is one alone."""
        return await find_meeting(self.context)

    def open_mesh(self, meeting: MeetingPlace | None) -> RankMesh:
        return open_mesh(self.context, meeting)

    async def read_rows(self, samples: BatchRef) -> Batch:
        """Reads what the engine trains on. Raises LostRows."""
        return await self._row_prefetch.read(samples)

    @abstractmethod
    def columns_read(self) -> Sequence[str]:
        """Returns the columns of rows that the engine reads."""

    @abstractmethod
    def begin_step(self, cuts: Cuts, columns: Batch) -> AdvancingStep:
        """Starts a step of the engine on these rows, and computes nothing yet."""

    @abstractmethod
    def open_engine(self, mesh: RankMesh) -> tuple[EngineOfPolicy, dict[str, Any]]:
        """Makes the engine; returns it with the values saved beside its state."""

    @property
    def _has_readers(self) -> bool:
        """Returns whether other processes read the weights: workers of generation, or else of evaluation."""
        return self.context.handover is None or self.context.config.evaluate.is_on

    async def _publish(self, version: int) -> Published:
        async with self._contact():
            published = await self.context.compute.run(self._write, version)
        await self._hand_over(version)
        return published

    async def _hand_over(self, version: int) -> None:
        """Hands the weights to the generation engine in this process, if there is one."""
        if (handover := self.context.handover) is None:
            return
        async with self._contact():
            tensors, received, redundant = await self.context.compute.run(self._gather)
        self.context.log.info("weights gathered", version=version, bytes=received, redundant=redundant)
        await handover.offer(version, tensors)

    def _gather(self) -> tuple[dict[str, torch.Tensor], int, int]:
        """Returns what this rank generates with, the bytes received, and those that memory then holds twice."""
        engine = self._engine
        groups = regrouping_of(self.context.spec.layout, self.context.config.generation)
        with self._mesh.failing(), self.context.occupancy.exchanging():
            tensors, received = gather_for_generation(engine.named_tensors(), engine.weights_spec, groups, self._mesh)
            engine.trained_weights.hold_once(tensors)
            redundant = engine.trained_weights.held_twice(tensors)
            largest = self._mesh.everyone.largest(torch.tensor([received, redundant])).tolist()
        names = ("weights/received_bytes", "weights/redundant_bytes")
        self._gathered = dict(zip(names, map(float, largest), strict=True))
        return tensors, received, redundant

    def _write(self, version: int) -> Published:
        """Publishes the weights of a version at the first rank, which sharded ones are gathered at. Raises PeerLost
        when a rank with shards is gone."""
        with self._mesh.failing():
            published = self._write_together(version)
            # The last stage of a pipeline answers for rank 0.
            return published if self._mesh.stages.size == 1 else self._mesh.everyone.told(published, 0)

    def _write_together(self, version: int) -> Published:
        if self._writer is None:
            canary = None if self._has_readers else self._engine.canary()
            if self._mesh.is_parted and self._has_readers:
                with self.context.occupancy.exchanging():
                    self._engine.publish_parts()
            return Published(self.context.facts.incarnation, version, "", slot_of(version), "", canary=canary)
        with self.context.occupancy.exchanging():
            written = self._writer.write(self.context.facts.incarnation, version, self._engine.named_tensors())
        return replace(written, canary=self._engine.canary())


def _position_text(incarnation: int, version: int) -> str:
    return f"version {version} of incarnation {incarnation}"


# ---- a language model ----------------------------------------------------------------------------------------------


class TrainingService(TrainerService[PolicyTrainer]):
    """Trains a language model. options: `pretrain`: file of texts."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._pictures: list[PromptPictures | None] = []
        """Pictures of the batch that was read last, in its order."""

    async def read_rows(self, samples: BatchRef) -> Batch:
        self._pictures = await read_pictures(self.context.reader, samples)
        return await super().read_rows(samples)

    def columns_read(self) -> Sequence[str]:
        return columns_of(self.context.config)

    def begin_step(self, cuts: Cuts, columns: Batch) -> PolicyStep:
        temperature = self.context.config.generation.temperature
        shown = set(cuts.shown)
        rows = train_rows(cuts.batch, columns, temperature, shown, self._pictures)
        return self._engine.begin(rows, cuts.incarnation, cuts.version)

    def open_engine(self, mesh: RankMesh) -> tuple[PolicyTrainer, dict[str, Any]]:
        context = self.context
        texts = Path(context.spec.options["pretrain"]) if context.config.algorithm.pretrain_coefficient > 0 else None
        base = context.facts.model_dir
        checkpoint = context.facts.checkpoint_dir
        extra: dict[str, Any] = {}
        if checkpoint is None:
            engine = PolicyTrainer(context.config, base, mesh, texts)
            if not context.config.fleet.listen:  # A trainer that joined has a copy, which the controller may not see.
                engine.prepared = base
        else:
            engine, extra = PolicyTrainer.resume(context.config, checkpoint, mesh, texts, base)
        warn_of_whole_load(context, engine.model.loaded_whole)
        return engine, extra


# ---- a policy that acts --------------------------------------------------------------------------------------------


class ActingTrainingService(TrainerService[ActingTrainer]):
    """Trains the actor and its critics."""

    def columns_read(self) -> Sequence[str]:
        return COLUMNS

    def begin_step(self, cuts: Cuts, columns: Batch) -> ActingStep:
        staleness = self.context.config.staleness
        spaces = self._engine.spaces
        bound = (cuts.incarnation, cuts.version, staleness.limit, staleness.policy)
        return self._engine.begin(transition_rows(cuts.batch, columns, spaces, *bound), cuts.version)

    def open_engine(self, mesh: RankMesh) -> tuple[ActingTrainer, dict[str, Any]]:
        context = self.context
        spaces = read_spaces(context.facts.model_dir)
        if context.facts.checkpoint_dir is None:
            return ActingTrainer(context.config, spaces), {}
        return ActingTrainer.resume(context.config, spaces, context.facts.checkpoint_dir)

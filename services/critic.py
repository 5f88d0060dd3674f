"""Predicts a value for each token of a sample, and learns from the batches that train the policy."""

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.gate_config import GateConfig
from asyncrl.engines.devices import refuse_unusable
from asyncrl.engines.ranks.rank_mesh import RankMesh
from asyncrl.engines.training.critic_trainer import CriticStep, CriticTrainer
from asyncrl.engines.training.models_with_heads import refuse_another_tokenizer
from asyncrl.engines.training.train_rows import COST, REWARD, batch_digest, columns_of, model_rows, train_rows
from asyncrl.engines.training.trainer_checkpoint import HeldCopy, copy_of, tensor_digests
from asyncrl.errors import LostRows, Refused
from asyncrl.fleet.worker.rank_meeting import MeetingPlace
from asyncrl.fleet.worker.service import Service, WorkerContext
from asyncrl.lanes.data.row_reader import run_for_rows
from asyncrl.lanes.data.row_store import bytes_of_row
from asyncrl.protocols.batch import Array, Batch, BatchRef, Cuts, SampleName, value_columns
from asyncrl.protocols.distribute_collect import balanced_parts
from asyncrl.protocols.messages import CUT_SHORT, Checkpointed, ValueReport
from asyncrl.protocols.service_contracts import Critic
from asyncrl.services.ranks import (
    LedRanks,
    Work,
    agreed,
    find_meeting,
    open_mesh,
    results_of_forward_passes,
    warn_of_whole_load,
)


class CriticService(Service, Critic):
    """Stores one row per sample: `values` float32 [sampled tokens], and `valued_at` int64 [1], the updates before.
    options: `model`: the initial model folder. The service `cost_critic` predicts costs, in columns `cost_values` and
    `cost_valued_at`.

    A sample enters the loss of the critic once, even if the step of the policy is lost and a batch of this version or a
    later one, or of a resumed run, holds the sample again. A batch with lost rows is skipped.

    Of several ranks the first one answers and keeps the rows; the others follow it. Each knows which samples were
    learnt, so that one with a copy of the weights can save the state when another one is dead.
    """

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._engine: CriticTrainer
        self._ranks = LedRanks(context, RankMesh(), {})
        self._run: CriticStep
        self._target = COST if context.spec.service == "cost_critic" else REWARD
        self._lock = asyncio.Lock()
        self._last_digest = ""
        self._last_update: asyncio.Task[ValueReport] | None = None  # requested last, running or finished
        self._version = 0
        self._copy: HeldCopy | None = None
        self._used: dict[SampleName, None] = {}  # samples in flight that were learnt: as many as there are row slots
        self._learning: dict[SampleName, None] = {}  # those of the running batch
        self._updates = 0  # of the engine, when it had learnt the last batch
        self._is_undone = False  # the running update, unless it has changed the weights, and every later one

    async def start(self) -> None:
        """Loads the model, or the checkpoint of a resumed run, and opens rows for every sample in flight."""
        config = self.context.config
        if self.context.spec.rank == 0:
            columns = value_columns(self._target.values, self._target.valued_at, config.response_tokens)
            self.rows = self.context.open_rows(GateConfig.of(config).row_slots, bytes_of_row(columns))
        self._engine = await self.context.compute.run(self._load, await find_meeting(self.context))
        self._engine.lane = self.context.tracer.lane
        work: Mapping[str, Work] = {
            "values": self._values,
            "begin": self._begin,
            "advance": self._advance,
            "copy": self._copy_engine,
        }
        self._ranks = LedRanks(self.context, self._engine.mesh, work)

    async def stop(self) -> None:
        await self._ranks.stop()
        await super().stop()

    async def tensor_digests(self) -> Mapping[str, tuple[str, float]]:
        return await self.context.compute.run(tensor_digests, self._engine.model.whole.state_dict())

    async def values(self, samples: BatchRef) -> BatchRef:
        if self._ranks.follows:
            return samples
        target = self._target
        places = []
        results = await self._ranks.run("values", samples)
        for row, (values, updates) in zip(samples, results, strict=True):
            columns: dict[str, Array] = {target.values: values, target.valued_at: np.array([updates], np.int64)}
            places.append(self.keep(row.name, columns))
        self.add_to_counters(samples=len(places), tokens=sum(len(values) for values, _ in results))
        return samples.with_places(places)

    async def release(self, samples: list[SampleName], oldest: int) -> None:
        await super().release(samples, oldest)
        last = {(group, member): attempt for group, member, attempt in sorted(samples)}
        in_flight = (n for n in self._used if not 0 <= n[0] < oldest and n[2] > last.get(n[:2], -1))
        self._used = dict.fromkeys(in_flight)

    async def update(self, cuts: Cuts) -> ValueReport:
        if self._ranks.follows:
            return self._skipped(cuts, "rank 0 answers")
        digest = await run_for_rows(cuts.batch, batch_digest, cuts)
        async with self._lock:
            if self._last_update is None or self._last_digest != digest:
                await self._finish_update()
                self._refuse_earlier("update from", cuts.incarnation, cuts.version)
                # The task belongs to the worker, so that an update that has begun is finished without its call.
                work = self.context.tasks.create_task(self._learn(cuts), name=f"learn from version {cuts.version}")
                self._last_digest = digest
                self._last_update = work
            return await asyncio.shield(self._last_update)

    async def undo_update(self) -> None:
        self._is_undone = True

    async def copy_state(self, incarnation: int, version: int) -> None:
        if self._ranks.follows:
            return
        async with self._lock:
            await self._finish_update()
            self._refuse_earlier("save", incarnation, version)
            learnt = [list(name) for name in self._used]
            await self._ranks.run("copy", incarnation, version, {"version": version, "learnt": learnt})

    async def checkpoint(self, directory: str, incarnation: int, version: int) -> Checkpointed:
        await self._ranks.idle()
        held = copy_of(self._copy, incarnation, version)
        return await held.write(Path(directory), self.context.tasks, self._target.critic)

    async def _finish_update(self) -> None:
        """Waits for the running update; its call may have ended."""
        if self._last_update is not None:
            await asyncio.shield(self._last_update)

    def _refuse_earlier(self, action: str, incarnation: int, version: int) -> None:
        own = self.context.facts.incarnation
        if incarnation != own or version < self._version:
            raise Refused(
                f"the critic cannot {action} version {version} of incarnation {incarnation}: its last batch was of "
                f"version {self._version} of incarnation {own}"
            )

    async def _learn(self, cuts: Cuts) -> ValueReport:
        fresh = BatchRef(tuple(row for row in cuts.batch if row.name not in self._used))
        if not fresh.rows:
            self._version = max(self._version, cuts.version)
            return self._skipped(cuts, "learnt before")
        if self._is_undone:
            return self._skipped(cuts, CUT_SHORT)
        try:
            await self._ranks.run("begin", cuts, fresh)
            while not (self._is_undone and self._run.forgo_updates()):
                if not await self._ranks.run("advance"):
                    break
            else:
                self._used = {name: None for name in self._used if name not in self._learning}
                return self._skipped(cuts, CUT_SHORT)
        except LostRows as lost:
            self.context.log.warning("update skipped", reason=str(lost))
            return self._skipped(cuts, "rows lost")
        outcome = self._run.outcome
        return ValueReport(cuts.incarnation, cuts.version, outcome.updates, outcome.skipped, outcome.metrics)

    # ---- work of all ranks -------------------------------------------------------------------------------

    async def _values(self, samples: BatchRef) -> list[tuple[NDArray[np.float32], int]]:
        return await results_of_forward_passes(self.context, samples, self._forward, mesh=self._engine.mesh)

    async def _begin(self, cuts: Cuts, fresh: BatchRef) -> None:
        """Reads this rank's share of a batch, and starts the step on it. Raises LostRows."""
        self._version = max(self._version, cuts.version)
        config = self.context.config
        mesh = self._engine.mesh
        share = fresh.take(balanced_parts(fresh.row_weights(), mesh.rows.size)[mesh.rows.rank])
        rows = await agreed(self.context, mesh, self.context.reader.read(share, columns_of(config)))
        self._run = await self.context.compute.run(self._step, cuts, share, rows)
        self._learning = dict.fromkeys(row.name for row in fresh)
        self._used |= self._learning

    def _step(self, cuts: Cuts, share: BatchRef, rows: Batch) -> CriticStep:
        joined = train_rows(share, rows, self.context.config.generation.temperature)
        return self._engine.begin(joined, cuts.incarnation, cuts.version)

    async def _advance(self) -> bool:
        goes_on = await self.context.compute.run(self._run.advance)
        if not goes_on:
            self._learning = {}
        return goes_on

    async def _copy_engine(self, incarnation: int, version: int, extra: dict[str, Any]) -> None:
        """Copies the state; returns at rank 0 once the others have begun to."""
        copied = await self.context.compute.run(self._engine.copy_state, extra)
        self._copy = HeldCopy(incarnation, version, "", copied, self.context.config.training)

    def _skipped(self, cuts: Cuts, reason: str) -> ValueReport:
        return ValueReport(cuts.incarnation, cuts.version, 0, reason, {f"{self._target.critic}/updates": 0.0})

    def _load(self, meeting: MeetingPlace | None) -> CriticTrainer:
        context = self.context
        target = self._target
        refuse_unusable(f"{target.critic}.device", target.settings(context.config).device)
        mesh = open_mesh(context, meeting, is_led=True)
        if context.facts.checkpoint_dir is None:
            folder = Path(context.spec.options.get("model", context.facts.model_dir))
            engine = CriticTrainer(context.config, folder, target, mesh)
            refuse_another_tokenizer(engine.model, context.facts.model_dir, f"{target.critic}.model")
        else:
            folder = context.facts.checkpoint_dir / target.critic
            engine, extra = CriticTrainer.resume(context.config, folder, target, mesh)
            self._version = extra["version"]
            self._used = _names(extra.get("learnt", ()))
        warn_of_whole_load(context, engine.model.loaded_whole)
        return engine

    def _forward(self, rows: Batch) -> list[tuple[NDArray[np.float32], int]]:
        """Returns for each row its values and the updates taken before them."""
        values = self._engine.values(model_rows(rows) if len(rows) else [])
        return [(own, self._engine.optimizer.updates) for own in values]


def _names(listed: Iterable[Iterable[int]]) -> dict[SampleName, None]:
    """Returns names of samples as a message or a checkpoint lists them."""
    return dict.fromkeys((group, member, attempt) for group, member, attempt in listed)

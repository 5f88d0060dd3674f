"""Predicts a value for each token of a sample, and learns from the batches that train the policy."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.gate_config import GateConfig
from asyncrl.engines.devices import refuse_unusable
from asyncrl.engines.training.batch.micro_batches import forward_passes, token_ids
from asyncrl.engines.training.batch.train_rows import COST, REWARD, batch_digest, columns_of, train_rows
from asyncrl.engines.training.critic_trainer import CriticTrainer
from asyncrl.engines.training.models_with_heads import refuse_another_tokenizer
from asyncrl.engines.training.trainer_checkpoint import file_digests
from asyncrl.errors import LostRows, Refused
from asyncrl.fleet.worker.service import Service, WorkerContext
from asyncrl.lanes.data.row_store import bytes_of_slot
from asyncrl.protocols.batch import Batch, BatchRef, Cuts, SampleName
from asyncrl.protocols.contracts import Critic
from asyncrl.protocols.messages import Checkpointed, ValueReport


@dataclass(frozen=True, slots=True)
class CriticUpdate:
    """Holds the last requested update, running or finished. digest: of its batch."""

    digest: str
    work: "asyncio.Task[ValueReport]"


class CriticService(Service, Critic):
    """Stores one row per sample: `values` float32 [tokens], and `valued_at` int64 [1], the updates taken before.
    options: `model`: the initial model folder, by default that of the policy. The service `cost_critic` predicts costs,
    in columns `cost_values` and `cost_valued_at`.

    A sample enters the loss of the critic once, even if the step of the policy is lost and another batch of the same
    version holds the sample again. A batch with lost rows is skipped. With `generation.deterministic`, each row has a
    forward pass of its own, so that its bits do not depend on other rows.
    """

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._engine: CriticTrainer
        self._target = COST if context.service == "cost_critic" else REWARD
        self._lock = asyncio.Lock()
        self._update: CriticUpdate | None = None
        self._version = 0
        self._used: dict[SampleName, None] = {}

    async def start(self) -> None:
        """Loads the model, or the checkpoint of a resumed run, and reserves memory for every sample in flight."""
        config = self.context.config
        columns: dict[str, tuple[np.dtype[Any], int]] = {
            self._target.values: (np.dtype(np.float32), config.generation.max_new_tokens),
            self._target.valued_at: (np.dtype(np.int64), 1),
        }
        self.rows = self.context.open_rows(GateConfig.of(config).row_slots, bytes_of_slot(columns))
        self._engine = await self.context.compute.run(self._load)

    # ---- endpoints ---------------------------------------------------------------------------------------

    async def values(self, samples: BatchRef) -> BatchRef:
        rows = await self.context.reader.read(samples, ["prompt_ids", "response_ids"])
        by_row: dict[int, tuple[NDArray[np.float32], int]] = {}
        for part in forward_passes(rows, self.context.config):
            values, updates = await self.context.compute.run(self._forward, rows.take(part))
            by_row.update((row, (each, updates)) for row, each in zip(part, values, strict=True))
        return samples.with_places(
            [
                self.keep(row.name, {self._target.values: values, self._target.valued_at: np.array([at], np.int64)})
                for row, (values, at) in zip(samples, (by_row[row] for row in range(len(samples))), strict=True)
            ]
        )

    async def update(self, cuts: Cuts) -> ValueReport:
        digest = batch_digest(cuts)
        async with self._lock:
            if self._update is None or self._update.digest != digest:
                await self._finish_update()
                self._refuse_wrong_version(cuts)
                # The task belongs to the worker, so that an update that has begun is finished without its call.
                work = self.context.tasks.create_task(self._learn(cuts), name=f"learn from version {cuts.version}")
                self._update = CriticUpdate(digest, work)
            return await asyncio.shield(self._update.work)

    async def checkpoint(self, directory: str, incarnation: int, version: int) -> Checkpointed:
        async with self._lock:
            await self._finish_update()
            if incarnation != self.context.incarnation or version < self._version:
                raise Refused(
                    f"the critic cannot save version {version} of incarnation {incarnation}: its last batch was of "
                    f"version {self._version} of incarnation {self.context.incarnation}"
                )
            files = await self.context.compute.run(self._save, Path(directory) / self._target.critic, version)
            return Checkpointed(version, "", files)

    # ---- parts -------------------------------------------------------------------------------------------

    async def _finish_update(self) -> None:
        """Waits for the running update; its call may have ended."""
        if self._update is not None:
            await asyncio.shield(self._update.work)

    def _refuse_wrong_version(self, cuts: Cuts) -> None:
        if cuts.incarnation != self.context.incarnation or cuts.version < self._version:
            raise Refused(
                f"the critic cannot update from version {cuts.version} of incarnation {cuts.incarnation}: its last "
                f"batch was of version {self._version} of incarnation {self.context.incarnation}"
            )

    async def _learn(self, cuts: Cuts) -> ValueReport:
        fresh = self._unused_samples(cuts)
        if not fresh.rows:
            return self._skipped(cuts, "learnt before")
        try:
            rows = await self.context.reader.read(fresh, columns_of(self.context.config.algorithm))
        except LostRows as lost:
            self.context.log.warning("update skipped", reason=str(lost))
            return self._skipped(cuts, "rows lost")
        self._used |= dict.fromkeys(row.name for row in fresh)
        temperature = self.context.config.generation.temperature
        run = self._engine.begin(train_rows(fresh, rows, temperature), cuts.incarnation, cuts.version)
        while await self.context.compute.run(run.advance):
            pass
        outcome = run.outcome
        return ValueReport(cuts.incarnation, cuts.version, outcome.updates, outcome.skipped, outcome.metrics)

    def _skipped(self, cuts: Cuts, reason: str) -> ValueReport:
        return ValueReport(cuts.incarnation, cuts.version, 0, reason, {f"{self._target.critic}/updates": 0.0})

    def _unused_samples(self, cuts: Cuts) -> BatchRef:
        if cuts.version > self._version:
            self._version = cuts.version
            self._used = {}
        return BatchRef(tuple(row for row in cuts.batch if row.name not in self._used))

    # ---- on the compute thread ---------------------------------------------------------------------------

    def _load(self) -> CriticTrainer:
        """Loads the model or the checkpoint, and its version."""
        context = self.context
        refuse_unusable(f"{self._target.critic}.device", self._target.settings(context.config).device)
        if context.checkpoint_dir is None:
            engine = CriticTrainer(context.config, Path(context.options.get("model", context.model_dir)), self._target)
            refuse_another_tokenizer(engine.model, context.model_dir, f"{self._target.critic}.model")
            return engine
        engine, extra = CriticTrainer.resume(context.config, context.checkpoint_dir / self._target.critic, self._target)
        self._version = extra["version"]
        return engine

    def _forward(self, rows: Batch) -> tuple[list[NDArray[np.float32]], int]:
        """Runs one forward pass; returns its values and the updates taken before it."""
        return self._engine.values(*token_ids(rows)), self._engine.optimizer.updates

    def _save(self, directory: Path, version: int) -> dict[str, str]:
        directory.mkdir(parents=True, exist_ok=True)
        self._engine.save(directory, {"version": version})
        return {f"{self._target.critic}/{name}": digest for name, digest in file_digests(directory).items()}

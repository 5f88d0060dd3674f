"""Trains a language model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.engines.pictures.picture_rows import read_pictures
from asyncrl.engines.pictures.prompt_pictures import PromptPictures
from asyncrl.engines.training.batch.train_rows import columns_of, train_rows
from asyncrl.engines.training.policy_trainer import PolicyStep, PolicyTrainer
from asyncrl.engines.training.ranks.rank_mesh import RankMesh
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.protocols.batch import Batch, BatchRef, Cuts
from asyncrl.services.ranks.meeting import warn_of_whole_load
from asyncrl.services.training import TrainerService


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

"""Trains the policy that acts: the training service of a run with `acting.env`."""

from collections.abc import Sequence
from typing import Any

from asyncrl.engines.acting.acting_trainer import ActingStep, ActingTrainer
from asyncrl.engines.acting.stepping.spaces import read_spaces
from asyncrl.engines.acting.transitions import COLUMNS, transition_rows
from asyncrl.engines.training.ranks.rank_mesh import RankMesh
from asyncrl.protocols.batch import Batch, Cuts
from asyncrl.services.training import TrainerService


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

"""Opens the optimizer of a model, and what this rank holds of it: torch's, or DeepSpeed's."""

from typing import Any

from asyncrl.config.schema import TrainingConfig
from asyncrl.engines.training.optimizers.optimizer import Optimizer
from asyncrl.engines.training.optimizers.zero_model import ZeroModel
from asyncrl.engines.training.optimizers.zero_optimizer import ModelInPasses, ZeroOptimizer
from asyncrl.engines.training.ranks.held_parts import HeldModel
from asyncrl.engines.training.ranks.rank_mesh import RankMesh
from asyncrl.engines.training.ranks.stage_weights import StageWeights


def open_optimizer(model: ModelInPasses, settings: TrainingConfig, steps: int, mesh: RankMesh) -> Optimizer:
    """Returns the optimizer for a run of `steps` iterations. All ranks call it together. Raises ConfigError as
    `start_deepspeed`."""
    if not mesh.zero:
        return Optimizer(model.whole, settings, steps)
    with mesh.failing():
        return ZeroOptimizer(model, settings, steps, mesh)


def hold_model(whole: Any, stage: StageWeights | None, mesh: RankMesh) -> HeldModel:
    """Returns what this rank writes into checkpoints, and reads from them. stage: see HeldModel."""
    return (ZeroModel if mesh.zero else HeldModel)(whole, stage, mesh)

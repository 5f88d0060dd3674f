"""Opens the optimizer of a model, and what this rank holds of it: torch's, or DeepSpeed's."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from asyncrl.config.schema import TrainingConfig
from asyncrl.engines.models.tensor_parts import TensorPart
from asyncrl.engines.training.optimizers.optimizer import Optimizer
from asyncrl.engines.training.optimizers.zero_optimizer import ModelInPasses, ZeroOptimizer
from asyncrl.engines.training.optimizers.zero_weights import FlatTensor, is_flat_part
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


@dataclass(frozen=True, eq=False)
class ZeroModel(HeldModel):
    """Holds a model that DeepSpeed trains."""

    def published(self, named: Mapping[str, Tensor]) -> dict[str, Any]:
        if self.mesh.zero < 3:
            return super().published(named)
        found: dict[int, FlatTensor] = {}
        held = self.whole.named_parameters(remove_duplicate=False)
        return {name: found.setdefault(id(each), FlatTensor.of(each, self.mesh.everyone)) for name, each in held}

    def _parts(self, named: Iterable[tuple[str, Tensor]], *, copy: bool) -> dict[str, TensorPart]:
        """Keeps this rank's rows of whole tensors, one after the other, in memory of their own."""
        found: dict[str, TensorPart] = {}
        rank = self.mesh.rank
        ranks = self.mesh.size
        for name, tensor in named:
            flat = is_flat_part(tensor)
            whole = FlatTensor.of(tensor, self.mesh.everyone).full_tensor() if flat else tensor.detach()
            if not whole.dim():
                if rank == 0:
                    found[name] = TensorPart(whole.to("cpu", copy=True), ())
                continue
            rows = -(-len(whole) // ranks)
            part = whole[rank * rows : (rank + 1) * rows]
            if part.numel():
                found[name] = TensorPart(part.to("cpu", copy=True), (rank * rows, *[0] * (whole.dim() - 1)))
        return found

"""A model whose moments ranks share out in flat parts, in stage 3 weights too; before, each rank has all weights.

moments of a rank       [0 1 2 | 3 4 5]   parts of tensors in a row, gathered one after the other
in a checkpoint         rows of each      as of any other layout: a rank writes its rows of every tensor
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from asyncrl.engines.models.tensor_parts import TensorPart
from asyncrl.engines.training.optimizers.zero_weights import FlatTensor, is_flat_part
from asyncrl.engines.training.ranks.held_parts import HeldModel


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
        rank, ranks = self.mesh.rank, self.mesh.size
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

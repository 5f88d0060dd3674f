"""The layers that each stage of a replica generates with, by the split of the trainer's stages.

first stage    embedding, layers            ──┐ states [tokens, width]
in between     layers                       <─┴──┐
last stage     layers, last norm, head      <────┘ logits ──> all stages
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.engines.model_shape import layers_of_stage
from asyncrl.engines.training.ranks.rank_group import Ranks
from asyncrl.lanes.weights.tensor_spec import WeightsSpec


@dataclass(frozen=True, eq=False)
class LayerStage:
    """One stage of a replica. layers: numbers of those that it computes. ranks: one of each stage, in order; all of
    them call the same methods in the same order, which raise PeerLost when another one is gone or late."""

    layers: range
    ranks: Ranks

    @classmethod
    def of(cls, layers: int, trained: int, ranks: Ranks) -> "LayerStage":
        """Joins the layers of consecutive stages of the trainer. layers: of the model. trained: stages of the trainer,
        a multiple of those here."""
        return cls(layers_of_stage(layers, trained, ranks.size, ranks.rank), ranks)

    @property
    def is_first(self) -> bool:
        return self.ranks.rank == 0

    @property
    def is_last(self) -> bool:
        return self.ranks.rank == self.ranks.size - 1

    def received(self, like: Tensor) -> Tensor:
        """Returns the states of the stage before. like: memory of their shape and dtype."""
        return self.ranks.moved(like, self.ranks.rank - 1, self.ranks.rank)

    def pass_on(self, states: Tensor) -> None:
        """Gives states to the next stage."""
        self.ranks.moved(states, self.ranks.rank, self.ranks.rank + 1)

    def from_last(self, values: Tensor) -> Tensor:
        """Returns the values of the last stage on all stages, which give tensors like it."""
        return self.ranks.shared(values, self.ranks.size - 1)


def keep_layers(model: Any, stage: LayerStage) -> None:
    """Frees the parameters of other stages in a model that the fast path computes. An embedding that is the head too
    is on the first and on the last stage."""
    body = model.base_model
    kept = [body.layers[number] for number in stage.layers]
    kept += [body.embed_tokens] if stage.is_first else []
    kept += [body.norm, model.get_output_embeddings()] if stage.is_last else []
    held = {id(parameter) for parameter in nn.ModuleList(kept).parameters()}
    for parameter in model.parameters():
        if id(parameter) not in held:
            parameter.data = torch.empty(0, dtype=parameter.dtype)


def of_stage(spec: WeightsSpec) -> WeightsSpec:
    """Returns the specification without the tensors that `keep_layers` has freed."""
    shapes = {each.name: each.shape for each in spec.tensors if prod(each.shape)}
    exact = [each.name for each in spec.tensors if each.exact]
    return WeightsSpec.of(shapes, spec.dtype, {alias: name for alias, name in spec.aliases if name in shapes}, exact)

"""The slices of its layers that each rank of a replica generates with, by the plan that the model comes with.

    q, k, v, gate, up    some of the outputs: heads of attention, key-value heads, inner values
    o, down              the weights of these inputs; ranks sum the outputs

Embedding, norms and head are whole on every rank of a stage that has them (see LayerStage), so that all tensor
ranks have the same states between these layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from asyncrl.config.schema import Config
from asyncrl.engines.model_shape import layers_of_stage
from asyncrl.engines.rank_limits import refusal_of_splitting
from asyncrl.engines.training.ranks.rank_group import Ranks
from asyncrl.engines.training.ranks.rank_mesh import RankMesh
from asyncrl.errors import ConfigError
from asyncrl.lanes.weights.tensor_spec import WeightsSpec

ALONE = RankMesh()
KEY = "generation.layout"

Join: TypeAlias = Callable[[Tensor], Tensor]
"""Sums what each rank has computed of the outputs of a layer."""


def cut_dims(model: Any) -> dict[str, int]:
    """Returns the dimension in which ranks cut each parameter of a transformers model; those that they hold whole are
    not there. Rank i of n has `chunk(n, dimension)[i]`."""
    prefix = f"{model.base_model_prefix}."
    plan = model.config.base_model_tp_plan
    found = dict[str, int]()
    for name, parameter in model.named_parameters():
        layer = name.removeprefix(prefix).rpartition(".")[0]
        style = next((style for pattern, style in plan.items() if fnmatchcase(layer, pattern)), "")
        if style == "colwise":
            found[name] = 0
        elif style == "rowwise" and parameter.ndim > 1:  # Its bias is added once, to the sum.
            found[name] = 1
    return found


def keep_slices(model: Any, ranks: Ranks) -> None:
    """Leaves a model, which the fast path computes, with the slices of this rank."""
    for name, dim in cut_dims(model).items():
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.chunk(ranks.size, dim)[ranks.rank].clone(memory_format=torch.contiguous_format)
        layer = model.get_submodule(name.rpartition(".")[0])
        layer.out_features, layer.in_features = layer.weight.shape


def join_of(ranks: Ranks, *, fixed: bool) -> Join | None:
    """Returns how ranks sum; None for one alone. fixed: always in rank order, where the order else depends on the place
    of a number in what is summed, and so on the row that a sequence has."""
    if ranks.size == 1:
        return None
    return (lambda values: reduce(torch.add, ranks.gather_equal(values))) if fixed else ranks.sum


def refuse_slices(model: Any, config: Config, ranks: RankMesh, *, fast: bool) -> None:
    """Raises ConfigError when several ranks cannot share out the layers of a model. fast: whether the fast path
    computes it."""
    if ranks.size == 1:
        return
    sizes = {"pp": ranks.stages.size, "tp": ranks.tensor.size}
    chosen = ", ".join(f"{axis} = {size}" for axis, size in sizes.items() if size > 1)
    one = ", ".join(f"{axis} = 1" for axis, size in sizes.items() if size > 1)
    name = config.model.name
    family = model.config.model_type
    if config.model.lora is not None:
        raise ConfigError(f"{KEY}: {chosen} cuts whole weights, and model.lora has adapters; write {one}")
    if not fast:
        raise ConfigError(
            f"{KEY}: {chosen} cuts plain Llama, Mistral, Qwen2 and Qwen3 models, and {name} is another "
            f"({family}); write {one}"
        )
    if refusal := refusal_of_splitting(model.config.to_dict(), ranks.tensor.size):
        raise ConfigError(f"{KEY}: {refusal}")


# The layers that each stage of a replica generates with, by the split of the trainer's stages.
#
# first stage    embedding, layers            ──┐ states [tokens, width]
# in between     layers                       <─┴──┐
# last stage     layers, last norm, head      <────┘ logits ──> all stages


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

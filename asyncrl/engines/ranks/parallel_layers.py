"""Layers that several ranks compute together.

tp    each rank has a part of every linear layer                  the same rows
sp    each rank has a slice of the tokens, in attention of heads  the same rows and weights
ep    each rank has some of the experts                           rows of its own
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from asyncrl.engines.models.model_families import refusal_of_sharing
from asyncrl.engines.ranks.pipeline import StageWeights
from asyncrl.engines.ranks.rank_limits import refusal_of_slicing, refusal_of_splitting
from asyncrl.engines.ranks.rank_mesh import RankMesh, Ranks
from asyncrl.engines.ranks.shards import own_part, refuse_shared_gpu
from asyncrl.errors import ConfigError

# Linear layers of ranks with the same rows, split by the plan that the model itself comes with.
#
#     colwise    a rank has some of the outputs of a linear layer: heads of attention, or inner values
#     rowwise    a rank has the weights of its inputs, and the ranks sum their outputs
#
# Embedding, norms and head are whole on every rank; their gradients have the same bits there.


STYLES = ("colwise", "rowwise")


def split_layers(whole: Any, mesh: DeviceMesh, key: str, stage: StageWeights | None = None) -> None:
    """Splits the linear layers of a transformers model, or of a stage of it, over the ranks of a mesh. key: of the
    layout in the config. Raises ConfigError when the model has no plan, one of another kind, or heads that cannot be
    split so."""
    config = whole.config
    size = mesh.size()
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan or set(plan.values()) - set(STYLES):
        others = ", ".join(sorted(set((plan or {}).values()) - set(STYLES))) or "none"
        raise ConfigError(
            f"{key}: tp splits {' and '.join(STYLES)} layers alone, and the plan of {type(whole).__name__} "
            f"has {others}; take a Llama or Qwen2 model, or shard instead of tp"
        )
    if refusal := refusal_of_splitting(config.to_dict(), size):
        raise ConfigError(f"{key}: {refusal}")
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    own = None if stage is None else {id(whole.get_parameter(name)) for name in stage.held}
    modules = [(name, each) for name, each in whole.base_model.named_modules() if isinstance(each, nn.Linear)]
    linear = [name for name, each in modules if own is None or id(each.weight) in own]
    found = {name: styles[plan[pattern]]() for name in linear for pattern in plan if fnmatchcase(name, pattern)}
    parallelize_module(whole.base_model, mesh, found)


# Attention between ranks that each compute a slice of the tokens of the same rows.
#
#     layer        tokens 0:8, all heads          tokens 8:16, all heads
#                         └────── all-to-all of queries, keys, values ──────┘
#     attention    all tokens, heads 0:2          all tokens, heads 2:4
#                         └────── all-to-all of the output ─────────────────┘
#     layer        tokens 0:8, all heads          tokens 8:16, all heads
#
# So no rank keeps more than its share of activations. Source: DeepSpeed-Ulysses (arXiv 2309.14509). Both exchanges
# are made in the other direction in the backward pass, so that all ranks run the same passes in the same order.


NAME = "asyncrl_sequence_parallel"
SEQUENCE = "sequence_ranks"
"""Keyword of a model's forward pass for the ranks that have the other slices; without it a rank attends alone."""


def attend_in_slices(whole: Any, size: int) -> None:
    """Lets a transformers model attend with other ranks where its forward pass is given them. Raises ConfigError for
    attention that is not plain and causal, or whose heads cannot be shared out."""
    if refusal := refusal_of_slicing(whole.config.to_dict(), size):
        raise ConfigError(f"training.layout: {refusal}")
    whole.set_attn_implementation(NAME)


def sequence_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Computes attention for transformers. query [rows, heads, own tokens, size], key and value [rows, kv heads, own
    tokens, size] -> [rows, own tokens, heads, size]."""
    ranks: Ranks | None = settings.pop(SEQUENCE, None)
    if ranks is None:
        alone: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, **settings)[0]
        return alone, None
    given = [_parts(each.to(value.dtype), ranks) for each in (query, key, value)]
    found = _to_each(torch.cat(given, 2), ranks).permute(1, 2, 0, 3, 4).flatten(2, 3)
    own = torch.split(found, [each.shape[2] for each in given], 1)
    output: Tensor = sdpa_attention_forward(module, *own, None, **settings)[0]
    return _to_each(_parts(output, ranks), ranks).permute(1, 2, 0, 3, 4).flatten(2, 3), None


def joined(found: Sequence[Tensor], chosen: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Returns log-probs and entropies of all tokens from those that each rank computed of its own, with the same bits
    on all ranks. chosen: which tokens are this rank's. All ranks compute one loss of them, of which each takes the
    gradient of its own tokens."""
    logprobs, entropy = _Join.apply(torch.stack([*found], 1), chosen, ranks).unbind(1)  # type: ignore[no-untyped-call]
    return logprobs, entropy


def _parts(values: Tensor, ranks: Ranks) -> Tensor:
    """Returns the tensor [rows, heads or tokens, ...] cut into the parts of the ranks, [ranks, rows, ...]."""
    return values.reshape(len(values), ranks.size, -1, *values.shape[2:]).movedim(1, 0)


def _to_each(parts: Tensor, ranks: Ranks) -> Tensor:
    exchanged: Tensor = _Exchanged.apply(parts, ranks)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchanged(torch.autograd.Function):
    """Gives part i to rank i, and the gradient of each part back to the rank that it came from."""

    @staticmethod
    def forward(context: Any, parts: Tensor, ranks: Ranks) -> Tensor:
        context.ranks = ranks
        return ranks.to_each(parts)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return context.ranks.to_each(gradients[0]), None


class _Join(torch.autograd.Function):
    """Puts the values [own tokens, 2] of all ranks together."""

    @staticmethod
    def forward(context: Any, own: Tensor, chosen: Tensor, ranks: Ranks) -> Tensor:
        context.save_for_backward(chosen)
        whole = own.new_zeros((len(chosen), own.shape[1]))
        whole[chosen] = own
        return ranks.sum(whole)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (chosen,) = context.saved_tensors
        return gradients[0][chosen], None, None


AttentionInterface.register(NAME, sequence_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)

# Experts that ranks with rows of their own share out: tokens travel to the ranks of their experts and back.
#
#     rank 0    router, rows 0:4 ──┐              ┌── experts 0:4 ──┐              ┌── sums, rows 0:4
#     rank 1    router, rows 4:8 ──┴─ all-to-all ─┴── experts 4:8 ──┴─ all-to-all ─┴── sums, rows 4:8
#
# A token is sent once to each rank that has experts of it, with their weights; that rank adds up what its experts
# find. Both exchanges are made in the other direction in the backward pass, also by a rank that was sent nothing, so
# that all ranks run the same exchanges in the same order. So the gradient of an expert is that of the tokens of all
# ranks. Source: GShard (arXiv 2006.16668, section 3.2), without a capacity: no token is dropped.


def share_out_experts(whole: Any, mesh: RankMesh, device: torch.device) -> None:
    """Keeps a slice of the experts of each layer of a transformers model on a device, or without memory yet. Raises
    ConfigError for a model without experts, or with a number of them that the ranks do not divide."""
    ranks = mesh.experts
    routing = mesh.routing
    assert routing is not None, "the mesh has ranks that share out experts"
    if refusal := refusal_of_sharing(whole.config.to_dict(), ranks.size):
        raise ConfigError(f"{mesh.key}: {refusal}")
    refuse_shared_gpu(device, routing, mesh.key, "ep")
    from torch.distributed.tensor import DTensor, Shard

    for module in [each for each in whole.modules() if hasattr(each, "gate_up_proj") and hasattr(each, "num_experts")]:
        for name, each in list(module.named_parameters(recurse=False)):
            own = each.detach().chunk(ranks.size)[ranks.rank].clone()
            part = DTensor.from_local(own, routing, [Shard(0)], run_check=False)
            setattr(module, name, nn.Parameter(part, requires_grad=each.requires_grad))
        module.forward = partial(_forward, module, ranks)


def _forward(module: Any, ranks: Ranks, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Computes what the experts of all ranks add to states [tokens, width], in place of the module's own forward.
    chosen, weights [tokens, k]: of the router."""
    own = module.num_experts // ranks.size
    is_sent = torch.zeros((len(states), ranks.size), dtype=torch.bool, device=states.device)
    is_sent.scatter_(1, chosen // own, value=True)
    tokens = is_sent.T.nonzero()[:, 1]
    counts = is_sent.sum(0)
    trip = _Trip(ranks, counts.tolist(), ranks.to_each(counts[:, None]).flatten().tolist())
    here, weighed = _SentRows.apply(trip, states[tokens], weights[tokens])  # type: ignore[no-untyped-call]
    added = _added_here(module, own, here, weighed, trip.go(chosen[tokens]) - own * ranks.rank)
    (found,) = _SentRows.apply(trip.back(), added)  # type: ignore[no-untyped-call]
    return _added_up(found, tokens, states)


def _added_here(module: Any, own: int, states: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Returns what the experts of this rank add to states that they were sent. chosen: counted from its first one."""
    if not len(states):  # The gradient of nothing is sent back too.
        return states
    token, place = ((chosen >= 0) & (chosen < own)).nonzero(as_tuple=True)
    experts = _ExpertsHere(module, own)
    pairs = type(module).forward(experts, states[token], chosen[token, place][:, None], weights[token, place][:, None])
    return _added_up(pairs, token, states)


def _added_up(rows: Tensor, places: Tensor, like: Tensor) -> Tensor:
    """Adds rows into zeros at these places; index_add would keep the rows for its backward pass, which needs none."""
    return torch.zeros_like(like).index_put((places,), rows, accumulate=True)


class _ExpertsHere:
    """Stands for a module of experts where transformers computes: it has those of this rank, as plain tensors."""

    def __init__(self, module: nn.Module, own: int) -> None:
        self.num_experts = own
        self._module = module
        vars(self).update((name, own_part(each)) for name, each in module.named_parameters(recurse=False))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Trip(NamedTuple):
    """Tells how many rows go to each rank, and come from each."""

    ranks: Ranks
    sent: list[int]
    received: list[int]

    def go(self, rows: Tensor) -> Tensor:
        return self.ranks.to_each_uneven(rows, self.sent, self.received)

    def back(self) -> "_Trip":
        return _Trip(self.ranks, self.received, self.sent)


class _SentRows(torch.autograd.Function):
    """Gives rows to other ranks, and their gradients back to the ranks that they came from."""

    @staticmethod
    def forward(context: Any, trip: _Trip, *rows: Tensor) -> tuple[Tensor, ...]:
        context.back = trip.back()
        return tuple(map(trip.go, rows))

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *map(context.back.go, gradients)

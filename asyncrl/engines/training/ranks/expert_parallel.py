"""Experts that ranks with rows of their own share out: tokens travel to the ranks of their experts and back.

    rank 0    router, rows 0:4 ──┐              ┌── experts 0:4 ──┐              ┌── sums, rows 0:4
    rank 1    router, rows 4:8 ──┴─ all-to-all ─┴── experts 4:8 ──┴─ all-to-all ─┴── sums, rows 4:8

A token is sent once to each rank that has experts of it, with their weights; that rank adds up what its experts find.
Both exchanges are made in the other direction in the backward pass, also by a rank that was sent nothing, so that all
ranks run the same exchanges in the same order. So the gradient of an expert is that of the tokens of all ranks. Source:
GShard (arXiv 2006.16668, section 3.2), without a capacity: no token is dropped.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asyncrl.engines.experts.record_shape import refusal_of_sharing
from asyncrl.engines.training.ranks.rank_group import Ranks
from asyncrl.engines.training.ranks.rank_mesh import RankMesh
from asyncrl.engines.training.ranks.shards import own_part, refuse_shared_gpu
from asyncrl.errors import ConfigError


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

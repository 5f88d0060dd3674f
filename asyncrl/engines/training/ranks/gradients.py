"""Gradients over ranks: their sum over ranks with the same weights, their norm over shards, and the check that copies
of the weights agree."""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.engines.training.ranks.rank_group import Ranks
from asyncrl.engines.training.ranks.rank_mesh import RankMesh
from asyncrl.engines.training.ranks.shards import axes_cut, is_of_experts, own_part
from asyncrl.errors import WeightsError

BUCKET = 8 << 20
"""Gradient values per all-reduce. Single tensors would cost a round trip each; all tensors at once would need a second
copy of the gradient."""


def sum_gradients(mesh: RankMesh, parameters: Sequence[nn.Parameter], tied: Tensor | None = None) -> None:
    """Sums gradients over the copies of the weights. Each rank has already divided by the denominators of the whole
    optimizer step. Gradients of sharded weights were summed in the backward pass. tied: the embedding that is the head
    too, of which the first and the last stage have a copy."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter is tied and mesh.ends.size > 1:
            gradient = own_part(parameter.grad)
            gradient.copy_(mesh.ends.sum(gradient))
    if mesh.sharding is None:
        for copies, held in _by_copies(mesh, parameters):
            _sum_in_buckets(copies, own_gradients(held))


def _by_copies(mesh: RankMesh, tensors: Iterable[Tensor]) -> Iterator[tuple[Ranks, list[Any]]]:
    """Yields tensors with the ranks that hold the same of them: of experts fewer ranks do than of other weights."""
    found: tuple[list[Any], list[Any]] = ([], [])
    for tensor in tensors:
        found[is_of_experts(tensor)].append(tensor)
    yield mesh.copies, found[False]
    yield mesh.expert_copies, found[True]


def _sum_in_buckets(copies: Ranks, gradients: Sequence[Tensor]) -> None:
    for bucket in _buckets(gradients) if copies.size > 1 else ():
        _sum_at_once(copies, bucket)


def _sum_at_once(copies: Ranks, gradients: Sequence[Tensor]) -> None:
    """Sums gradients in memory that is free again before that of the next ones is taken."""
    summed = copies.sum(torch.cat([gradient.flatten() for gradient in gradients]))
    parts = torch.split(summed, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def own_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Returns the gradients, or this rank's parts of them, without a copy."""
    return [own_part(parameter.grad) for parameter in parameters if parameter.grad is not None]


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups gradients in order into buckets of at most BUCKET values, or of one larger tensor."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        if bucket and sum(each.numel() for each in bucket) + gradient.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


def clip_gradients(
    mesh: RankMesh, parameters: Sequence[nn.Parameter], largest: float, tied: Tensor | None = None
) -> float:
    """Scales gradients down to the largest norm; returns the norm before, over all parts of the weights. tied: see
    `sum_gradients`."""
    if not mesh.is_parted:
        return float(torch.nn.utils.clip_grad_norm_(parameters, largest))
    counted = [each for each in parameters if each is not tied or mesh.ends.rank == 0]
    squares = _squares([each for each in counted if axes_cut(each).isdisjoint(("tp", "ep"))])
    for axis, ranks in (("tp", mesh.tensor), ("ep", mesh.experts)):  # They hold the same of what they do not cut.
        squares = squares + ranks.sum(_squares([each for each in counted if axis in axes_cut(each)]))
    norm = float(mesh.stages.sum(mesh.shards.sum(squares)).sqrt())
    scale = largest / (norm + 1e-6)  # The term is that of torch's clip_grad_norm_.
    for part in own_gradients(parameters) if scale < 1 else ():
        part.mul_(scale)
    return norm


def _squares(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Returns the sum of squares of this rank's parts of the gradients, float64 [1]."""
    found = [part.double().square().sum() for part in own_gradients(parameters)]
    return torch.stack(found).sum().reshape(1).cpu() if found else torch.zeros(1, dtype=torch.float64)


def check_same(mesh: RankMesh, tensors: Iterable[Tensor]) -> None:
    """Raises WeightsError on every rank unless all copies of the weights have the same bits, and so sum gradients of
    one model."""
    if mesh.size == 1:
        return
    differ = False
    digests = []
    for copies, held in _by_copies(mesh, tensors):
        digests.append(digest := _digest(held))
        highest, lowest = copies.largest(torch.tensor([digest, -digest])).tolist()
        differ = differ or highest != -lowest
    if mesh.everyone.largest(torch.tensor([int(differ)])).item():
        own = ", ".join(f"{digest:08x}" for digest in digests if digest)
        raise WeightsError(
            f"the {mesh.size} {mesh.service} ranks no longer hold the same weights (rank {mesh.rank}: {own}); "
            "resume from an earlier checkpoint"
        )


def _digest(tensors: Iterable[Tensor]) -> int:
    digest = 0
    for tensor in tensors:
        values = own_part(tensor).detach().cpu().contiguous()
        digest = zlib.crc32(values.numpy().data.cast("B"), digest) if values.numel() else digest
    return digest

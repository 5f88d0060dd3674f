"""Gradients over ranks: their sum over ranks with the same weights, their norm over shards, and the check that copies
of the weights agree."""

import zlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from asyncrl.engines.training.ranks.rank_mesh import RankMesh
from asyncrl.engines.training.ranks.shards import own_part
from asyncrl.errors import WeightsError

BUCKET = 8 << 20
"""Gradient values per all-reduce. Single tensors would cost a round trip each; all tensors at once would need a second
copy of the gradient."""


def sum_gradients(mesh: RankMesh, parameters: Sequence[nn.Parameter]) -> None:
    """Sums gradients over the copies of the weights. Each rank has already divided by the denominators of the whole
    optimizer step. Gradients of sharded weights were summed in the backward pass."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if mesh.copies.size == 1 or mesh.sharding is not None:
        return
    for bucket in _buckets(parameters):
        gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
        summed = mesh.copies.sum(torch.cat([gradient.flatten() for gradient in gradients]))
        parts = torch.split(summed, [parameter.numel() for parameter in bucket])
        for parameter, part in zip(bucket, parts, strict=True):
            parameter.grad = part.view_as(parameter)


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Groups parameters in order into buckets of at most BUCKET values, or of one larger tensor."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        if bucket and sum(each.numel() for each in bucket) + parameter.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(parameter)
    yield bucket


def clip_gradients(mesh: RankMesh, parameters: Sequence[nn.Parameter], largest: float) -> float:
    """Scales gradients down to the largest norm; returns the norm before, over all shards of the weights."""
    if mesh.sharding is None:
        return float(torch.nn.utils.clip_grad_norm_(parameters, largest))
    own = [own_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    squares = sum((part.double().square().sum() for part in own), torch.zeros((), dtype=torch.float64))
    norm = float(mesh.shards.sum(squares.reshape(1)).sqrt())
    scale = largest / (norm + 1e-6)  # The term is that of torch's clip_grad_norm_.
    for part in own if scale < 1 else ():
        part.mul_(scale)
    return norm


def check_same(mesh: RankMesh, tensors: Iterable[Tensor]) -> None:
    """Raises WeightsError on every rank unless all copies of the weights have the same bits, and so sum gradients of
    one model."""
    if mesh.size == 1:
        return
    digest = 0
    for tensor in tensors:
        values = own_part(tensor).detach().cpu().contiguous()
        digest = zlib.crc32(values.numpy().data.cast("B"), digest) if values.numel() else digest
    highest, lowest = mesh.copies.largest(torch.tensor([digest, -digest])).tolist()
    if mesh.everyone.largest(torch.tensor([int(highest != -lowest)])).item():
        raise WeightsError(
            f"the {mesh.size} training ranks no longer hold the same weights (rank {mesh.rank}: {digest:08x}); "
            "resume from an earlier checkpoint"
        )

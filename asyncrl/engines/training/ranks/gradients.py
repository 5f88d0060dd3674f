"""Gradients over ranks: their sum over ranks with the same weights, their norm over shards, and the check that copies
of the weights agree."""

import zlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from asyncrl.engines.training.ranks.rank_mesh import RankMesh
from asyncrl.engines.training.ranks.shards import is_split, own_part
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
    if mesh.copies.size == 1 or mesh.sharding is not None:
        return
    for bucket in _buckets(own_gradients(parameters)):
        summed = mesh.copies.sum(torch.cat([gradient.flatten() for gradient in bucket]))
        parts = torch.split(summed, [gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
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
    yield bucket


def clip_gradients(
    mesh: RankMesh, parameters: Sequence[nn.Parameter], largest: float, tied: Tensor | None = None
) -> float:
    """Scales gradients down to the largest norm; returns the norm before, over all parts of the weights. tied: see
    `sum_gradients`."""
    if not mesh.is_parted:
        return float(torch.nn.utils.clip_grad_norm_(parameters, largest))
    counted = [each for each in parameters if each is not tied or mesh.ends.rank == 0]
    split = [parameter for parameter in counted if is_split(parameter)]
    whole = [parameter for parameter in counted if not is_split(parameter)]
    squares = _squares(whole) + mesh.tensor.sum(_squares(split))  # Tensor ranks hold the same of what is not split.
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
    digest = 0
    for tensor in tensors:
        values = own_part(tensor).detach().cpu().contiguous()
        digest = zlib.crc32(values.numpy().data.cast("B"), digest) if values.numel() else digest
    highest, lowest = mesh.copies.largest(torch.tensor([digest, -digest])).tolist()
    if mesh.everyone.largest(torch.tensor([int(highest != -lowest)])).item():
        raise WeightsError(
            f"the {mesh.size} {mesh.service} ranks no longer hold the same weights (rank {mesh.rank}: {digest:08x}); "
            "resume from an earlier checkpoint"
        )

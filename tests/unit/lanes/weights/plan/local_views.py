"""Says where the memory of a rank has a part of a tensor: parameter, offset, shape and strides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Self

from asyncrl.lanes.weights.plan.placements import Box, CheckpointTensor, Placement, as_box, box_volume, intersection


class LocalView(NamedTuple):
    """Describes a strided view of a parameter, in elements, as torch.as_strided takes it."""

    parameter: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Stored(NamedTuple):
    """Notes where a box begins in its parameter."""

    box: Box
    parameter: str
    offset: int


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Knows the parameters of one rank. shapes: of each parameter."""

    shapes: Mapping[str, tuple[int, ...]]
    stored: Mapping[str, Sequence[_Stored]]

    @classmethod
    def of(
        cls,
        rank: int,
        tensors: Sequence[CheckpointTensor],
        placements: Mapping[str, Placement],
        fused: Mapping[str, Sequence[str]] | None = None,
    ) -> Self:
        """Lays out what a rank holds. fused: the tensors of each fused parameter, in order."""
        boxes = {tensor.name: _boxes(rank, tensor, placements[tensor.name]) for tensor in tensors}
        boxes = {name: held for name, held in boxes.items() if held}
        shapes = dict[str, tuple[int, ...]]()
        stored = dict[str, list[_Stored]]()
        for parameter, names in (fused or {}).items():
            _fuse(parameter, {name: boxes.pop(name) for name in names if name in boxes}, shapes, stored)
        for name, held in boxes.items():
            shapes[name] = _extents(held[0]) if len(held) == 1 else (sum(map(box_volume, held)),)
            ends = [sum(map(box_volume, held[:index])) for index in range(len(held))]
            stored[name] = [_Stored(box, name, end) for box, end in zip(held, ends, strict=True)]
        return cls(shapes, stored)

    def view(self, tensor: str, box: Box) -> LocalView:
        """Returns where `box` of a tensor lies. Raises KeyError when this rank does not hold all of it."""
        for held, parameter, offset in self.stored.get(tensor, ()):
            if intersection(held, box) == box:
                extents = _extents(held)
                strides = tuple(prod(extents[dim + 1 :]) for dim in range(len(extents)))
                begin = sum((low - start) * s for (low, _), (start, _), s in zip(box, held, strides, strict=True))
                return LocalView(parameter, offset + begin, _extents(box), strides)
        raise KeyError(f"this rank does not hold {box} of {tensor}")


def _boxes(rank: int, tensor: CheckpointTensor, placement: Placement) -> list[Box]:
    held = placement.held(tensor.shape)
    return [as_box(bounds) for bounds in held.bounds[held.ranks == rank]]


def _fuse(
    parameter: str,
    boxes: Mapping[str, Sequence[Box]],
    shapes: dict[str, tuple[int, ...]],
    stored: dict[str, list[_Stored]],
) -> None:
    rows = 0
    offset = 0
    for name, (box,) in boxes.items():
        stored[name] = [_Stored(box, parameter, offset)]
        rows = rows + _extents(box)[0]
        offset = offset + box_volume(box)
        shapes[parameter] = (rows, *_extents(box)[1:])


def _extents(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)

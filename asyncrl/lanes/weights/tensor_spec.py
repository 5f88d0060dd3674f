"""Names, shapes, dtype and offsets of the tensors in a slot, on which both sides agree before weights move."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Self

import torch
from torch import nn

from asyncrl.lanes.weights.parameter_roles import ROUNDED, roles_of

ALIGNMENT = 64  # bytes: a cache line and the widest vector load
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Describes one tensor in a slot: `bytes` bytes from `offset`, row-major. exact: no codec may round it, which is
    no part of the layout."""

    name: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    exact: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class WeightsSpec:
    """Describes the layout of one slot. dtype: "float32" | "bfloat16". aliases: further names of a tensor (tied
    embeddings), alias -> name. size: bytes of a slot."""

    dtype: str
    tensors: tuple[TensorSpec, ...]
    aliases: tuple[tuple[str, str], ...]
    size: int

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: str,
        aliases: Mapping[str, str] | None = None,
        exact: Collection[str] = (),
    ) -> Self:
        """Lays out tensors in the mapping's order. dtype: a key of DTYPES. exact: names of those that are not rounded,
        beside those of one dimension."""
        tensors, offset = [], 0
        for name, shape in shapes.items():
            size = prod(shape) * DTYPES[dtype].itemsize
            tensors.append(TensorSpec(name, shape, offset, size, len(shape) < 2 or name in exact))
            offset += -(-size // ALIGNMENT) * ALIGNMENT
        return cls(dtype, tuple(tensors), tuple((aliases or {}).items()), offset)

    @cached_property
    def digest(self) -> bytes:
        """Returns the SHA-256 of the whole layout, 32 bytes; a reader with another digest is refused."""
        lines = [self.dtype, *(f"{t.name} {t.shape} {t.offset}" for t in self.tensors)]
        lines += [f"{alias} = {name}" for alias, name in self.aliases]
        return hashlib.sha256("\n".join(lines).encode()).digest()


def spec_of(model: nn.Module, dtype: str) -> WeightsSpec:
    """Returns the specification of a model's parameters. A tied parameter is one tensor with aliases."""
    shapes: dict[str, tuple[int, ...]] = {}
    aliases: dict[str, str] = {}
    first_name: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first_name.setdefault(id(parameter), name)
        if owner == name:
            shapes[name] = tuple(parameter.shape)
        else:
            aliases[name] = owner
    exact = [name for name, role in roles_of(model).items() if role not in ROUNDED]
    return WeightsSpec.of(shapes, dtype, aliases, exact)

"""Names, shapes, dtype and offsets of the tensors in a slot, on which both sides agree before weights move."""

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import Any, Self

import torch
from torch import nn

# Roles of the parameters of a model: weight decay, muon and codecs that round ask here, and nothing else tells a
# tensor by its dimensions or by a list of names.


HEADS = ("lm_head", "score", "classifier")
"""Attributes that hold the output layer of a model."""
_ROUTER = re.compile(r"(^|\.)(gate|router)(\.|$)")
_EXPERTS = re.compile(r"(^|\.)experts(\.|$)")


class Role(StrEnum):
    """VECTOR: a parameter of one dimension that is neither bias nor norm, as attention sinks are."""

    EMBEDDING = "embedding"
    POSITIONS = "positions"
    MATRIX = "matrix"
    EXPERTS = "experts"
    ROUTER = "router"
    HEAD = "head"
    BIAS = "bias"
    NORM = "norm"
    VECTOR = "vector"


MATRICES = frozenset((Role.EMBEDDING, Role.POSITIONS, Role.MATRIX, Role.EXPERTS, Role.ROUTER, Role.HEAD))
"""Roles that weight decay acts on."""
INNER = frozenset((Role.MATRIX, Role.ROUTER))
"""Roles between embeddings and output layer, of which muon takes those of two dimensions."""
ROUNDED = frozenset((Role.MATRIX, Role.EXPERTS))
"""Roles that stand a codec that rounds."""


def roles_of(model: Any) -> dict[str, Role]:
    """Returns the role of each parameter, under every name that it has; a tied one has that of its first name."""
    inputs = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    heads = {id(each) for each in (output, *(getattr(model, name, None) for name in HEADS)) if each is not None}
    modules = dict(model.named_modules())
    first = dict[int, Role]()
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, own = name.rpartition(".")
        owner = modules[path]
        around = modules[path.rpartition(".")[0]]
        is_beside_experts = hasattr(around, "experts") and around is not owner
        if own.endswith("bias") or path.rpartition(".")[2] == "biases":
            role = Role.BIAS
        elif "norm" in type(owner).__name__.lower():
            role = Role.NORM
        elif isinstance(owner, nn.Embedding) or "embed" in own:
            role = Role.EMBEDDING if inputs is None or owner is inputs else Role.POSITIONS
        elif id(owner) in heads:
            role = Role.HEAD
        elif parameter.ndim < 2:
            role = Role.VECTOR
        elif _EXPERTS.search(path):
            role = Role.EXPERTS
        elif _ROUTER.search(path) or is_beside_experts:
            role = Role.ROUTER
        else:
            role = Role.MATRIX
        found[name] = first.setdefault(id(parameter), role)
    return found


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
        tensors = []
        offset = 0
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

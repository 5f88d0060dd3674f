"""The specification of a version's tensors, and the memory of a slot that holds them."""

import ctypes
import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from xxhash import xxh3_64_hexdigest

from asyncrl.errors import WeightsError
from asyncrl.protocols.messages import Published

# Names, shapes, dtype and offsets of the tensors in a slot, on which both sides agree before weights move.


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


FULL_DIGEST_BYTES = 64 << 20
PIECE_BYTES = 4 << 20
"""Size up to which a version is digested as a whole, and bytes of a tensor in turn that are digested of a larger one:
XXH3 runs at some 16 GB/s, so that a digest takes some 4 ms and 0.3 ms."""

PIECE = "#"
"""Stands in the name of what is digested between tensor and number of the piece."""


def new_block(spec: WeightsSpec, device: str) -> Tensor:
    """Allocates a slot, uint8 [spec.size]. Raises what torch raises when the device has too little memory."""
    return torch.empty(spec.size, dtype=torch.uint8, device=device)


def block_over(memory: memoryview) -> Tensor:
    """Returns memory as bytes for torch, which has no read-only tensors and warns about read-only buffers. Pages that
    are mapped for reading stay so: a stray write to a tensor ends the process instead of changing the weights of all
    readers."""
    if not len(memory):
        return torch.empty(0, dtype=torch.uint8)
    mapped: Any = type("Mapped", (ctypes.c_char * len(memory),), {})
    block = mapped.from_address(np.frombuffer(memory, np.uint8).ctypes.data)
    block.exported = memory  # Keeps the memory mapped until the last tensor over it is gone.
    return torch.frombuffer(block, dtype=torch.uint8)


def views(block: Tensor, spec: WeightsSpec) -> dict[str, Tensor]:
    """Returns the tensors of a slot, uint8 [spec.size] on any device, by their own names, without a copy."""
    dtype = DTYPES[spec.dtype]
    return {
        tensor.name: block[tensor.offset : tensor.offset + tensor.bytes].view(dtype).view(tensor.shape)
        for tensor in spec.tensors
    }


def digested_tensor(spec: WeightsSpec, version: int) -> str:
    """Returns what the digest of a version guards: "" for the whole slot, else a tensor and the number of a piece. One
    version after the other has another tensor, and each round another piece of it."""
    if spec.size <= FULL_DIGEST_BYTES:
        return ""
    turn, number = divmod(version, len(spec.tensors))
    tensor = spec.tensors[number]
    return f"{tensor.name}{PIECE}{turn % max(1, -(-tensor.bytes // PIECE_BYTES))}"


def digest(block: Tensor, spec: WeightsSpec, name: str) -> str:
    """Computes XXH3 of a tensor, "" for the whole slot: it finds torn and stray writes, and forgery is no concern on
    one host. Of a device this reads the bytes back, after all that was enqueued before on the current stream."""
    start, stop = digest_range(spec, name)
    return xxh3_64_hexdigest(block[start:stop].cpu().numpy().data)


def digest_range(spec: WeightsSpec, name: str) -> tuple[int, int]:
    """Returns where in a slot begins and ends what `digested_tensor` names."""
    if not name:
        return 0, spec.size
    owner, _, piece = name.rpartition(PIECE)
    tensor = next(tensor for tensor in spec.tensors if tensor.name == owner)
    start = tensor.offset + int(piece) * PIECE_BYTES
    return start, min(start + PIECE_BYTES, tensor.offset + tensor.bytes)


def checked(named: Mapping[str, Tensor], spec: WeightsSpec) -> Mapping[str, Tensor]:
    """Returns the tensors. Raises WeightsError when names, shapes or tied tensors do not fit the specification."""
    shapes = {tensor.name: tensor.shape for tensor in spec.tensors}
    aliases = dict(spec.aliases)
    missing = sorted(shapes.keys() - named.keys())
    unknown = sorted(named.keys() - shapes.keys() - aliases.keys())
    if missing or unknown:
        raise WeightsError(f"weights do not fit their specification: missing {missing}, unknown {unknown}")
    for name, shape in shapes.items():
        if tuple(named[name].shape) != shape:
            raise WeightsError(f"{name} has shape {tuple(named[name].shape)}, its specification says {shape}")
    for alias, name in aliases.items():
        if alias in named and named[alias] is not named[name] and not torch.equal(named[alias], named[name]):
            raise WeightsError(f"{alias} and {name} are tied and must be equal, but were given different values")
    return named


def fill(slot: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copies tensors into those of a slot, one after the other; of sharded ones every rank has to call `whole_tensor`
    in the order of the slot meanwhile."""
    with torch.no_grad():
        for name, view in slot.items():
            view.copy_(whole_tensor(tensors[name], view.dtype))


def whole_tensor(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a tensor with the parts of all ranks, where it is sharded over ranks, which cast their parts to the dtype
    before they gather them."""
    if not hasattr(tensor, "full_tensor"):  # A DTensor has it, whose module takes a second to import.
        return tensor
    parted: Any = tensor if dtype is None else tensor.to(dtype)
    whole: Tensor = parted.full_tensor()
    return whole


def check_digest(block: Tensor, spec: WeightsSpec, published: Published) -> None:
    """Raises WeightsError unless the slot has the published digest; one that was published without is not checked."""
    if not published.digest:
        return
    found = digest(block, spec, published.digest_of)
    if found != published.digest:
        what = published.digest_of or "the slot"
        raise WeightsError(
            f"weights of version {published.version} in {published.arena} are damaged: {what} has digest {found}, "
            f"published was {published.digest}"
        )


def with_aliases(tensors: dict[str, Tensor], spec: WeightsSpec) -> dict[str, Tensor]:
    """Returns the tensors under every name."""
    return tensors | {alias: tensors[name] for alias, name in spec.aliases}

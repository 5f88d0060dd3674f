"""The tensors of a slot in any block of memory."""

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from asyncrl.errors import WeightsError
from asyncrl.lanes.weights.tensor_spec import DTYPES, WeightsSpec
from asyncrl.protocols.messages import Published

FULL_DIGEST_BYTES = 64 << 20
PIECE_BYTES = 4 << 20
"""Size up to which a version is digested as a whole, and bytes of a tensor in turn that are digested of a larger one:
XXH3 runs at some 16 GB/s, so that a digest takes some 4 ms and 0.3 ms."""

PIECE = "#"
"""Stands in the name of what is digested between tensor and number of the piece."""


def views(memory: memoryview, spec: WeightsSpec) -> dict[str, Tensor]:
    """Returns the tensors of a slot that begins with the memory, by their own names, without a copy."""
    block = _block(memory)
    dtype = DTYPES[spec.dtype]
    return {
        tensor.name: torch.frombuffer(
            block, dtype=dtype, count=tensor.bytes // dtype.itemsize, offset=tensor.offset
        ).view(tensor.shape)
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


def digest(memory: memoryview, spec: WeightsSpec, name: str) -> str:
    """Computes the digest of a tensor, "" for the whole slot."""
    start, stop = digest_range(spec, name)
    return digest_text(memory[start:stop])


def digest_range(spec: WeightsSpec, name: str) -> tuple[int, int]:
    """Returns where in a slot begins and ends what `digested_tensor` names."""
    if not name:
        return 0, spec.size
    owner, _, piece = name.rpartition(PIECE)
    tensor = next(tensor for tensor in spec.tensors if tensor.name == owner)
    start = tensor.offset + int(piece) * PIECE_BYTES
    return start, min(start + PIECE_BYTES, tensor.offset + tensor.bytes)


def digest_text(memory: memoryview) -> str:
    """Computes XXH3, which finds torn and stray writes; forgery is no concern on one host."""
    return xxh3_64_hexdigest(memory)


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


def check_digest(memory: memoryview, spec: WeightsSpec, published: Published) -> None:
    """Raises WeightsError unless the memory has the published digest; one that was published without is not checked."""
    if published.digest:
        refuse_other_digest(digest(memory, spec, published.digest_of), published)


def refuse_other_digest(found: str, published: Published) -> None:
    """Raises WeightsError when the digest is not the published one."""
    if found != published.digest:
        what = published.digest_of or "the slot"
        raise WeightsError(
            f"weights of version {published.version} in {published.arena} are damaged: {what} has digest {found}, "
            f"published was {published.digest}"
        )


def with_aliases(tensors: dict[str, Tensor], spec: WeightsSpec) -> dict[str, Tensor]:
    """Returns the tensors under every name."""
    return tensors | {alias: tensors[name] for alias, name in spec.aliases}


def _block(memory: memoryview) -> Any:
    """Wraps mapped memory for torch, which has no read-only tensors and warns about read-only buffers. Pages that are
    mapped for reading stay so: a stray write to a tensor ends the process instead of changing the weights of all
    readers."""
    mapped: Any = type("Mapped", (ctypes.c_char * len(memory),), {})
    block = mapped.from_address(np.frombuffer(memory, np.uint8).ctypes.data)
    block.exported = memory  # Keeps the memory mapped until the last tensor over it is gone.
    return block


# A slot in one tensor of bytes, on any device.


def new_block(spec: WeightsSpec, device: str) -> Tensor:
    """Allocates a slot, uint8 [spec.size]. Raises what torch raises when the device has too little memory."""
    return torch.empty(spec.size, dtype=torch.uint8, device=device)


def block_views(block: Tensor, spec: WeightsSpec) -> dict[str, Tensor]:
    """Returns the tensors of a slot, by their own names, without a copy."""
    dtype = DTYPES[spec.dtype]
    return {
        tensor.name: block[tensor.offset : tensor.offset + tensor.bytes].view(dtype).view(tensor.shape)
        for tensor in spec.tensors
    }


def block_digest(block: Tensor, spec: WeightsSpec, name: str) -> str:
    """Computes the digest of a tensor, "" for the whole slot. Of a device this reads the bytes back, after all that was
    enqueued before on the current stream."""
    start, stop = digest_range(spec, name)
    return digest_text(block[start:stop].cpu().numpy().data)


def check_block_digest(block: Tensor, spec: WeightsSpec, published: Published) -> None:
    """Raises WeightsError unless the slot has the published digest."""
    if published.digest:
        refuse_other_digest(block_digest(block, spec, published.digest_of), published)

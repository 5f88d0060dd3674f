"""Files with parts of tensors, one of each kind for every rank, and the tensors that are read from them by slices.

    parts/rank-0-weights.safetensors   q[0:8]     parts/rank-0-moments.safetensors   first and second moment of q[0:8]
    parts/rank-1-weights.safetensors   q[8:16]    parts/rank-1-moments.safetensors   those of q[8:16]

The format is that of HuggingFaceStorageWriter of torch.distributed.checkpoint: safetensors whose metadata has the place
of each part in its tensor. Metadata also have the number of ranks, so that a missing file is found.
"""

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyncrl.engines.models.model_folder import PARTS, WEIGHTS
from asyncrl.errors import JournalError

Kind = Literal["weights", "moments"]
PLACES = "DCP_SHARDING_INFO"
OFFSETS = "saved_offsets"
"""Keys of torch.distributed.checkpoint in the metadata of a file."""
DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of safetensors, the largest elements first: in this order all tensors of a file are aligned."""
STORED_TYPES: Mapping[str, torch.dtype] = {name: dtype for dtype, name in DTYPES.items()}


class TensorPart(NamedTuple):
    """A part of a tensor. offsets: where it begins in each dimension of the whole."""

    values: Tensor
    offsets: tuple[int, ...]


def part_file(rank: int, kind: Kind) -> str:
    """Returns the name of a file in the folder of parts."""
    return f"rank-{rank}-{kind}.safetensors"


def write_parts(file: BinaryIO, parts: Mapping[str, TensorPart], ranks: int) -> None:
    """Writes parts into a new file, from its first byte to its last. ranks: number of those that write files. Raises
    OSError."""
    ordered = dict(sorted(parts.items(), key=lambda named: [*DTYPES].index(named[1].values.dtype)))
    places = {name: {OFFSETS: part.offsets} for name, part in ordered.items()}
    described = {name: (part.values.dtype, tuple(part.values.shape)) for name, part in ordered.items()}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", PLACES: json.dumps(places), "ranks": str(ranks)}
    _write(file, described, (part.values for part in ordered.values()), metadata)


class _Part(NamedTuple):
    """A part in an opened file under a key there. sizes: in the dimensions of the whole, of which those that the part
    lacks are first, and of size 1."""

    file: Any
    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def read(self, ranges: tuple[slice, ...]) -> Tensor:
        if not ranges:
            return cast(Tensor, self.file.get_tensor(self.key))
        stored = self.file.get_slice(self.key)
        return cast(Tensor, stored[ranges[-len(stored.get_shape()) :]])


class StoredTensor:
    """A tensor whose parts are in files. shape: of the whole."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype
        self.shape: tuple[int, ...] = ()
        self._parts: list[_Part] = []

    def add(self, file: Any, offsets: tuple[int, ...], sizes: tuple[int, ...], key: str | None = None) -> None:
        """Takes a part that lies in an opened file. key: its name there, where that is another one. sizes: may begin
        with sizes of 1 that the part in the file does not have."""
        ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        self.shape = tuple(max(*each) for each in zip(self.shape or ends, ends, strict=True))
        self._parts.append(_Part(file, key or self.name, offsets, sizes))

    @property
    def is_complete(self) -> bool:
        """Returns whether the parts hold as many numbers as the whole."""
        return sum(math.prod(each.sizes) for each in self._parts) == math.prod(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def __getitem__(self, ranges: tuple[slice, ...]) -> Tensor:
        """Reads a slice; ranges: begin and end in every dimension. Raises JournalError when no file has all of it."""
        asked = [each.indices(size)[:2] for each, size in zip(ranges, self.shape, strict=True)]
        found = torch.empty([stop - start for start, stop in asked], dtype=self.dtype)
        read = 0
        for part in self._parts:
            ends = map(sum, zip(part.offsets, part.sizes, strict=True))
            common = [
                (max(start, offset), min(stop, end))
                for (start, stop), offset, end in zip(asked, part.offsets, ends, strict=True)
            ]
            if all(start < stop for start, stop in common):
                source = _moved(common, part.offsets)
                target = _moved(common, [start for start, _ in asked])
                found[target] = part.read(source)
                read += math.prod(stop - start for start, stop in common)
        if read != found.numel():
            raise JournalError(f"{self.name}: the parts of the checkpoint hold {read} of {found.numel()} numbers")
        return found

    def whole(self) -> Tensor:
        return self[tuple(slice(0, size) for size in self.shape)]


def _moved(ranges: Iterable[tuple[int, int]], origin: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(start - first, stop - first) for (start, stop), first in zip(ranges, origin, strict=True))


def stored_tensors(checkpoint: Path, kind: Kind) -> dict[str, StoredTensor]:
    """Opens the parts of a checkpoint, of which nothing is read yet. Raises JournalError when the file of a rank is
    missing or damaged."""
    found: dict[str, StoredTensor] = {}
    rank = 0
    ranks = 1
    while rank < ranks:
        path = checkpoint / PARTS / part_file(rank, kind)
        try:
            ranks = _add_parts(found, safe_open(path, framework="pt"))
        except FileNotFoundError as error:
            raise JournalError(
                f"checkpoint {checkpoint} has no {PARTS}/{path.name}, with parts of rank {rank}"
            ) from error
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise JournalError(f"{path} is cut short or damaged: {error}") from error
        rank += 1
    return found


def _add_parts(found: dict[str, StoredTensor], file: Any) -> int:
    """Adds the parts in a file; returns the number of ranks that wrote one."""
    metadata = file.metadata()
    places = json.loads(metadata[PLACES])
    for name, place in places.items():
        described = file.get_slice(name)
        stored = found.setdefault(name, StoredTensor(name, STORED_TYPES[described.get_dtype()]))
        stored.add(file, tuple(place[OFFSETS]), tuple(described.get_shape()))
    return int(metadata["ranks"])


def gather_model(model: Path, target: Path) -> None:
    """Writes a folder for from_pretrained from a checkpoint in parts, one whole tensor in memory at a time. model: its
    `model/`. Raises JournalError when a part is missing, and OSError."""
    tensors = stored_tensors(model.parent, "weights")
    shutil.copytree(model, target)
    ordered = sorted(tensors.values(), key=lambda each: [*DTYPES].index(each.dtype))
    described = {each.name: (each.dtype, each.shape) for each in ordered}
    with (target / WEIGHTS).open("wb") as file:
        _write(file, described, (each.whole() for each in ordered), {"format": "pt"})


def _write(
    file: BinaryIO,
    described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Writes safetensors: bytes of the header, header, tensors one after the other."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in described.items():
        start = end
        end = end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors:
        file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

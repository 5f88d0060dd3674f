"""A digest of the weights of a model folder, by which a run with adapters knows its base model. Without torch."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from xxhash import xxh3_128_hexdigest

from asyncrl.engines.models.model_folder import weight_files
from asyncrl.errors import ConfigError

BASE = "base_model.json"
"""File of a checkpoint with adapters: where their base model was, and the digest of its weights."""


def weights_digest(folder: Path) -> str:
    """Returns the digest of names, types, shapes and bytes of all tensors, however they are spread over files."""
    names = weight_files(folder)
    lines = [line for name in names for line in _tensors(folder / name)]
    if not names:  # Files of torch, which have no header that could be read here.
        lines = [f"{path.name} {_digest(path, 0, None)}" for path in folder.glob("pytorch_model*.bin")]
    return xxh3_128_hexdigest("\n".join(sorted(lines)).encode())


def write_base(checkpoint: Path, folder: Path, digest: str) -> None:
    """Writes the base model of the adapters of a checkpoint."""
    (checkpoint / BASE).write_text(json.dumps({"folder": str(folder), "digest": digest}) + "\n")


def refuse_other_base(checkpoint: Path, folder: Path) -> None:
    """Raises ConfigError when the model in `folder` is not the base model of the adapters in a checkpoint."""
    path = checkpoint / BASE
    if not path.exists():  # Nothing is known of its base model.
        return
    wanted = json.loads(path.read_text())["digest"]
    found = weights_digest(folder)
    if found != wanted:
        raise ConfigError(
            f"model.name: {folder} holds another model than the one on which the adapters in {checkpoint} were trained "
            f"(its weights have digest {found}, theirs had {wanted}): put back the model that the run began with"
        )


def _tensors(path: Path) -> Iterator[str]:
    """Yields name, type, shape and digest of each tensor of a safetensors file."""
    with path.open("rb") as file:
        begin = 8 + (length := int.from_bytes(file.read(8), "little"))
        header = json.loads(file.read(length))
    for name, each in header.items():
        if name != "__metadata__":
            first, last = (begin + offset for offset in each["data_offsets"])
            yield f"{name} {each['dtype']} {each['shape']} {_digest(path, first, last)}"


def _digest(path: Path, first: int, last: int | None) -> str:
    return xxh3_128_hexdigest(np.memmap(path, np.uint8, "r")[first:last].data)

"""Checks the files of a model folder by their headers and sizes, without reading weights."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LENGTH = 8
"""Bytes at the start of a safetensors file that hold the size of its JSON header, little-endian. The header gives the
offsets of each tensor in the rest of the file (huggingface/safetensors, README)."""

HEADS = ("score", "classifier")
"""Names of a classifier's head in transformers, which depend on the model family."""
TOKENIZERS = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken")
"""Patterns of tokenizer files; every saved tokenizer has at least one of them."""


def refuse_damaged(folder: Path) -> None:
    """Raises ConfigError when files are damaged; the error names each of them."""
    if found := list(damages(folder)):
        raise ConfigError(
            f"model.name: {'; '.join(found)}. Get {'it' if len(found) == 1 else 'them'} again: copy or download the "
            "model once more; a folder that a run made for itself is made again when you remove it"
        )


def has_tokenizer(folder: Path) -> bool:
    """Returns whether the folder contains a tokenizer file."""
    return any(next(folder.glob(pattern), None) for pattern in TOKENIZERS)


def head_labels(folder: Path) -> int | None:
    """Returns the number of labels of a classifier's head: 0 without a head, None where only loading would tell.

    The folder must be undamaged. Reads the shapes in safetensors headers, or config.json where there are none.
    """
    names = _weight_files(folder)
    if not names:
        described = json.loads((folder / "config.json").read_bytes())
        return len(described.get("id2label") or ()) or described.get("num_labels")
    tensors = {name: place for file in names for name, place in _header(folder / file).items()}
    for head in HEADS:
        if place := tensors.get(f"{head}.weight"):
            return int(place["shape"][0])
    return None if any(name.split(".")[0] in HEADS for name in tensors) else 0


def damages(folder: Path) -> Iterator[str]:
    """Yields one clause for each file that cannot be loaded."""
    for path in sorted(folder.glob("*.json")):
        if not _is_json(path):
            yield f"{path} is cut short or damaged: it is not JSON"
    for name in _weight_files(folder):
        path = folder / name
        if not path.is_file():
            yield f"{path} is missing, and {INDEX} names it"
        elif why := _damage_of_weights(path):
            yield f"{path} is cut short or damaged: {why}"


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_bytes())
    except ValueError:
        return False
    return True


def _weight_files(folder: Path) -> list[str]:
    """Returns the names of the weight files that transformers loads; a damaged index names none."""
    index = folder / INDEX
    if (folder / WEIGHTS).is_file() or not index.is_file() or not _is_json(index):
        return [WEIGHTS] if (folder / WEIGHTS).is_file() else []
    return sorted(set(json.loads(index.read_bytes()).get("weight_map", {}).values()))


def _damage_of_weights(path: Path) -> str:
    """Returns what is wrong with a safetensors file, or ""."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH), "little")
        if length > size - LENGTH:
            return f"it has {size} bytes, too few for its header"
        try:
            header = json.loads(file.read(length))
            ends = [place["data_offsets"][1] for name, place in header.items() if name != "__metadata__"]
            expected = LENGTH + length + max(ends, default=0)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            return "its header is not one of safetensors"
    return "" if size == expected else f"it has {size} bytes, but its header describes {expected}"


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        found: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(LENGTH), "little")))
    return found

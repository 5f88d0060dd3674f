"""Whether the files of a model folder are whole, as far as their beginnings and sizes tell: reads no weights."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LENGTH = 8
"""Bytes at the start of a safetensors file that give the size of its header, little-endian; JSON follows, and in it
each tensor's place in the rest of the file (huggingface/safetensors, README)."""

HEADS = ("score", "classifier")
"""What transformers calls the head of a classifier, by family."""
TOKENIZERS = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken")
"""Files of a tokenizer; one of them is there wherever one was saved."""


def refuse_damaged(folder: Path) -> None:
    """Raises ConfigError, which names each file that is not whole, and says what to do about it."""
    if found := list(damages(folder)):
        raise ConfigError(
            f"model.name: {'; '.join(found)}. Get {'it' if len(found) == 1 else 'them'} again: copy or download the "
            "model once more; a folder that a run made for itself is made again when you remove it"
        )


def has_tokenizer(folder: Path) -> bool:
    """Whether there is a file of a tokenizer, whatever is in it."""
    return any(next(folder.glob(pattern), None) for pattern in TOKENIZERS)


def head_labels(folder: Path) -> int | None:
    """How many numbers the head of the classifier in a whole folder gives; 0 without a head, None where only loading
    it would tell. The weights' shapes say so, or config.json where they lie in no safetensors file."""
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
    """One clause for each file that cannot be loaded."""
    for path in sorted(folder.glob("*.json")):
        if not _is_json(path):
            yield f"{path} is cut short or damaged: it is no JSON"
    for name in _weight_files(folder):
        path = folder / name
        if not path.is_file():
            yield f"{path} is missing, and {INDEX} names it"
        elif why := _why_not_whole(path):
            yield f"{path} is cut short or damaged: {why}"


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_bytes())
    except ValueError:
        return False
    return True


def _weight_files(folder: Path) -> list[str]:
    """Those that transformers loads. Raises nothing for an index that is damaged, which is told of already."""
    index = folder / INDEX
    if (folder / WEIGHTS).is_file() or not index.is_file() or not _is_json(index):
        return [WEIGHTS] if (folder / WEIGHTS).is_file() else []
    return sorted(set(json.loads(index.read_bytes()).get("weight_map", {}).values()))


def _why_not_whole(path: Path) -> str:
    """Empty for a whole safetensors file."""
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
            return "its header is none of safetensors"
    return "" if size == expected else f"it has {size} bytes, by its header it should have {expected}"


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        found: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(LENGTH), "little")))
    return found

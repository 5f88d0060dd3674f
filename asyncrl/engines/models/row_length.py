"""Reads from the config.json of a model what it does differently with longer rows.

A rotary embedding of the kind "dynamic" or "longrope" takes its frequencies from the longest row of a forward pass once
that row passes a length, so that the log-probs of a token depend on the rows beside it. Windows, chunks and other
branches begin at a length that the config names; a probe that is shorter never meets them.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.engines.models.model_folder import longest_row
from asyncrl.errors import ConfigError

BY_LONGEST_ROW = ("dynamic", "longrope")
"""Kinds of rotary embedding whose frequencies depend on the longest row of a forward pass."""
BY_POSITION = ("default", "linear", "yarn", "llama3", "proportional")
"""Kinds whose frequencies are the same for every row, so that their original length begins no branch."""
THRESHOLDS = ("window", "chunk", "original_max_position", "floor_scale")
"""Parts of the names of keys that hold a length at which a model begins to compute differently."""


def refuse_rotation_by_longest_row(folder: Path, config: Config, key: str = "model.name") -> None:
    """Raises ConfigError with what `rotation_by_longest_row` finds. key: of the config, names the model."""
    if found := rotation_by_longest_row(folder, config):
        raise ConfigError(f"{key}: {found}")


def rotation_by_longest_row(folder: Path, config: Config) -> str | None:
    """Describes why rows of this run would change each other's log-probs, and what to write; None when they do not."""
    path = folder / "config.json"
    longest = longest_row(config)
    shape = json.loads(path.read_bytes()) if path.exists() else {}
    for kind, original in _rotations(shape):
        if kind in BY_LONGEST_ROW and longest > original:
            return (
                f"{folder} has rotary embeddings of the kind {kind!r}, whose frequencies follow the longest row of a "
                f"forward pass once it passes {original} tokens, so rows would change each other's log-probs; a prompt "
                f"with its answer may have {longest} here: write task.max_prompt_tokens and generation.max_new_tokens "
                f"with a sum of at most {original}, or take another model"
            )
    return None


def probe_tokens_needed(shape: Mapping[str, Any], least: int, longest: int) -> int:
    """Returns the tokens of a probe that goes beyond every length below `longest` at which this model may begin to
    compute differently, at least `least`. shape: the contents of config.json."""
    thresholds = [length for length in _thresholds(shape) if length < longest]
    return min(max([least, *(length + least for length in thresholds)]), max(least, longest))


def _rotations(shape: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yields kind and original length of every rotary embedding; a model may have one for each type of layer."""
    shape = shape.get("text_config") or shape
    described = shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    for each in (described, *(part for part in described.values() if isinstance(part, Mapping))):
        if kind := each.get("rope_type", each.get("type")):
            known = shape.get("max_position_embeddings") or 0
            trained = each.get("original_max_position_embeddings") or shape.get("original_max_position_embeddings")
            yield kind, int(known if kind == "dynamic" else trained or known)


def _thresholds(shape: Mapping[str, Any]) -> Iterator[int]:
    unread = ["original_max_position"] if shape.get("rope_type", shape.get("type")) in BY_POSITION else []
    unread += ["window"] if shape.get("use_sliding_window") is False else []
    for name, value in shape.items():
        if isinstance(value, Mapping):
            yield from _thresholds(value)
        elif type(value) is int and any(part in name for part in THRESHOLDS) and not any(u in name for u in unread):
            yield value

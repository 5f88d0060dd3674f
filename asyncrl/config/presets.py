"""Presets of `algorithm.preset`: values of other keys of the section, each of which a config may override."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

STANDARDIZING = ("group_mean", "gae")
"""Advantages that are divided by a standard deviation unless `normalize_std` is false."""
DEFAULT_BOUNDS: Mapping[str, Mapping[str, float]] = {
    "cap": {"weight_cap": 2.0},
    "mask": {"weight_floor": 0.5, "weight_cap": 5.0},
}
"""Default bounds of the weight, by `correction`."""


@dataclass(frozen=True, slots=True)
class Preset:
    """An algorithm of a paper. parts: keys of `[algorithm]` and their values."""

    paper: str
    parts: Mapping[str, Any]


def _read(text: str) -> dict[str, Preset]:
    tables: dict[str, dict[str, Any]] = tomllib.loads(text)
    for parts in tables.values():
        parts.update({key: tuple(value) for key, value in parts.items() if isinstance(value, list)})
    return {name: Preset(parts.pop("paper"), parts) for name, parts in tables.items()}


PRESETS = _read((files(__package__) / "presets.toml").read_text(encoding="utf-8"))


def expanded(given: Mapping[str, Any], preset: str) -> dict[str, Any]:
    """Adds the values of the preset, and defaults that depend on other values, to those that were given."""
    values = {**PRESETS[preset].parts, **given}
    if values.get("old_logprobs") == "recomputed":
        values.setdefault("correction", "cap")
    if values["advantage"] in STANDARDIZING:
        values.setdefault("normalize_std", True)
    return {**DEFAULT_BOUNDS.get(str(values.get("correction")), {}), **values}

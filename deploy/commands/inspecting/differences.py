"""Finds where two answers differ, in the order in which a reader meets their parts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

IGNORED = ("published", "places", "place", "seconds")
"""Fields that say where something is, or how long it took, which differs at each start."""


def differences(recorded: Any, found: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields the place, the recorded and the found value of each difference. Floats that are not numbers are equal."""
    one, other = _parts(recorded), _parts(found)
    if one is None or other is None or type(recorded) is not type(found):
        if not _same(recorded, found):
            yield place, recorded, found
        return
    if one.keys() != other.keys():
        yield place, f"{len(one)} parts", f"{len(other)} parts"
    for name in one.keys() & other.keys() if isinstance(recorded, Mapping) else one:
        if name in other and name not in IGNORED:
            yield from differences(one[name], other[name], f"{place}.{name}" if place else str(name))


def _parts(value: Any) -> Mapping[Any, Any] | None:
    """Returns the named parts of a value; None for one without parts."""
    if isinstance(value, np.ndarray | str | bytes):
        return None
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return dict(value._asdict())
    if isinstance(value, Mapping):
        return value
    return dict(enumerate(value)) if isinstance(value, Sequence) else None


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return bool(one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes())
    return bool(one == other or (one != one and other != other))

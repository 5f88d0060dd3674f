"""The staleness of a token, as gate, trainer and simulation compute it."""

from typing import Any, Literal

Policy = Literal["mask", "drop", "block", "admit"]


def live(stamps: Any, version: int, limit: int) -> Any:
    """Returns whether a token sampled at version `stamps` (a number, or an array or tensor of them) may enter the
    loss."""
    return version - stamps <= limit

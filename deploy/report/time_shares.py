"""Says what share of the time the workers of each service spent in each state, over several steps."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from asyncrl.telemetry.jsonl import Object
from asyncrl.telemetry.state_clock import STATES

ACCOUNTED = (*STATES, "unaccounted")
"""States whose shares of a worker's time add up to 1."""


def services_of(steps: Iterable[Object]) -> list[str]:
    """Returns the services whose time the metrics of these steps account for."""
    return list({key.split("/")[1]: None for step in steps for key in step if key.startswith("time/")})


def lengths_of(ends: Sequence[float]) -> list[float]:
    """Returns how many seconds each step took. ends: when they ended, the first since the begin of the run."""
    return [end - begin for begin, end in pairwise((0.0, *ends))]


def mean_shares(steps: Sequence[Object], lengths: Sequence[float], service: str) -> dict[str, float]:
    """Returns the share of each state, each step weighted by its length; {} where no step has the service."""
    found = [(step, length) for step, length in zip(steps, lengths, strict=True) if f"time/{service}/busy" in step]
    total = sum(length for _, length in found)
    if not total:
        return {}
    return {
        state: sum(length * (step.get(f"time/{service}/{state}") or 0.0) for step, length in found) / total
        for state in ACCOUNTED
    }

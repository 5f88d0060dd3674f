"""Names the sides of a comparison, and the keys of the config in which each differs from the experiment."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.bench.overlap.emulation.stage_times import Update

Engine = Literal["real", "emulated", "virtual"]
ONE_STEP_OFF = "one-step-off"


@dataclass(frozen=True, slots=True)
class Side:
    """One side. values: keys of the config. is_baseline: whether speed-ups are over it; the first such side has the
    same number of threads as the asynchronous sides. update: of emulated generators."""

    name: str
    values: dict[str, Any]
    is_baseline: bool = False
    update: Update = "in flight"


def sides_of(engine: Engine, limits: Sequence[int]) -> list[Side]:
    """Returns all sides, baselines first: a real synchronous run may use all cores for each stage, so it is measured
    with one thread a worker and with as many as there are cores."""
    return [*_baselines(engine), *_asynchronous(limits)]


def _baselines(engine: Engine) -> Iterator[Side]:
    synchronous = {"staleness.limit": 0}
    if engine != "real":
        yield Side("synchronous", synchronous, is_baseline=True)
        return
    yield Side("synchronous, 1 thread", synchronous | {"fleet.threads": 1}, is_baseline=True)
    if (cores := os.cpu_count() or 1) > 1:
        yield Side(f"synchronous, {cores} threads", synchronous | {"fleet.threads": cores}, is_baseline=True)


def _asynchronous(limits: Sequence[int]) -> Iterator[Side]:
    # Whole batches, each sampled by one version while the batch before it trains.
    yield Side(ONE_STEP_OFF, {"staleness.limit": 1, "staleness.policy": "block"}, update="drain")
    for limit in limits:
        yield Side(f"limit {limit}", {"staleness.limit": limit})

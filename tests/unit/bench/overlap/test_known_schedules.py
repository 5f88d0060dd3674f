"""The runtime reports how workers spent their time, and agrees with schedules whose shares are known."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from asyncrl.bench.overlap import accounting
from asyncrl.bench.overlap.accounting import Overlap

sys.path.insert(0, str(Path(__file__).parent))
from emulated_runs import SAMPLES, virtual_overlap

EXACT = 1e-3
"""Share of the time by which the runtime may be wrong."""
Shares = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Schedule:
    """One run. step: true seconds of a step; shares: true seconds of a step in each state, by service; the rest of a
    service's time is `rest`. is_at_bound: whether the bound efficiency is 1."""

    limit: int
    generation: float
    stages: dict[str, float]
    step: float
    seconds: Shares
    rest: dict[str, str]
    is_at_bound: bool = True


IDLE = {"generation": "blocked", "reward": "starved", "training": "starved"}
SCHEDULES = {
    "synchronous": Schedule(
        0,
        2.0,
        {"step": 3.0, "score": 0.01, "load": 0.1, "publish": 0.05},
        5.79,
        {
            "generation": {"busy": 2.0, "sync": 0.1},
            "reward": {"busy": 0.64},
            "training": {"busy": 3.0, "sync": 0.05},
        },
        IDLE,
    ),
    "synchronous, slow weights": Schedule(
        0,
        2.0,
        {"step": 1.0, "load": 3.0},
        6.0,
        {"generation": {"busy": 2.0, "sync": 3.0}, "reward": {}, "training": {"busy": 1.0}},
        IDLE,
    ),
    "bound by the trainer": Schedule(
        1,
        2.0,
        {"step": 3.0, "load": 0.1, "publish": 0.05},
        3.05,
        {"generation": {"busy": 2.0, "sync": 0.1}, "reward": {}, "training": {"busy": 3.0, "sync": 0.05}},
        IDLE,
    ),
    "bound by the generator": Schedule(
        2,
        4.0,
        {"step": 1.0, "load": 0.4},
        4.4,
        {"generation": {"busy": 4.0, "sync": 0.4}, "reward": {}, "training": {"busy": 1.0}},
        IDLE,
        is_at_bound=False,
    ),
    "bound by the reward": Schedule(
        2,
        1.0,
        {"step": 1.0, "score": 0.05},
        3.2,
        {"generation": {"busy": 1.0}, "reward": {"busy": 3.2}, "training": {"busy": 1.0}},
        IDLE,
    ),
}


@pytest.fixture(params=SCHEDULES)
def measured(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Schedule, Overlap]:
    schedule = SCHEDULES[request.param]
    return schedule, virtual_overlap(
        tmp_path / "run", schedule.limit, generation=schedule.generation, **schedule.stages
    )


def test_every_state_of_every_worker_is_what_the_schedule_says(measured: tuple[Schedule, Overlap]) -> None:
    schedule, found = measured
    assert found.step == pytest.approx(schedule.step, rel=EXACT)
    for service, seconds in schedule.seconds.items():
        true = {state: seconds.get(state, 0.0) / schedule.step for state in found.shares[service]}
        true[schedule.rest[service]] += 1.0 - sum(true.values())
        assert found.shares[service] == pytest.approx(true, abs=EXACT), service
    if schedule.is_at_bound:
        assert found.bound_efficiency == pytest.approx(1.0, abs=EXACT)
    else:
        assert found.efficiency < found.bound_efficiency < 1.0 - EXACT


def test_what_follows_from_the_schedule_follows_from_the_record(tmp_path: Path) -> None:
    """Stages of 2 and 3 s, with weights that load in 0.1 s and are written in 0.05 s."""
    stages = {"step": 3.0, "load": 0.1, "publish": 0.05}
    sync, overlapped = (virtual_overlap(tmp_path / str(limit), limit, generation=2.0, **stages) for limit in (0, 1))
    assert accounting.speedup(sync.step, overlapped.step) == pytest.approx(5.15 / 3.05, rel=EXACT)
    assert accounting.overlap_yield(sync.step, overlapped.step, 3.0) == pytest.approx(2.1 / 2.15, rel=EXACT)
    busy = {name: each.stages["training"] * each.step for name, each in (("solo", sync), ("together", overlapped))}
    assert accounting.contention(busy["together"], busy["solo"]) == pytest.approx(1.0, rel=EXACT)
    assert overlapped.efficiency == pytest.approx(3.0 / 3.05, rel=EXACT)
    assert (sync.both_ran, overlapped.both_ran) == pytest.approx((0.0, 1.0), abs=EXACT)
    assert overlapped.goodput == pytest.approx(100 * SAMPLES / 3.05, rel=EXACT)

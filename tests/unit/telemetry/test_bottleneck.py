"""Which service a run waits for, in words, with the number that it rests on; and curves of one line."""

import math

import pytest

from asyncrl.config.schema import Config
from asyncrl.telemetry.bottleneck import LongCurve, ServiceLoad, shares_of, sparkline, workers_of


def metrics(**shares: tuple[float, float]) -> dict[str, float]:
    """Busy and starved shares by service."""
    found = {"reward/mean": 0.5}
    for service, (busy, starved) in shares.items():
        found |= {f"time/{service}/busy": busy, f"time/{service}/starved": starved, f"time/{service}/blocked": 0.0}
    return found


def load_of(*steps: dict[str, float], **workers: int) -> ServiceLoad:
    load = ServiceLoad({name.replace("__", "."): count for name, count in workers.items()})
    for step in steps:
        load.observe(step)
    return load


def test_the_slowest_service_is_named_with_what_would_help() -> None:
    step = metrics(generation=(0.24, 0.0), reward=(0.96, 0.0), training=(0.2, 0.75))
    load = load_of(step, reward__workers=2)
    assert load.bottleneck() == (
        "reward is the slowest: it is busy 96% of the time, and training waits 75% for samples; reward.workers = 8 "
        "would help"
    )
    assert "would help" not in load_of(step).bottleneck(), "nothing is proposed where the number of workers is unknown"


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (
            metrics(generation=(0.3, 0.6), training=(0.9, 0.0)),
            "training is the slowest: it is busy 90% of the time, gen",
        ),
        (
            metrics(generation=(0.3, 0.6), training=(0.3, 0.6)),
            "no service is the slowest: generation is busy most, 30%",
        ),
        (metrics(evaluation=(0.9, 0.0), training=(0.3, 0.6)), "no service is the slowest: training"),
        ({"reward/mean": 0.5}, ""),
    ],
)
def test_what_a_run_waits_for(step: dict[str, float], told: str) -> None:
    found = load_of(step).bottleneck()
    assert found.startswith(told)
    assert bool(found) == bool(told)


def test_who_is_busy_and_who_waits_is_a_mean_over_the_last_steps() -> None:
    old = metrics(reward=(0.0, 1.0))
    new = [metrics(reward=(share, 0.5), training=(0.5, 0.0)) | {"perf/queued/reward": 3.0} for share in (0.2, 0.4)]
    load = load_of(*[old] * 9, *new * 3)
    busy, waits = load.lines()
    assert busy == "reward 32% busy, 3 queued, training 50% busy"
    assert waits == "reward 50% waits for work"
    assert load_of().lines() == []


def test_shares_are_those_of_services() -> None:
    assert shares_of({"time": 3.0, "time/reward/busy": 0.5, "reward/mean": 1.0}) == {"reward": {"busy": 0.5}}


def test_the_keys_of_workers_exist() -> None:
    config = Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p"}, "reward": {"workers": 3}})
    assert workers_of(config)["reward.workers"] == 3


def test_a_sparkline_has_the_width_that_there_is() -> None:
    assert sparkline([0.0, 0.5, 1.0], 8) == "▁▅█"
    assert sparkline([float(number) for number in range(100)], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, math.nan, 1.0], 8) == "▁▁"
    assert sparkline([], 8) == ""


def test_a_curve_of_any_length_keeps_its_shape() -> None:
    curve = LongCurve()
    assert curve.line(40) == ""
    for number in range(10_000):
        curve.add(number / 10_000)
    line = curve.line(20)
    assert len(line) == 20
    assert line.startswith("0.000 ▁")
    assert line[-7] == "█"
    assert len(curve._values) < LongCurve.MOST

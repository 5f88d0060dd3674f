"""The checkpoint with the best value of a metric outlives the rotation, a resume, and is found by commands."""

import json
from pathlib import Path

import pytest

from asyncrl.controller.journal.checkpoints import BestCheckpoint, chosen_model
from asyncrl.errors import ConfigError
from tests import golden

HELD_OUT = "eval/reward/mean"


def best_of(folder: Path, metric: str, values: dict[int, float] | None = None) -> BestCheckpoint:
    best = BestCheckpoint(folder / "best.json", metric)
    for version, value in (values or {}).items():
        best.note(version, {metric.removeprefix("-"): value})
    return best


def test_the_best_checkpoint_and_those_that_may_be_are_kept(tmp_path: Path) -> None:
    pending: list[int] = []
    best = best_of(tmp_path, HELD_OUT, {0: 0.1, 10: 0.9, 20: 0.5, 30: 0.9})
    best.pending = lambda: pending
    assert best.kept([0, 10, 20, 30]) == {30}, "the newest of equals"
    pending.append(40)
    assert best.kept([20, 30, 40]) == {30, 40}
    assert best.kept([40]) == {40}


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        (HELD_OUT, {10: 0.7 + 0.2 + 0.1, 20: 1.0, 30: 0.7 + 0.3}, 30),  # Equal but for rounding: the newest.
        (HELD_OUT, {10: 0.7 + 0.2 + 0.1, 20: 1.0, 30: 0.7 + 0.3, 40: 1.001, 50: 1.0}, 40),
        ("-eval/cost/mean", {10: 0.5, 20: 0.25, 30: 0.5}, 20),
    ],
)
def test_the_best_is_the_highest_or_behind_a_minus_the_lowest(
    metric: str, values: dict[int, float], best: int, tmp_path: Path
) -> None:
    assert best_of(tmp_path, metric, values).best([*values]) == best


def test_a_metric_of_steps_spares_checkpoints_whose_step_is_not_known_yet(tmp_path: Path) -> None:
    best = best_of(tmp_path, "reward/mean", {5: 0.5, 6: 0.25})
    assert not best.is_evaluated
    assert best.kept([5, 6, 7, 8]) == {5, 7, 8}


def test_without_a_metric_nothing_is_kept(tmp_path: Path) -> None:
    best = best_of(tmp_path, "")
    best.note(5, {"reward/mean": 0.5})
    best.write([5])
    assert best.kept([5, 6]) == set()
    assert list(tmp_path.iterdir()) == []


def test_a_resume_takes_the_values_of_checkpoints_that_it_goes_on_from(tmp_path: Path) -> None:
    best_of(tmp_path, "reward/mean", {10: 0.5, 20: 0.25, 30: 0.9}).write([10, 20, 30])
    found = json.loads((tmp_path / "best.json").read_text())
    assert (found["metric"], found["version"], found["value"]) == ("reward/mean", 30, 0.9)
    again = best_of(tmp_path, "reward/mean")
    again.restore(20)
    assert again.kept([10, 20]) == {10}
    other = best_of(tmp_path, "grad_norm")
    other.restore(30)
    assert other.values == {}


@pytest.mark.parametrize("step", ["newest", "best", "7"])
def test_a_checkpoint_that_is_not_there_is_named(step: str, tmp_path: Path) -> None:
    with golden.raises(ConfigError, step):
        chosen_model(tmp_path, step)

"""The checkpoint with the best value of a metric outlives the rotation, a resume, and is found by commands."""

import json
from pathlib import Path

import pytest

from asyncrl.controller.journal.checkpoints import BestCheckpoint, chosen_model
from asyncrl.errors import ConfigError


def test_the_best_checkpoint_and_those_that_may_be_are_kept(tmp_path: Path) -> None:
    pending: list[int] = []
    best = BestCheckpoint(tmp_path / "best.json", "eval/reward/mean", lambda: pending)
    for version, value in ((0, 0.1), (10, 0.9), (20, 0.5), (30, 0.9)):
        best.note(version, {"eval/reward/mean": value})
    assert best.kept([0, 10, 20, 30]) == {30}, "the newest of equals"
    pending.append(40)
    assert best.kept([20, 30, 40]) == {30, 40}
    assert best.kept([40]) == {40}


def test_a_value_that_is_higher_by_rounding_only_is_not_better(tmp_path: Path) -> None:
    best = BestCheckpoint(tmp_path / "best.json", "eval/reward/mean")
    for version, value in ((10, 0.7 + 0.2 + 0.1), (20, 1.0), (30, 0.7 + 0.3)):
        best.note(version, {"eval/reward/mean": value})
    assert best.best([10, 20, 30]) == 30, "the newest of equals, and not the version that nothing trained"
    best.note(40, {"eval/reward/mean": 1.001})
    assert best.best([10, 20, 30, 40]) == 40


def test_the_lowest_value_is_the_best_behind_a_minus(tmp_path: Path) -> None:
    best = BestCheckpoint(tmp_path / "best.json", "-eval/cost/mean")
    best.note(10, {"eval/cost/mean": 0.5})
    best.note(20, {"eval/cost/mean": 0.25})
    assert best.best([10, 20]) == 20


def test_a_metric_of_steps_spares_checkpoints_whose_step_is_not_known_yet(tmp_path: Path) -> None:
    best = BestCheckpoint(tmp_path / "best.json", "reward/mean")
    best.note(5, {"reward/mean": 0.5})
    best.note(6, {"reward/mean": 0.25})
    assert not best.is_evaluated
    assert best.kept([5, 6, 7, 8]) == {5, 7, 8}


def test_without_a_metric_nothing_is_kept(tmp_path: Path) -> None:
    best = BestCheckpoint(tmp_path / "best.json", "")
    best.note(5, {"reward/mean": 0.5})
    best.write([5])
    assert best.kept([5, 6]) == set()
    assert list(tmp_path.iterdir()) == []


def test_a_resume_takes_the_values_of_checkpoints_that_it_goes_on_from(tmp_path: Path) -> None:
    best = BestCheckpoint(tmp_path / "best.json", "reward/mean")
    for version, value in ((10, 0.5), (20, 0.25), (30, 0.9)):
        best.note(version, {"reward/mean": value})
    best.write([10, 20, 30])
    found = json.loads((tmp_path / "best.json").read_text())
    assert (found["metric"], found["version"], found["value"]) == ("reward/mean", 30, 0.9)
    again = BestCheckpoint(tmp_path / "best.json", "reward/mean")
    again.restore(20)
    assert again.kept([10, 20]) == {10}
    other = BestCheckpoint(tmp_path / "best.json", "grad_norm")
    other.restore(30)
    assert other.values == {}


def test_commands_name_a_checkpoint_by_its_step_or_as_the_best_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--step newest: write the number of a step, or best"):
        chosen_model(tmp_path, "newest")
    with pytest.raises(ConfigError, match="keeps no best checkpoint"):
        chosen_model(tmp_path, "best")
    with pytest.raises(ConfigError, match="has no checkpoint of step 7; there is none yet"):
        chosen_model(tmp_path, "7")

"""The quickstart learns, and what must not learn does not."""

import asyncio
import io
import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest

from asyncrl.config.sources import load
from asyncrl.controller.journal.audit import audit
from asyncrl.deploy.process.fork_client import Forks
from asyncrl.deploy.run_fleet import RunRequest
from asyncrl.deploy.run_setup import run
from asyncrl.telemetry.display import LineDisplay
from asyncrl.telemetry.jsonl import read_metrics
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.samples_file import read_samples

pytestmark = [pytest.mark.fleet, pytest.mark.slow]
LAST = 10
"""Steps whose mean reward counts as the reward at the end."""
WHOLE = load("quickstart").config.steps
SHORT = 120
"""Steps of the runs with other presets than the quickstart's."""
CONTROL = 80
"""Steps after which the quickstart has learnt most of it, and a run that does not train nothing."""


Train = Callable[..., RunDirectory]


@pytest.fixture
def train(quickstart_model: Path, forks: Forks, tmp_path: Path) -> Train:
    def trained(*flags: str, steps: int = SHORT) -> RunDirectory:
        keys = ["--model.name", str(quickstart_model), "--steps", str(steps)]
        config = load("quickstart", [*keys, *flags]).config
        display = LineDisplay(io.StringIO(), config.steps)
        directory = asyncio.run(run(RunRequest(config, tmp_path / "run", display, "the same", forks=forks)))
        assert audit(directory.path).ok, str(audit(directory.path))
        return directory

    return trained


def rewards(directory: RunDirectory) -> list[float]:
    return [line["reward/mean"] for line in read_metrics(directory.metrics)]


def held_out(directory: RunDirectory) -> list[float]:
    return [json.loads(line)["mean"] for line in directory.evaluations.read_text().splitlines()]


def test_quickstart_learns_and_generalizes_to_held_out_words(train: Train) -> None:
    directory = train(steps=WHOLE)
    assert fmean(rewards(directory)[:3]) <= 0.35
    assert fmean(rewards(directory)[CONTROL - LAST : CONTROL]) >= 0.7
    assert fmean(rewards(directory)[-LAST:]) >= 0.9
    before, *_, after = held_out(directory)
    assert before <= 0.35
    assert after >= 0.9
    lines = read_metrics(directory.metrics)
    assert all(line["staleness/max"] <= 2 for line in lines if "staleness/max" in line)
    canaries = [line["mismatch/canary"] for line in lines if "mismatch/canary" in line]
    assert len(canaries) > 0.5 * len(lines)
    assert max(canaries) < 1e-3
    unaccounted = {name for line in lines for name in line if name.endswith("/unaccounted")}
    assert unaccounted
    for name in unaccounted:
        assert abs(fmean(line[name] for line in lines if name in line)) <= 0.01, name


PPO = ("--algorithm.preset", "ppo")


def test_quickstart_learns_with_a_critic(train: Train) -> None:
    directory = train(*PPO)
    before, *_, after = held_out(directory)
    assert before <= 0.35
    assert after >= 0.85
    last = read_metrics(directory.metrics)[-LAST:]
    assert fmean(line["critic/value_mean"] for line in last) == pytest.approx(
        fmean(rewards(directory)[-LAST:]), abs=0.1
    )


def test_quickstart_learns_with_greedy_baselines_which_are_no_samples(train: Train) -> None:
    directory = train("--algorithm.preset", "remax", "--telemetry.samples_per_step", "all")
    before, *_, after = held_out(directory)
    assert before <= 0.35
    assert after >= 0.85
    members = load("quickstart").config.task.samples_per_prompt
    assert {record.member for record in read_samples(directory.samples)} == set(range(members))


@pytest.mark.parametrize(
    ("control", "steps"),
    [
        (("--training.learning_rate", "0"), CONTROL),
        (("--algorithm.shuffle_advantages", "true"), WHOLE),
        pytest.param((*PPO, "--algorithm.shuffle_advantages", "true"), SHORT, marks=pytest.mark.long),
    ],
    ids=["rate 0", "shuffled", "shuffled rewards of ppo"],
)
def test_control_run_does_not_learn(control: tuple[str, ...], steps: int, train: Train) -> None:
    directory = train(*control, steps=steps)
    assert fmean(rewards(directory)[-LAST:]) < 0.45
    assert held_out(directory)[-1] < 0.45

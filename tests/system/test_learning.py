"""The quickstart learns, and what must not learn does not."""

import asyncio
import io
import json
from pathlib import Path
from statistics import fmean

import pytest

from asyncrl.config.sources import load
from asyncrl.controller.journal.audit import audit
from asyncrl.deploy.run_setup import RunRequest, run
from asyncrl.telemetry.display import LineDisplay
from asyncrl.telemetry.metrics_file import read_metrics
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.samples_file import read_samples

pytestmark = [pytest.mark.fleet, pytest.mark.slow, pytest.mark.timeout(400)]
LAST = 10
"""Steps whose mean reward counts as the reward at the end."""


def trained(model: Path, run_dir: Path, *flags: str) -> RunDirectory:
    config = load("quickstart", ["--model.name", str(model), *flags]).config
    directory = asyncio.run(run(RunRequest(config, run_dir, LineDisplay(io.StringIO(), config.steps), "the same")))
    assert audit(directory.path).ok, str(audit(directory.path))
    return directory


def rewards(directory: RunDirectory) -> list[float]:
    return [line["reward/mean"] for line in read_metrics(directory.metrics)]


def held_out(directory: RunDirectory) -> list[float]:
    return [json.loads(line)["mean"] for line in directory.evaluations.read_text().splitlines()]


def test_quickstart_learns_and_generalizes_to_held_out_words(quickstart_model: Path, tmp_path: Path) -> None:
    directory = trained(quickstart_model, tmp_path / "run")
    assert fmean(rewards(directory)[:3]) <= 0.35
    assert fmean(rewards(directory)[-LAST:]) >= 0.9
    before, *_, after = held_out(directory)
    assert before <= 0.35
    assert after >= 0.9
    lines = read_metrics(directory.metrics)
    assert all(line["staleness/max"] <= 2 for line in lines if "staleness/max" in line)
    canaries = [line["mismatch/canary"] for line in lines if "mismatch/canary" in line]
    assert len(canaries) > 0.5 * len(lines)
    assert max(canaries) < 1e-3
    assert all(abs(share) <= 0.01 for line in lines for name, share in line.items() if name.endswith("/unaccounted"))


PPO = ("--algorithm.preset", "ppo", "--steps", "120")


def test_quickstart_learns_with_a_critic(quickstart_model: Path, tmp_path: Path) -> None:
    directory = trained(quickstart_model, tmp_path / "run", *PPO)
    before, *_, after = held_out(directory)
    assert before <= 0.35
    assert after >= 0.85
    last = read_metrics(directory.metrics)[-LAST:]
    assert fmean(line["critic/value_mean"] for line in last) == pytest.approx(
        fmean(rewards(directory)[-LAST:]), abs=0.1
    )


def test_quickstart_learns_with_greedy_baselines_which_are_no_samples(quickstart_model: Path, tmp_path: Path) -> None:
    flags = ("--algorithm.preset", "remax", "--steps", "120", "--telemetry.samples_per_step", "all")
    directory = trained(quickstart_model, tmp_path / "run", *flags)
    before, *_, after = held_out(directory)
    assert before <= 0.35
    assert after >= 0.85
    members = load("quickstart").config.task.samples_per_prompt
    assert {record.member for record in read_samples(directory.samples)} == set(range(members))


@pytest.mark.parametrize(
    "control",
    [
        ("--training.learning_rate", "0"),
        ("--algorithm.shuffle_advantages", "true"),
        (*PPO, "--algorithm.shuffle_advantages", "true"),
    ],
    ids=["rate 0", "shuffled", "shuffled rewards of ppo"],
)
def test_control_run_does_not_learn(control: tuple[str, str], quickstart_model: Path, tmp_path: Path) -> None:
    directory = trained(quickstart_model, tmp_path / "run", *control)
    assert fmean(rewards(directory)[-LAST:]) < 0.45
    assert held_out(directory)[-1] < 0.45

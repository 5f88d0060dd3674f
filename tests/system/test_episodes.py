"""Episodes on a whole fleet: the policy learns to use what an environment tells it, also when workers are killed."""

import json
import os
import signal
import sys
from pathlib import Path
from statistics import fmean

import pytest

from asyncrl.controller.journal.audit import audit

sys.path.insert(0, str(Path(__file__).parent))
from test_deaths import ended, running, until_step
from watching import pid_of

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(240)]

STEPS, WITHHELD_STEPS = 50, 15


def command(run_dir: Path, steps: int, file: str = "calculator") -> list[str]:
    flags = ["--steps", str(steps), "--evaluate.prompts=", "--run-dir", str(run_dir)]
    return [sys.executable, "-m", "asyncrl.deploy.cli", "run", file, *flags]


def metrics(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_policy_learns_to_call_a_calculator_while_workers_die(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with running(command(run_dir, STEPS)) as process:
        until_step(process, 4)
        os.kill(pid_of(run_dir, "environment"), signal.SIGKILL)
        until_step(process, 8)
        os.kill(pid_of(run_dir, "generation"), signal.SIGKILL)
        code, shown = ended(process)
    assert code == 0, shown
    log = (run_dir / "logs/controller.jsonl").read_text()
    assert "lost environment0.0" in log
    assert "lost generation0.0" in log
    steps = metrics(run_dir)
    assert fmean(step["reward/mean"] for step in steps[-5:]) > 0.8
    assert fmean(step["episodes/turns_mean"] for step in steps[-5:]) > 1.5
    assert all(step["staleness/max"] <= 2 for step in steps)
    report = audit(run_dir)
    assert report.ok, str(report)


def test_without_the_results_of_the_calculator_nothing_is_learnt(tmp_path: Path) -> None:
    run_dir, file = tmp_path / "run", tmp_path / "withheld.toml"
    shown = Path(__file__).parents[2].joinpath("asyncrl/experiments/calculator.toml").read_text()
    use = 'use = "calculator"'
    assert shown.count(f"\n{use}\n") == 1
    file.write_text(shown.replace(f"\n{use}\n", f"\n{use}\noptions = {{ withhold = true }}\n"))
    with running(command(run_dir, WITHHELD_STEPS, str(file))) as process:
        code, said = ended(process)
    assert code == 0, said
    assert max(step["reward/mean"] for step in metrics(run_dir)) < 0.2

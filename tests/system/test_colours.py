"""The experiment `colours`: a policy learns what it sees, with a reference, and its checkpoint goes on seeing."""

import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.controller.journal.audit import audit
from asyncrl.telemetry.jsonl import read_metrics

sys.path.insert(0, str(Path(__file__).parent))
from watching import PATIENCE

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.long,  # Runs in the job that has all extras, not beside the other fleets.
]
CLI = [sys.executable, "-m", "asyncrl.deploy.cli"]


def run(*arguments: str) -> str:
    done = subprocess.run([*CLI, *arguments], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_a_policy_learns_to_name_colours(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    folder = tmp_path / "run"
    run("run", "colours", "--run-dir", str(folder), "--algorithm.kl", "0.001", "--steps", "140")
    run("run", "colours", "--run-dir", str(folder), "--algorithm.kl", "0.001", "--steps", "150")
    metrics = read_metrics(folder / "metrics.jsonl")
    rewards = [each["reward/mean"] for each in metrics]
    assert len(rewards) == 150
    assert sum(rewards[:10]) / 10 < 0.4
    assert sum(rewards[-10:]) / 10 > 0.85
    assert max(abs(each["mismatch/canary"]) for each in metrics if "mismatch/canary" in each) < 1e-3
    assert audit(folder).ok
    assert "colour:" in run("samples", str(folder))
    run("export", str(folder), str(tmp_path / "exported"))
    assert (tmp_path / "exported" / "preprocessor_config.json").is_file()

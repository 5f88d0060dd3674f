"""asyncrl tune with real runs: interrupted, it goes on with the same command, and ends with a table and a report."""

import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.controller.journal.audit import audit
from asyncrl.telemetry.jsonl import read_metrics

sys.path.insert(0, str(Path(__file__).parent))
from watching import PATIENCE, wait_until

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="Optuna (extra `tune`) is not installed"),
]
CLI = [sys.executable, "-m", "asyncrl.deploy.cli", "tune"]
SEARCH = ("--search", "training.learning_rate=1e-5,1e-3", "--candidates", "2", "--keep", "2", "--seeds", "1")
SMALL = ("--stop-at", "4", "--task.prompts_per_step", "2", "--evaluate.prompts", "", "--training.schedule", "cosine")


def test_an_interrupted_search_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "search"
    command = [*CLI, "quickstart", *SEARCH, *SMALL, "--to", str(folder)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    output = folder / "own/seed-0.log"
    wait_until(lambda: output.exists() and "step 1/" in output.read_text(), "the first step")
    first.send_signal(signal.SIGTERM)
    _, complaint = first.communicate(timeout=PATIENCE)
    assert first.returncode == 130, complaint
    assert f"tune --to {folder}" in complaint

    # Three runs follow each other, of which each imports torch in four processes.
    done = subprocess.run([*CLI, "--to", str(folder)], capture_output=True, text=True, timeout=3 * PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "one seed cannot tell that from chance" in done.stdout
    steps = dict(re.findall(r"^ +(own|1|2) +(\d+) ", done.stdout, re.MULTILINE))
    assert sorted(steps.values()) == ["2", "4", "4"]
    assert steps["own"] == "4"
    runs = [folder / name / "seed-0" for name in ("own", "candidate-1", "candidate-2")]
    assert all(read_metrics(run / "metrics.jsonl")[-1]["step"] >= 2 for run in runs)
    for run in runs:
        assert audit(run).ok
    page = (folder / "report.html").read_text()
    assert len(page) < 5_000_000
    assert all(name in page for name in ("own values", "training.learning_rate=1e-05", "candidate 1"))

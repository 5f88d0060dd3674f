"""Whole runs whose weights cross a network, pairs of ranks or a folder, and whose generators are killed: the audit
holds, and so does the canary."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_deaths import audited, command, ended, last_metrics, running, until_step
from watching import dead, wait_until, workers_of

pytestmark = [pytest.mark.fleet, pytest.mark.kills, pytest.mark.usefixtures("programs")]

NO_EXACT_CANARY = 1e-3
"""Largest difference of log-probs with equal weights, in nats: float32 on one machine differs by some 1e-6."""

WAYS = {
    "tcp": ["--weights.transport", "tcp", "--weights.codec", "sparse", "--generation.replicas", "3"],
    "gloo": ["--weights.transport", "gloo", "--generation.replicas", "2"],
    "file": ["--weights.transport", "file", "--generation.replicas", "2"],
}


def canaries(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["mismatch/canary"] for line in lines if line.get("mismatch/canary") is not None]


def pid_of_any(run_dir: Path) -> int:
    """Waits until a generation worker runs, which may be one that was just started again. One that was killed may be
    listed still."""
    found: list[int] = []

    def runs() -> bool:
        workers = workers_of(run_dir).items()
        found.extend(pid for (service, _, _), pid in workers if service == "generation" and not dead(pid))
        return bool(found)

    wait_until(runs, "a generation worker that runs")
    return found[0]


@pytest.mark.parametrize("way", WAYS)
def test_a_run_goes_on_while_generators_are_killed_at_any_moment(
    way: str, quickstart_model: Path, tmp_path: Path
) -> None:
    """Kills come at steps, when new weights are on their way."""
    run_dir = tmp_path / "run"
    with running(command(quickstart_model, run_dir, *WAYS[way])) as process:
        for step in (3, 6, 9):
            until_step(process, step)
            os.kill(pid_of_any(run_dir), signal.SIGKILL)
        code, shown = ended(process)
    assert code == 0, shown
    assert last_metrics(run_dir)["staleness/max"] <= 2
    found = canaries(run_dir)
    assert found
    assert max(found) < NO_EXACT_CANARY
    audited(run_dir)
    assert not list(run_dir.glob("weights/*/*")), "files of weights were left"


def test_rounded_weights_show_in_the_canary(quickstart_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = ["--weights.transport", "tcp", "--weights.codec", "bfloat16"]
    with running(command(quickstart_model, run_dir, *flags, steps="4")) as process:
        code, shown = ended(process)
    assert code == 0, shown
    assert 1e-4 < max(canaries(run_dir)) < 0.5
    (log,) = (path for path in run_dir.glob("logs/generation*.jsonl") if "trace" not in path.name)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    errors = [line["error"] for line in lines if line["event"] == "weights fetched"]
    assert errors
    assert all(0 < error < 2**-8 for error in errors)
    audited(run_dir)

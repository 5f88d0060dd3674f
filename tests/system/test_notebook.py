"""A run in a notebook: its interrupt ends like Ctrl-C."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from torchless_runs import MARK, Run  # noqa: E402
from watching import PATIENCE, checkpoints_of  # noqa: E402

from asyncrl.telemetry.jsonl import read_metrics  # noqa: E402

pytestmark = pytest.mark.fleet


def test_an_interrupted_cell_ends_its_run_with_a_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, MARK: run.mark}
    with run.output.open("w") as output:
        command = [sys.executable, str(HERE / "notebook_cell.py"), str(run.directory)]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        run.until_step(process, 5)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0, run.shown
    finally:
        process.kill()
        process.wait(20)
    assert "ending with a checkpoint" in run.shown
    assert run.shown.endswith("the cell was interrupted\n")
    assert (
        max(checkpoints_of(run.directory))
        == max(line["version"] for line in read_metrics(run.directory / "metrics.jsonl"))
        >= 5
    )
    run.audited()
    run.leaves_nothing()

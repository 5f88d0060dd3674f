"""Commands to the quickstart while it trains: other numbers of generators, a pause, and an end with a checkpoint."""

import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.controller.journal.audit import audit
from asyncrl.controller.journal.journal import FIRST_BYTES
from asyncrl.telemetry.jsonl import read_metrics
from asyncrl.telemetry.run_status import read_status

sys.path.insert(0, str(Path(__file__).parent))
from programs import finished
from test_joining import CLI, events, program, steps_in
from watching import PATIENCE, wait_until, workers_of

pytestmark = [pytest.mark.fleet, pytest.mark.usefixtures("programs")]


def busy(run_dir: Path, worker: str) -> bool:
    status = read_status(run_dir / "status.json")
    return status is not None and any(each.name == worker and each.shares.get("busy", 0) > 0 for each in status.workers)


def is_paused(run_dir: Path) -> bool:
    status = read_status(run_dir / "status.json")
    return status is not None and status.paused


def in_flight(run_dir: Path) -> set[str]:
    """Returns the stages of samples that have not ended."""
    status = read_status(run_dir / "status.json")
    return set() if status is None else {*status.samples} - {"trained", "dropped"}


def check_resume(run_dir: Path, flags: list[str], shown: Path) -> None:
    """Checks that the run begins again with two reward workers, as it ended."""
    with program("run", "quickstart", *flags, output=shown) as run:
        wait_until(lambda: ("reward", 1, 0) in workers_of(run_dir), shown.read_text)
        assert run.wait(PATIENCE) == 0, shown.read_text()
    assert "reward begins with 2 workers, as `asyncrl scale` left it; its config says 1" in shown.read_text()
    assert "generation begins with" not in shown.read_text(), "its number is that of the config again"


def test_a_run_that_goes_on_takes_commands(quickstart_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shown = tmp_path / "run.out"

    def command(name: str, *flags: str) -> "subprocess.CompletedProcess[str]":
        return finished([*CLI, name, str(run_dir), *flags], timeout=PATIENCE)

    flags = ["--run-dir", str(run_dir), "--model.name", str(quickstart_model), "--evaluate.prompts="]
    with program("run", "quickstart", *flags, "--steps", "5000", output=shown) as run:
        wait_until(lambda: steps_in(shown) >= 2, shown.read_text)
        for wrong, why in (
            ("training=2", "training.layout"),
            ("generation=0", "out of range"),
            ("a=1", "no service"),
        ):
            refused = command("scale", wrong)
            assert (refused.returncode, why in refused.stderr) == (2, True), refused.stderr
        assert command("scale", "generation=2").stdout == "generation: 1 -> 2; generation1.0 start\n"
        wait_until(lambda: len(events(run_dir, "WorkerStarted")) == 2, shown.read_text)
        wait_until(lambda: busy(run_dir, "generation1.0"), "the new generator to work")
        reached = steps_in(shown)
        wait_until(lambda: steps_in(shown) >= reached + 2, shown.read_text)
        command("scale", "generation=1")
        wait_until(lambda: "has left: it finished what it had" in shown.read_text(), shown.read_text)
        wait_until(lambda: ("generation", 1, 0) not in workers_of(run_dir), "its process to end")
        assert command("pause").stdout.startswith("the run is paused: samples in flight")
        wait_until(lambda: is_paused(run_dir) and in_flight(run_dir) == {"ready"}, lambda: str(in_flight(run_dir)))
        reached = steps_in(shown)
        assert "The run is paused" in command("monitor", "--once").stdout
        assert "the run is paused already" in command("pause").stderr
        assert (steps_in(shown), in_flight(run_dir)) == (reached, {"ready"}), "nothing was trained or drawn"
        assert command("unpause").stdout == "the run goes on\n"
        wait_until(lambda: steps_in(shown) >= reached + 2, shown.read_text)
        assert any(line.get("perf/paused_s", 0) > 0 for line in read_metrics(run_dir / "metrics.jsonl"))
        assert command("scale", "reward=2").stdout == "reward: 1 -> 2; reward1.0 start\n"
        command("pause")
        assert command("stop").stdout == "the run ends with a checkpoint, after its running step\n"
        assert run.wait(PATIENCE) == 0, shown.read_text()
    assert FIRST_BYTES["attempt"] not in (run_dir / "journal").read_bytes(), "no group began again"
    check_resume(run_dir, [*flags, "--steps", str(steps_in(shown) + 3)], tmp_path / "again.out")
    assert audit(run_dir).ok

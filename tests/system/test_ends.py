"""The end of a fleet whose step takes an hour: its newest version is in a checkpoint before the processes end."""

import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from torchless_runs import Run
from watching import wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.kills, pytest.mark.usefixtures("programs")]
FLAGS = ("--fleet.grace", "1.5", "--training.checkpoint_every", "1000", "--steps", "1000")


def checkpoints(run: Run) -> list[int]:
    return sorted(int(path.name) for path in (run.directory / "checkpoints").iterdir() if path.name.isdecimal())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_a_step_of_an_hour_saves_the_newest_version(tmp_path: Path, number: signal.Signals) -> None:
    run = Run(tmp_path / "run", FLAGS)
    with run.running(slow=6) as process:
        run.until_step(process, 6)
        assert checkpoints(run) == [0]
        process.send_signal(number)
        assert process.wait(60) == 0, run.shown
    assert "the running step is undone: its samples wait for the next start" in run.shown
    assert checkpoints(run) == [0, 6], run.shown
    assert "stopped at step 6 of 1000; go on with" in run.shown
    run.leaves_nothing()
    run.audited()
    before = run.trained()
    run.goes_on(3)
    assert "resuming" in run.shown
    assert "at step 6 of 1000: " in run.shown, "no step is done again"
    after = run.trained()
    assert {version: after[version] for version in before} == before
    names = [key[:2] for samples in after.values() for key in samples]
    assert len(names) == len(set(names)), "nothing is trained twice"


def test_a_trainer_that_hears_nothing_is_abandoned_after_the_grace(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", FLAGS)
    with run.running(slow=3) as process:
        run.until_step(process, 3)
        os.kill(run.pid_of("training"), signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130, run.shown
    assert "neither ended nor undone within 1.5 s (fleet.grace) of the signal" in run.shown
    assert "the newest checkpoint is of step 0" in run.shown
    wait_until(lambda: not run.left(), lambda: f"the end of {run.left()}", 30.0)

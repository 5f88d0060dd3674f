"""A copy of a run's directory is a run of its own: it may begin while the original runs."""

import shutil
import signal
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from torchless_runs import Run  # noqa: E402
from watching import PATIENCE  # noqa: E402

pytestmark = [pytest.mark.fleet, pytest.mark.usefixtures("programs")]

# No checkpoint but the first: one must not be renamed while it is copied.
FOR_EVER = ("--steps", "1000000", "--training.checkpoint_every", "1000000")


def test_started_copy_of_a_run_directory_does_not_disturb_the_original(tmp_path: Path) -> None:
    original = Run(tmp_path / "original", FOR_EVER)
    copy = Run(tmp_path / "copy", FOR_EVER)
    with original.running() as process:
        original.until_step(process, 5)
        shutil.copytree(original.directory, copy.directory)
        with copy.running() as copied:
            copy.until_step(copied, 5)
            original.until_step(process, original.version + 5)
            copied.send_signal(signal.SIGINT)
            assert copied.wait(PATIENCE) == 0, copy.shown
        original.until_step(process, original.version + 5)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0, original.shown
    assert "lost" not in original.shown + copy.shown
    for run in (original, copy):
        run.audited()
        run.leaves_nothing()

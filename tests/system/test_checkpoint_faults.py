"""The controller and the trainer are killed at every point of a checkpoint; the same command goes on, and at eta = 0
every reward is what it would have been."""

import signal
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from commit_faults import FAULT_POINTS  # noqa: E402
from torchless_runs import Run  # noqa: E402

pytestmark = [pytest.mark.fleet, pytest.mark.kills, pytest.mark.usefixtures("programs")]

SYNCHRONOUS = ("--staleness.limit", "0")
WHILE_WRITING = ("asked", "model.bin", "state.bin")
DELETING = 4
"""The first checkpoint after which an older one is deleted."""
CONTROLLER_DIES_AT = dict.fromkeys(FAULT_POINTS, 0) | {"hinted": DELETING, "deleted": DELETING}
"""The first checkpoint, which has none before it, where that makes the harder case."""
Fault = tuple[str, str, int]


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("unharmed") / "run", SYNCHRONOUS)
    assert run.to_its_end() == 0, run.shown
    return run


def code_after(fault: Fault) -> int:
    """A run whose trainer dies comes to its end, where there is a checkpoint to go back to."""
    who, _, version = fault
    return -signal.SIGKILL if who == "controller" else 0 if version else 75


def harmed(run: Run, *faults: Fault) -> None:
    """Let the run meet these faults, one at each start, and then end."""
    for fault in faults:
        code = run.to_its_end(fault)
        assert code == code_after(fault), f"{fault} ended with {code}:\n{run.shown}"
        assert code or "the run goes on from its checkpoint of step" in run.shown, "the fault has met the run"
        run.audited()
        run.leaves_nothing()
    assert run.to_its_end() == 0, run.shown
    run.audited()
    run.leaves_nothing()


@pytest.mark.parametrize("point", FAULT_POINTS)
def test_run_killed_during_a_checkpoint_resumes_with_the_same_rewards(
    point: str, unharmed: Run, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run", SYNCHRONOUS)
    harmed(run, ("controller", point, CONTROLLER_DIES_AT[point]), ("training", point, 6))
    assert run.trained() == unharmed.trained()


@pytest.mark.parametrize("where", WHILE_WRITING)
def test_trainer_killed_while_writing_leaves_no_checkpoint_and_resumes_with_the_same_rewards(
    where: str, unharmed: Run, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run", SYNCHRONOUS)
    harmed(run, ("writing", where, 0), ("writing", where, 4))
    assert run.trained() == unharmed.trained()


def test_quickstart_killed_during_checkpoints_resumes_with_the_same_rewards(
    quickstart_model: Path, tmp_path: Path
) -> None:
    flags = [*SYNCHRONOUS, "--generation.deterministic", "true", "--model.name", str(quickstart_model), "--steps", "6"]
    flags += ["--training.checkpoint_every", "2", "--evaluate.prompts", ""]
    unharmed, run = (Run(tmp_path / name, flags, "quickstart", standins=False) for name in ("unharmed", "run"))
    assert unharmed.to_its_end() == 0, unharmed.shown
    harmed(run, ("controller", "described", 2), ("training", "synced", 4))
    assert run.trained() == unharmed.trained()

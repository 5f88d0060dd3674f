"""A rank of the trainer is killed while DeepSpeed shares out moments, or weights too, over two ranks: both start again
from the checkpoint, the other workers stay, and the run ends at its last step with every sample accounted for.
"""

import os
import re
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from asyncrl.controller.journal.audit import audit

sys.path.insert(0, str(Path(__file__).parent))
from programs import ended, running, until_step
from test_trainer_returns import OTHERS, STEPS, command, metrics
from watching import pid_of

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.usefixtures("programs"),
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        find_spec("deepspeed") is None, reason="DeepSpeed is not installed; scripts/test deepspeed installs it"
    ),
]

ZERO = ["--training.engine", "deepspeed", "--training.layout.dp", "2"]


@pytest.mark.parametrize(("stage", "killed"), [(1, 1), (3, 0)])
def test_a_run_outlives_the_death_of_a_rank_that_deepspeed_gave_a_share(
    stage: int, killed: int, quickstart_model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    flags = [*ZERO, "--training.deepspeed.stage", str(stage)]
    with running(command(quickstart_model, run_dir, *flags)) as process:
        shown = until_step(process, 2)
        before = {service: pid_of(run_dir, service) for service in OTHERS}
        shown += until_step(process, 7)
        os.kill(pid_of(run_dir, "training", killed), signal.SIGKILL)
        shown += until_step(process, 12)
        assert {service: pid_of(run_dir, service) for service in OTHERS} == before
        code, rest = ended(process)
    assert code == 0, shown + rest
    assert re.findall(r"training0\.(\d) died: killed by SIGKILL; the run goes on from", shown) == [str(killed)], shown
    last = metrics(run_dir)[-1]
    assert (last["step"], last["incarnation"]) == (STEPS, 1)
    report = audit(run_dir)
    assert report.ok, str(report)

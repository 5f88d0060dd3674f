"""A recorded run, replayed: the same build to the bit, a changed one with the step and the tensor where it differs."""

import os
import sys
from pathlib import Path

import pytest

from asyncrl.telemetry.samples_file import read_samples

sys.path.insert(0, str(Path(__file__).parent))
from programs import finished
from watching import PATIENCE

pytestmark = [pytest.mark.fleet, pytest.mark.usefixtures("programs")]

CHANGED = """
import sys
from asyncrl.deploy import cli
from asyncrl.engines.training.optimizer import Optimizer
step, calls = Optimizer.step, []

def changed(self, *args, **kwargs):
    calls.append(None)
    if len(calls) == 3:
        for parameter in self.parameters[-1:]:
            parameter.grad.mul_(1.5)
    return step(self, *args, **kwargs)

Optimizer.step = changed
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_recorded_run_is_replayed_and_a_change_is_found(quickstart_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    changed = tmp_path / "changed.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    changed.write_text(CHANGED)

    def asyncrl(*arguments: str, program: tuple[str, ...] = ("-m", "asyncrl.deploy.cli")) -> tuple[int, str]:
        done = finished([sys.executable, *program, *arguments], timeout=PATIENCE, env=environment)
        return done.returncode, done.stdout + done.stderr

    flags = ["--run-dir", str(run_dir), "--model.name", str(quickstart_model), "--evaluate.prompts=", "--steps", "6"]
    flags += ["--algorithm.preset", "ppo", "--algorithm.kl", "0.05", "--training.checkpoint_every", "2", "--record"]
    flags += ["--training.keep_checkpoints", "10"]
    status, shown = asyncrl("run", "quickstart", *flags)
    assert status == 0, shown
    samples = read_samples(run_dir / "samples.jsonl")
    assert samples
    assert all(len(each.token_advantages) == len(each.token_ids) > 0 for each in samples)
    for service in ("training", "critic", "reference", "reward"):
        status, shown = asyncrl("replay", str(run_dir), "--service", service)
        assert (status, "were compared: the same" in shown) == (0, True), shown
    status, shown = asyncrl("replay", str(run_dir), "--from", "5")
    assert (status, shown.count("tensors to the bit")) == (0, 2), shown
    assert f"from {run_dir}/checkpoints/4" in shown
    status, shown = asyncrl("replay", str(run_dir), program=(str(changed),))
    assert status == 1, shown
    assert "step 2: the same" in shown
    assert "step 3 differs, first in " in shown
    assert "step 4" not in shown
    status, shown = asyncrl("replay", str(run_dir), "--smallest", "4", "--when", "grad_norm > 0.001")
    assert (status, "with 1 of 8 groups" in shown) == (0, True), shown
    assert "model shards" not in shown
    assert b'"secret"' not in b"".join(path.read_bytes() for path in (run_dir / "recorded").iterdir())

"""Samples of one run, written to Parquet, are trained by another run, which samples nothing itself."""

import re
import sys
from pathlib import Path

import pytest

from asyncrl.controller.journal.audit import audit
from asyncrl.telemetry.jsonl import read_metrics
from asyncrl.telemetry.samples_file import SampleRecord, read_samples

sys.path.insert(0, str(Path(__file__).parent))
from programs import finished
from watching import PATIENCE

pytestmark = [pytest.mark.fleet, pytest.mark.usefixtures("programs")]


def asyncrl(*arguments: str) -> tuple[int, str]:
    done = finished([sys.executable, "-m", "asyncrl.deploy.cli", *arguments], timeout=PATIENCE)
    return done.returncode, done.stdout + done.stderr


def sampled(run_dir: Path) -> dict[tuple[str, int, tuple[int, ...]], tuple[float, ...]]:
    def key(record: SampleRecord) -> tuple[str, int, tuple[int, ...]]:
        return record.prompt, record.member, tuple(record.token_ids)

    return {key(record): tuple(record.token_logprobs) for record in read_samples(run_dir / "samples.jsonl")}


def test_stored_samples_are_trained_again(quickstart_model: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    second = tmp_path / "second"
    file = tmp_path / "samples.parquet"
    flags = ["--model.name", str(quickstart_model), "--evaluate.prompts=", "--telemetry.samples_per_step", "all"]
    lockstep = ("--staleness.limit", "0")  # Otherwise a sample may be late for its group, in the last step for good.
    status, shown = asyncrl("run", "quickstart", "--steps", "3", "--run-dir", str(first), *lockstep, *flags)
    assert status == 0, shown
    status, shown = asyncrl("samples", str(first), "--parquet", str(file))
    counted = re.match(r"(\d+) samples of (\d+) groups are in", shown)
    assert status == 0, shown
    assert counted, shown
    samples, groups = map(int, counted.groups())
    assert (samples, groups) == (384, 24)
    flags += ["--generation.stored_samples", str(file), "--task.prompts", str(file), "--seed", "5"]
    status, shown = asyncrl("run", "quickstart", "--steps", "4", "--run-dir", str(second), *flags)
    assert status == 0, shown
    stored = sampled(first)
    trained = sampled(second)
    assert len(trained) > 100
    assert trained.items() <= stored.items()
    assert audit(second).ok
    steps = read_metrics(second / "metrics.jsonl")
    assert all(abs(step["mismatch/kl"]) < 1 and step["grad_norm"] > 0 for step in steps)
    status, shown = asyncrl(
        "run", "quickstart", "--run-dir", str(tmp_path / "c"), *flags, "--task.samples_per_prompt", "32"
    )
    assert (status, f"{groups} of {groups} groups of" in shown) == (2, True), shown
    assert not (tmp_path / "c").exists()

"""Rewards of single tokens on a whole fleet: a critic credits them at their tokens, and GRPO compares their sums."""

import json
import os
import signal
import sys
from pathlib import Path
from statistics import fmean

import pytest

from asyncrl.controller.journal.audit import audit

sys.path.insert(0, str(Path(__file__).parent))
from test_deaths import ended, running, until_step

pytestmark = [pytest.mark.fleet, pytest.mark.usefixtures("programs")]

STEPS = 8
KILLED_AFTER = 2
ENDS = """
def ends(sample):
    rewards = [0.0] * sample.tokens
    rewards[0] += 1.0
    rewards[-1] -= 1.0
    return rewards
"""


def experiment(folder: Path, model: Path, preset: str, by_token: str = "true") -> list[str]:
    """Writes an experiment whose rewards of tokens add up to 0, and returns the command that runs it."""
    (folder / "mine.py").write_text(ENDS)
    file = folder / "ends.toml"
    file.write_text(
        f'name = "ends"\nsteps = {STEPS}\n[model]\nname = "{model}"\n'
        '[task]\nprompts = "asyncrl.tasks.builtin.reverse:training"\nprompts_per_step = 2\nsamples_per_prompt = 4\n'
        "max_prompt_tokens = 16\n[generation]\nslots = 16\nmax_new_tokens = 8\n"
        f'[algorithm]\npreset = "{preset}"\n{"gae_lambda = 1.0" if preset == "ppo" else ""}\n'
        f'[reward]\nfunctions = ["exact_match", {{ use = "mine.py:ends", by_token = {by_token} }}]\n'
        "[training]\ncheckpoint_every = 1\n[staleness]\nlimit = 4\n"
    )
    return [sys.executable, "-m", "asyncrl.deploy.cli", "run", str(file), "--run-dir", str(folder / "run")]


def checked_metrics(run_dir: Path) -> list[dict[str, float]]:
    """Returns the metrics of a run whose audit holds, and in which the rewards of tokens add up to 0."""
    report = audit(run_dir)
    assert report.ok, str(report)
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["step"] == STEPS
    for step in steps:
        assert step["reward/ends"] == 0
        assert step["reward/mean"] == pytest.approx(step["reward/exact_match"])
    return steps


def test_grpo_compares_the_sums(quickstart_model: Path, tmp_path: Path) -> None:
    with running(experiment(tmp_path, quickstart_model, "grpo")) as process:
        code, shown = ended(process)
    assert code == 0, shown
    checked_metrics(tmp_path / "run")


def test_a_critic_credits_tokens_also_in_a_resumed_run(quickstart_model: Path, tmp_path: Path) -> None:
    """Undiscounted returns of an answer of n tokens that reward its first with 1 and its last with -1 are 0, -1, ...,
    -1; were the sum credited at the end, all of them would be 0, and 1 in a correct answer."""
    run_dir = tmp_path / "run"
    with running(experiment(tmp_path, quickstart_model, "ppo")) as process:
        until_step(process, KILLED_AFTER)
        os.kill(process.pid, signal.SIGKILL)
    with running(experiment(tmp_path, quickstart_model, "ppo", by_token="false")) as process:
        code, shown = ended(process)
    assert code == 2, shown
    assert "reward.functions" in shown
    assert "it changes what the run learns" in shown
    with running(experiment(tmp_path, quickstart_model, "ppo")) as process:
        code, shown = ended(process)
    assert code == 0, shown
    assert "resuming" in shown
    returns = fmean(step["critic/return_mean"] - step["reward/mean"] for step in checked_metrics(run_dir))
    assert -1 < returns < -0.5

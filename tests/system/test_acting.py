"""A policy that acts on a whole fleet: every worker is killed, the run goes on or resumes, and the audit holds."""

import json
import os
import re
import signal
import sys
from pathlib import Path
from statistics import fmean

import pytest

from asyncrl.controller.journal.audit import audit
from asyncrl.telemetry.jsonl import read_lines, read_metrics
from asyncrl.telemetry.samples_file import read_samples

sys.path.insert(0, str(Path(__file__).parent))
from programs import ended, running, until_step
from watching import workers_of

pytestmark = [pytest.mark.fleet, pytest.mark.usefixtures("programs")]
ENVIRONMENTS = Path(__file__).parents[1] / "unit/engines/acting/line_walk.py"
EXPERIMENT = """
steps = {steps}
[acting]
env = "{env}"
algorithm = "{algorithm}"
hidden_size = [32]
environments = 4
transitions = 16
minibatch = 64
epochs = 4
warm_up = 64
[generation]
replicas = 2
[training]
learning_rate = 3e-3
checkpoint_every = 5
keep_best = "eval/return/mean"
[evaluate]
episodes = 5
every = 10
[staleness]
limit = 1
"""


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    """Returns the surviving lines: a step that the resume repeated counts once."""
    return [dict(line) for line in read_metrics(run_dir / "metrics.jsonl")]


def kill(run_dir: Path, service: str) -> int:
    """Kills all workers of a service; returns their number."""
    pids = [pid for (name, _, _), pid in workers_of(run_dir).items() if name == service]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return len(pids)


def evaluated_as_the_checkpoint(run_dir: Path) -> None:
    """Checks the evaluations of a run, and that its last checkpoint plays the same episodes again."""
    evaluations = list(read_lines(run_dir / "evaluations.jsonl"))
    assert evaluations[-1]["version"] == 60
    if evaluations[0]["version"] == 0:  # Else its worker was killed meanwhile, and version 0 was gone.
        assert evaluations[-1]["mean"] > evaluations[0]["mean"]
    assert json.loads((run_dir / "best.json").read_text())["metric"] == "eval/return/mean"
    with running([sys.executable, "-m", "asyncrl.deploy.cli", "evaluate", str(run_dir)]) as again:
        code, shown = ended(again)
    assert code == 0, shown
    assert shown.startswith(f"evaluated, version 60: return {evaluations[-1]['mean']:.5g} [")
    episodes = list(read_lines(run_dir / "evaluations" / "60.jsonl"))
    assert [line["episode"] for line in episodes] == [0, 1, 2, 3, 4]
    assert fmean(line["reward"] for line in episodes) == pytest.approx(evaluations[-1]["mean"])


@pytest.mark.parametrize(("env", "algorithm"), [("Walk", "ppo"), ("Push", "sac")])
def test_every_worker_is_killed_and_the_run_comes_to_its_end(env: str, algorithm: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    file = tmp_path / "acting.toml"
    file.write_text(EXPERIMENT.format(steps=60, env=f"{ENVIRONMENTS}:{env}", algorithm=algorithm))
    command = [sys.executable, "-m", "asyncrl.deploy.cli", "run", str(file), "--run-dir", str(run_dir)]
    with running(command) as process:
        until_step(process, 8)
        assert kill(run_dir, "generation") == 2
        assert kill(run_dir, "evaluation") == 1
        shown = until_step(process, 16)
        assert shown.count("lost generation") == 2
        kill(run_dir, "training")
        assert "training0.0 died: killed by SIGKILL; the run goes on" in until_step(process, 30)
        process.kill()
    assert audit(run_dir).ok, str(audit(run_dir))
    with running(command) as process:
        code, shown = ended(process)
    assert code == 0, shown
    assert "resuming" in shown
    assert audit(run_dir).ok, str(audit(run_dir))

    lines = metrics_of(run_dir)
    assert (lines[-1]["step"], lines[-1]["incarnation"]) == (60, 2)
    if algorithm == "ppo":  # SAC learns from transitions of any age.
        assert max(line.get("staleness/max", 0.0) for line in lines) <= 1
    # Each step has one group of 4 environments and 16 transitions, or a part of it; none was counted twice.
    assert lines[-1]["acting/transitions"] == sum(line["tokens/trained"] for line in lines) <= 60 * 64
    assert lines[-1]["acting/return_last20"] > lines[5]["acting/return_last20"]
    evaluated_as_the_checkpoint(run_dir)
    samples = read_samples(run_dir / "samples.jsonl")
    assert [len(each.transitions) for each in samples] == [16] * len(samples)
    assert samples[-1].transitions[0].keys() >= {"observation", "action", "logprob", "reward", "version"}
    assert re.match(r"16 transitions with a reward of -?[\d.e-]+; returns of episodes that ended: ", samples[-1].text)

"""Trains cases of `asyncrl-bench learning` in a child process, and summarises each run directory as a line of results.

    Case ──> values ── a line ──> child: training ── "done" ──> run directory ──> summary

One process trains one case after the other, so that torch and transformers are loaded once. The output of the runs goes
into a log file; a run that fails ends the process.
"""

import asyncio
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from asyncrl.bench.learning.grid import Case, Values
from asyncrl.bench.measured_runs import environment, train
from asyncrl.bench.measurements import MachineLoad
from asyncrl.config.sources import load
from asyncrl.engines.models.model_preparation import prepare
from asyncrl.telemetry.jsonl import read_lines, read_metrics
from asyncrl.telemetry.run_directory import RunDirectory

RUN_DEADLINE = 900.0
"""Seconds for a run: ten times the expected duration of the slowest case."""
WINDOW = 5
"""Steps whose mean reward must reach the goal: the reward of a single batch varies too much."""
POINTS = 20
"""Points stored of the curve of a run."""


class RunFailed(Exception):
    """Reports that a run failed or exceeded its deadline; the message holds the end of its log."""


class TrainingChild:
    """Starts the process for the first run, and again after a failed run. log: the file for the output of the runs."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def train(self, request: Mapping[str, Any], deadline: float) -> None:
        """Trains in the child. request: `values` of the config, and `run_dir`. Raises RunFailed when the run fails, or
        does not end within `deadline` seconds."""
        if self._process is None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            pipe = subprocess.PIPE
            command = [sys.executable, "-m", __name__]
            with self._log.open("w") as log:
                self._process = subprocess.Popen(
                    command, env=environment(1), stdin=pipe, stdout=pipe, stderr=log, text=True
                )
        requests = self._process.stdin
        answers = self._process.stdout
        assert requests is not None, "a pipe"
        assert answers is not None, "a pipe"
        print(json.dumps(request), file=requests, flush=True)
        done, _, _ = select.select([answers], [], [], deadline)
        if done and answers.readline() == "done\n":
            return
        self.close()
        reason = "the run failed" if done else f"the run did not end within {deadline:.0f} s"
        raise RunFailed(f"{reason}: {self._log.read_text(errors='replace').strip()[-1500:]}")

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def train_requests() -> None:
    """Serves as the child: trains each request on standard input."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        request = json.loads(line)
        train(request["values"], Path(request["run_dir"]))
        print("done", file=answers, flush=True)


# ---- one case --------------------------------------------------------------------------------------------


def run_case(case: Case, defaults: Values, goal: float, folder: Path, child: TrainingChild) -> dict[str, Any]:
    """Trains in a temporary directory below `folder`, from a warmed-up model that all runs of this task and seed share,
    and returns the summary. Raises RunFailed when the run fails or takes longer than RUN_DEADLINE."""
    folder.mkdir(parents=True, exist_ok=True)
    config = load(case.task, ["--seed", str(case.seed)]).config
    target = folder / "models" / f"{config.model.name.replace(':', '-')}-{case.seed}"
    model = asyncio.run(prepare(config, target, lambda text: None, RUN_DEADLINE))
    with tempfile.TemporaryDirectory(prefix="run-", dir=folder) as name:
        run_dir = Path(name) / "run"
        machine_load = MachineLoad()
        child.train({"values": config_values(case, defaults, model), "run_dir": str(run_dir)}, RUN_DEADLINE)
        directory = RunDirectory(run_dir)
        evaluations = list(read_lines(directory.evaluations))
        return summarise(read_metrics(directory.metrics), evaluations, goal, machine_load.others)


def config_values(case: Case, defaults: Values, model: Path) -> dict[str, Any]:
    """Returns the values of the config; the first and the last version are evaluated."""
    settings = case.settings(defaults)
    return {**settings, "model.name": str(model), "evaluate.every": settings["steps"]}


def summarise(
    lines: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], goal: float, others: float
) -> dict[str, Any]:
    """Summarises the lines of metrics.jsonl, one per step, and the evaluations, from version 0 to the last version.

    held_out_before, held_out: mean reward of the held-out prompts under version 0 and under the last version. cost:
    mean held-out cost of the last version, None without a cost. seconds_to_goal, steps_to_goal: until the mean reward
    of WINDOW steps reached the goal, None if it never did. seconds: of all steps, without the start of processes.
    trained_by_decile: share of the sampled tokens that trained, shortest answers first, mean over steps. masked: share
    of the tokens of a batch that were masked for their age; rejected: share of the others that a correction rejected.
    curve: (step, seconds, reward). others: share of the machine that other programs used during the run.
    """
    rewards = [task_reward(line) for line in lines]
    means = [fmean(rewards[max(0, end - WINDOW) : end]) for end in range(1, len(rewards) + 1)]
    reached = next((step for step, mean in enumerate(means) if step + 1 >= WINDOW and mean >= goal), None)
    seconds = [round(line["time"], 2) for line in lines]
    points = sorted({round(point * (len(lines) - 1) / (POINTS - 1)) for point in range(POINTS)})
    return {
        "steps": len(lines),
        "held_out_before": round(evaluations[0]["mean"], 4),
        "held_out": round(evaluations[-1]["mean"], 4),
        "held_out_stderr": round(evaluations[-1]["stderr"], 4),
        "cost": None if (cost := evaluations[-1].get("cost")) is None else round(cost, 4),
        "reward_first": round(rewards[0], 4),
        "reward_last": round(means[-1], 4),
        "seconds_to_goal": None if reached is None else seconds[reached],
        "steps_to_goal": None if reached is None else reached + 1,
        "seconds": seconds[-1],
        "staleness_mean": _mean_of(lines, "staleness/mean"),
        "staleness_max": max(line.get("staleness/max") or 0.0 for line in lines),
        "masked": _mean_of(lines, "staleness/masked_fraction"),
        "rejected": _mean_of(lines, "mask/rejected_fraction"),
        "mismatch_kl": _mean_of(lines, "mismatch/kl"),
        "mismatch_ess": _mean_of(lines, "mismatch/ess"),
        "length_last": round(fmean(line["completions/length_mean"] for line in lines[-WINDOW:]), 2),
        "trained_by_decile": trained_by_decile(lines),
        "curve": [(step + 1, seconds[step], round(means[step], 4)) for step in points],
        "others": round(others, 4),
    }


def task_reward(line: Mapping[str, Any]) -> float:
    """Returns the mean reward of a batch without the overlong penalty that the algorithm adds."""
    return float(line["reward/mean"] - line.get("reward/overlong", 0.0))


def trained_by_decile(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns the mean over the steps that report deciles; empty if no step does."""
    names = [f"staleness/trained_tokens/d{number}" for number in range(1, 11)]
    reporting = [line for line in lines if names[0] in line]
    return [_mean_of(reporting, name) for name in names] if reporting else []


def _mean_of(lines: Sequence[Mapping[str, Any]], name: str) -> float:
    """Returns the mean over the steps that have a value: a step without a trained token has no staleness."""
    known = [line[name] for line in lines if line.get(name) is not None]
    return round(fmean(known), 4) if known else 0.0


if __name__ == "__main__":
    train_requests()

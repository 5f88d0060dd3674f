"""Runs one case of `asyncrl-bench learning` by `asyncrl.train` in a child process, and summarises its run directory.

Case ──> arguments ──> child: asyncrl.train(**arguments) ──> run directory ──> CaseResult
"""

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from asyncrl.bench.learning.grid import Case, Values
from asyncrl.bench.learning.training_child import TrainingChild
from asyncrl.bench.measurements import MachineLoad
from asyncrl.config.sources import load
from asyncrl.engines.models.model_folder import prepare
from asyncrl.telemetry.jsonl import read_lines
from asyncrl.telemetry.metrics_file import read_metrics
from asyncrl.telemetry.run_directory import RunDirectory

RUN_DEADLINE = 900.0
"""Seconds for a run: ten times the expected duration of the slowest case."""
WINDOW = 5
"""Steps whose mean reward must reach the goal: the reward of a single batch varies too much."""
POINTS = 20
"""Points stored of the curve of a run."""
DECILES = 10


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Summarises a run.

    held_out_before, held_out: mean reward of the held-out prompts under version 0 and under the last version. cost:
    mean held-out cost of the last version, None without a cost. seconds_to_goal, steps_to_goal: until the mean reward
    of WINDOW steps reached the goal, None if it never did. seconds: of all steps, without the start of processes.
    trained_by_decile: share of the sampled tokens that trained, shortest answers first, mean over steps. masked: share
    of the tokens of a batch that were masked for their age; rejected: share of the others that a correction rejected.
    curve: (step, seconds, reward). others: share of the machine that other programs used during the run.
    """

    steps: int
    held_out_before: float
    held_out: float
    held_out_stderr: float
    cost: float | None
    reward_first: float
    reward_last: float
    seconds_to_goal: float | None
    steps_to_goal: int | None
    seconds: float
    staleness_mean: float
    staleness_max: float
    masked: float
    rejected: float
    mismatch_kl: float
    mismatch_ess: float
    length_last: float
    trained_by_decile: Sequence[float]
    curve: Sequence[tuple[int, float, float]]
    others: float


def run_case(case: Case, defaults: Values, goal: float, folder: Path, child: TrainingChild) -> CaseResult:
    """Trains in a temporary directory below `folder`.

    Raises:
        RunFailed: the run failed or took longer than RUN_DEADLINE.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = prepare_model(case, folder / "models")
    with tempfile.TemporaryDirectory(prefix="run-", dir=folder) as name:
        run_dir, machine_load = Path(name) / "run", MachineLoad()
        child.train(arguments(case, defaults, model, run_dir), RUN_DEADLINE)
        directory = RunDirectory(run_dir)
        evaluations = list(read_lines(directory.evaluations))
        return summarise(read_metrics(directory.metrics), evaluations, goal, machine_load.others)


def prepare_model(case: Case, folder: Path) -> Path:
    """Returns the folder of the warmed-up model from which all runs of this task and seed start; makes it if needed."""
    config = load(case.task, ["--seed", str(case.seed)]).config
    target = folder / f"{config.model.name.replace(':', '-')}-{case.seed}"
    return asyncio.run(prepare(config, target, lambda text: None, RUN_DEADLINE))


def arguments(case: Case, defaults: Values, model: Path, run_dir: Path) -> dict[str, Any]:
    """Returns the arguments of `asyncrl.train`; the first and the last version are evaluated."""
    settings = case.settings(defaults)
    named = {
        "model": str(model),
        "prompts": settings.pop("task.prompts"),
        "reward": settings.pop("reward.functions"),
        "algorithm": settings.pop("algorithm.preset", "grpo"),
        "steps": settings.pop("steps"),
        "staleness": settings.pop("staleness.limit"),
        "run_dir": str(run_dir),
    }
    del settings["model.name"]
    # The settings keep their dotted names: `algorithm` and `staleness` are arguments of their own.
    return {**named, **settings, "evaluate.every": named["steps"]}


def summarise(
    lines: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], goal: float, others: float
) -> CaseResult:
    """Summarises the lines of metrics.jsonl, one per step, and the evaluations, from version 0 to the last version."""
    rewards = [task_reward(line) for line in lines]
    means = [fmean(rewards[max(0, end - WINDOW) : end]) for end in range(1, len(rewards) + 1)]
    reached = next((step for step, mean in enumerate(means) if step + 1 >= WINDOW and mean >= goal), None)
    seconds = [round(line["time"], 2) for line in lines]
    points = sorted({round(point * (len(lines) - 1) / (POINTS - 1)) for point in range(POINTS)})
    return CaseResult(
        steps=len(lines),
        held_out_before=_rounded(evaluations[0]["mean"]),
        held_out=_rounded(evaluations[-1]["mean"]),
        held_out_stderr=_rounded(evaluations[-1]["stderr"]),
        cost=None if (cost := evaluations[-1].get("cost")) is None else _rounded(cost),
        reward_first=_rounded(rewards[0]),
        reward_last=_rounded(means[-1]),
        seconds_to_goal=None if reached is None else seconds[reached],
        steps_to_goal=None if reached is None else reached + 1,
        seconds=seconds[-1],
        staleness_mean=_mean_of(lines, "staleness/mean"),
        staleness_max=max(line.get("staleness/max") or 0.0 for line in lines),
        masked=_mean_of(lines, "staleness/masked_fraction"),
        rejected=_mean_of(lines, "mask/rejected_fraction"),
        mismatch_kl=_mean_of(lines, "mismatch/kl"),
        mismatch_ess=_mean_of(lines, "mismatch/ess"),
        length_last=round(fmean(line["completions/length_mean"] for line in lines[-WINDOW:]), 2),
        trained_by_decile=trained_by_decile(lines),
        curve=[(step + 1, seconds[step], _rounded(means[step])) for step in points],
        others=_rounded(others),
    )


def task_reward(line: Mapping[str, Any]) -> float:
    """Returns the mean reward of a batch without the overlong penalty that the algorithm adds."""
    return float(line["reward/mean"] - line.get("reward/overlong", 0.0))


def trained_by_decile(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns the mean over the steps that report deciles; empty if no step does."""
    names = [f"staleness/trained_tokens/d{number}" for number in range(1, DECILES + 1)]
    reporting = [line for line in lines if names[0] in line]
    return [_mean_of(reporting, name) for name in names] if reporting else []


def _mean_of(lines: Sequence[Mapping[str, Any]], name: str) -> float:
    """Returns the mean over the steps that have a value: a step without a trained token has no staleness."""
    known = [line[name] for line in lines if line.get(name) is not None]
    return _rounded(fmean(known)) if known else 0.0


def _rounded(value: float) -> float:
    return round(value, 4)

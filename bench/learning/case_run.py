"""One case of `asyncrl-bench learning`: a call of `asyncrl.train` in another process, and what came of it.

Case ──> arguments ──> child: asyncrl.train(**arguments) ──> run directory ──> Outcome
"""

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from asyncrl.bench.figures import Load
from asyncrl.bench.learning_child import Child
from asyncrl.bench.learning_grid import Case, Values
from asyncrl.models import prepare
from asyncrl.rundir import RunDirectory
from asyncrl.settings import load
from asyncrl.telemetry.lines import read_lines
from asyncrl.telemetry.metrics import read_metrics

PATIENCE = 900.0
"""Seconds a run may take: ten times what the slowest of the suite should."""
WINDOW = 5
"""Steps whose mean reward has to reach the goal: a single batch scatters too much."""
POINTS = 20
"""Of a run's curve that are kept."""
DECILES = 10


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is kept of a run.

    held_out_before, held_out: mean reward of the held-out prompts by version 0 and by the last. cost: of the last,
    None where nothing has a cost. seconds_to_goal, steps_to_goal: until the mean reward of WINDOW steps reached the
    goal, None when it never did; seconds: of all steps, the start of processes left out. trained_by_decile: share
    of the sampled tokens that trained, shortest answers first, mean over steps. masked: share of a batch's tokens
    left out for their age; rejected: of the others, by a correction. curve: (step, seconds, reward). others: share of
    the machine that other programs used meanwhile.
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


def run_case(case: Case, defaults: Values, goal: float, folder: Path, child: Child) -> Outcome:
    """Train in a directory of its own below `folder`, which is removed again.

    Raises:
        RunFailed: the run failed or took longer than PATIENCE.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = model_of(case, folder / "models")
    with tempfile.TemporaryDirectory(prefix="run-", dir=folder) as name:
        run_dir, load_seen = Path(name) / "run", Load()
        child.train(arguments(case, defaults, model, run_dir), PATIENCE)
        directory = RunDirectory(run_dir)
        evaluations = list(read_lines(directory.evaluations))
        return outcome_of(read_metrics(directory.metrics), evaluations, goal, load_seen.others)


def model_of(case: Case, folder: Path) -> Path:
    """The warmed-up model that every run of this task and seed starts from; made when it is not there yet."""
    config = load(case.task, ["--seed", str(case.seed)]).config
    target = folder / f"{config.model.name.replace(':', '-')}-{case.seed}"
    return asyncio.run(prepare(config, target, lambda text: None, PATIENCE))


def arguments(case: Case, defaults: Values, model: Path, run_dir: Path) -> dict[str, Any]:
    """Of `asyncrl.train`. The last version is evaluated, and the first."""
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
    # By their dotted names: `algorithm` and `staleness` are arguments of their own.
    return {**named, **settings, "evaluate.every": named["steps"]}


def outcome_of(
    lines: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], goal: float, others: float
) -> Outcome:
    """lines: of metrics.jsonl, one a step. evaluations: of version 0 first, of the last version last."""
    rewards = [task_reward(line) for line in lines]
    means = [fmean(rewards[max(0, end - WINDOW) : end]) for end in range(1, len(rewards) + 1)]
    reached = next((step for step, mean in enumerate(means) if step + 1 >= WINDOW and mean >= goal), None)
    seconds = [round(line["time"], 2) for line in lines]
    shown = sorted({round(point * (len(lines) - 1) / (POINTS - 1)) for point in range(POINTS)})
    return Outcome(
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
        curve=[(step + 1, seconds[step], _rounded(means[step])) for step in shown],
        others=_rounded(others),
    )


def task_reward(line: Mapping[str, Any]) -> float:
    """Mean reward of a step's batch without what the algorithm itself adds to it."""
    return float(line["reward/mean"] - line.get("reward/overlong", 0.0))


def trained_by_decile(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """Mean over the steps that tell it; empty when none does."""
    names = [f"staleness/trained_tokens/d{number}" for number in range(1, DECILES + 1)]
    telling = [line for line in lines if names[0] in line]
    return [_mean_of(telling, name) for name in names] if telling else []


def _mean_of(lines: Sequence[Mapping[str, Any]], name: str) -> float:
    """Of the steps in which it is a number: a step without a trained token has no staleness."""
    known = [line[name] for line in lines if line.get(name) is not None]
    return _rounded(fmean(known)) if known else 0.0


def _rounded(value: float) -> float:
    return round(value, 4)

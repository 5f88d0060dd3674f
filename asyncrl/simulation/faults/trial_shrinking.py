"""Makes a trial that fails smaller, as long as it fails in the same way."""

import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from asyncrl.simulation.faults.trial_execution import TrialRun
from asyncrl.simulation.faults.trial_plan import Trial

MOST_RUNS = 200
"""Smaller trials that are tried at most, which takes some seconds."""

SIMPLEST = Trial(groups=1, limit=0, slots=1, cut_at=None, steps=1, reward_time=0.0)
"""Shrinking sets the attributes of a trial to those of this one, except its seed and its faults."""


def kind_of(outcome: TrialRun | BaseException) -> str:
    """Returns the class of a failure and where it was raised, "" for a trial that held."""
    if isinstance(outcome, TrialRun):
        return ""
    frames = traceback.extract_tb(outcome.__traceback__)
    where = f" in {Path(frames[-1].filename).name}:{frames[-1].name}" if frames else ""
    return f"{type(outcome).__name__}{where}"


def shrink(trial: Trial, fails: Callable[[Trial], str]) -> Trial:
    """Returns the smallest trial found. It removes faults first, then simplifies one attribute after the other.

    fails: runs a trial; returns the kind of its failure, "" if it held.
    """
    kind, runs = fails(trial), 0
    assert kind, "a trial that holds cannot be shrunk"
    smaller = candidates(trial)
    while runs < MOST_RUNS and (each := next(smaller, None)) is not None:
        runs += 1
        if fails(each) == kind:
            trial, smaller = each, candidates(each)
    return trial


def candidates(trial: Trial) -> Iterator[Trial]:
    """Yields trials that are simpler in one way each, the greatest simplifications first."""
    count = len(trial.faults)
    for size in sorted({count // 2, 1} - {0}, reverse=True):
        for start in range(0, count, size):
            yield replace(trial, faults=trial.faults[:start] + trial.faults[start + size :])
    for name in (item.name for item in fields(trial)):
        value, simplest = getattr(trial, name), getattr(SIMPLEST, name)
        if value != simplest and name not in ("seed", "faults"):
            values: list[Any] = [simplest]
            if isinstance(value, int) and isinstance(simplest, int) and value - 1 > simplest:
                values.append(value - 1)
            yield from (replace(trial, **{name: simpler}) for simpler in values)
    for number, fault in enumerate(trial.faults):
        if fault.turns:
            simpler = replace(fault, turns=0)
            yield replace(trial, faults=(*trial.faults[:number], simpler, *trial.faults[number + 1 :]))

"""Makes a failing trial smaller, as long as it still fails in the same way."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from asyncrl.simulation.faults.trial_plan import Trial

Fails = Callable[[Trial], str]
"""Runs a trial; returns the kind of its failure, "" if it held."""

MOST_RUNS = 200
"""Smaller trials that are tried at most, which takes some seconds."""


def shrink(trial: Trial, fails: Fails) -> Trial:
    """Returns the smallest trial found. It removes faults first, then chance, then steps, groups and workers."""
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
    for name, simple in SIMPLE:
        if getattr(trial, name) != simple:
            yield replace(trial, **{name: simple})
    for name, least in LEAST:
        if getattr(trial, name) > least:
            yield replace(trial, **{name: getattr(trial, name) - 1})
    for number, fault in enumerate(trial.faults):
        if fault.turns:
            simpler = replace(fault, turns=0)
            yield replace(trial, faults=(*trial.faults[:number], simpler, *trial.faults[number + 1 :]))


SIMPLE: tuple[tuple[str, Any], ...] = (
    ("remote", False),
    ("reference", False),
    ("shape", "constant"),
    ("latency", 0.0),
    ("flip_time", 0.0),
    ("unscorable", 0.0),
    ("reward_time", 0.0),
    ("finish", "abandon"),
    ("cut_at", None),
    ("policy", "mask"),
)
LEAST = (("steps", 1), ("groups", 1), ("members", 2), ("generators", 1), ("scorers", 1), ("limit", 0), ("slots", 1))

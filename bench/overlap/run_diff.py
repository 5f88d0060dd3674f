"""`asyncrl-bench diff RUN_A RUN_B` says where the steps of B differ from those of A: in seconds of each state of each
service, in what follows from them, and in the keys of the config."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.bench.measurements import table
from asyncrl.bench.overlap.accounting import Overlap, overlap_of
from asyncrl.deploy.report.run_record import ACCOUNTED, RunRecord, read_run
from asyncrl.deploy.report.worker_trace import read_trace

SHOWN = 8
"""States with the largest differences that are shown."""
NOTICEABLE = 0.01
"""Share of a step of A from which a difference is shown."""


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench diff", description=__doc__)
    parser.add_argument("runs", type=Path, nargs=2, metavar="RUN_DIR", help="Name two run directories.")
    asked = parser.parse_args(arguments)
    runs = [read_run(path) for path in asked.runs]
    first, second = (overlap_of(run, read_trace(run.path / "logs")) for run in runs)
    print("\n".join([*differences(first, second), *changed_keys(*runs)]))


def differences(first: Overlap, second: Overlap) -> Iterator[str]:
    """Yields the numbers of both runs side by side, and the states that differ most."""
    yield table(("", first.name, second.name, "ratio"), [_row(*each) for each in _numbers(first, second)])
    longer = second.step - first.step
    yield f"a step of {second.name} takes {abs(longer):.3f} s {'more' if longer > 0 else 'less'}; by service and state:"
    mine = _seconds(first)
    other = _seconds(second)
    found = {key: other.get(key, 0.0) - mine.get(key, 0.0) for key in {**mine, **other}}
    shown = sorted(found, key=lambda key: -abs(found[key]))[:SHOWN]
    rows = [
        (*key, f"{mine.get(key, 0.0):.3f}", f"{other.get(key, 0.0):.3f}", f"{found[key]:+.3f}")
        for key in shown
        if abs(found[key]) > NOTICEABLE * first.step
    ]
    yield table(("service", "state", f"{first.name}, s", f"{second.name}, s", "s"), rows) if rows else "  nothing"


def changed_keys(first: RunRecord, second: RunRecord) -> Iterator[str]:
    """Yields the keys of the config that differ."""
    mine, other = (_flat(run.config.model_dump(mode="json")) for run in (first, second))
    changed = [key for key in mine if mine[key] != other.get(key)]
    yield f"{len(changed)} keys of the config differ{':' if changed else ''}"
    for key in changed:
        yield f"  {key}: {mine[key]!r}, {other.get(key)!r}"


def _numbers(first: Overlap, second: Overlap) -> Iterator[tuple[str, float, float]]:
    yield "seconds a step", first.step, second.step
    yield "trained tokens a second", first.tokens, second.tokens
    yield "overlap efficiency", first.efficiency, second.efficiency
    if first.bound_efficiency is not None and second.bound_efficiency is not None:
        yield "bound efficiency", first.bound_efficiency, second.bound_efficiency
    if first.both_ran is not None and second.both_ran is not None:
        yield "overlap fraction", first.both_ran, second.both_ran
    yield "bubble", first.bubble, second.bubble


def _row(name: str, mine: float, other: float) -> tuple[str, str, str, str]:
    return name, f"{mine:,.3f}", f"{other:,.3f}", f"{other / mine:.2f}" if mine else "-"


def _seconds(run: Overlap) -> dict[tuple[str, str], float]:
    """Returns the seconds of a step in each state of each service."""
    return {(name, state): shares[state] * run.step for name, shares in run.shares.items() for state in ACCOUNTED}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found

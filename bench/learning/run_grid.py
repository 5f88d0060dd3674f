"""Measures learning: runs a declared grid of cases on tiny models and writes docs/learning.md from their results.

    grid.toml ──> cases ──> asyncrl.train, one after the other ──> results/learning.jsonl ──> docs/learning.md, SVG

A case with a result is not run again, so that a grid of many hours can run in parts: --only task=quickstart limit=0,2
selects cases, and --minutes 20 starts no run that would end later. Two processes, each with --only and seeds of its
own, can share one file of results; --report writes the page. The expected duration is printed first.
"""

import argparse
import math
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from asyncrl.bench.learning.case_filter import FILTERS, CaseFilter, missing
from asyncrl.bench.learning.case_run import run_case
from asyncrl.bench.learning.grid import Case, Grid, read_grid
from asyncrl.bench.learning.report import write_report
from asyncrl.bench.learning.tables import held_out
from asyncrl.bench.learning.training_child import RunFailed, TrainingChild
from asyncrl.bench.measurements import table
from asyncrl.telemetry.jsonl import LineFile, read_lines

HERE = Path(__file__).resolve().parent
BENCH = HERE.parent
Results = dict[str, dict[str, Any]]
"""Lines of results by the key of their case."""
Parts = Mapping[str, Sequence[Case]]
"""Cases by the name of their table."""


def main(arguments: Sequence[str]) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    grid = read_grid(options.grid.read_text())
    results = read_results(options.results)
    try:
        selected = CaseFilter.of(options.only)
        selected.refuse_unknown(_all_parts(grid))
        selected.refuse_nothing(grid.parts(held_out(results)))
    except ValueError as error:
        parser.error(str(error))
    if not options.report:
        results = run(options, selected, grid, results)
    if not options.estimate:
        for path in write_report(grid, results, options.docs):
            print(f"written: {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("asyncrl-bench learning", description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--only",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE,...",
        help=f"select cases by KEY: {', '.join(FILTERS)}; repeated flags add up",
    )
    parser.add_argument("--minutes", type=float, help="start no run that would end later than in so many minutes")
    parser.add_argument("--runs", type=int, help="stop after so many runs")
    parser.add_argument("--again", action="store_true", help="run failed cases again")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--estimate", action="store_true", help="print the expected duration and run nothing")
    mode.add_argument("--report", action="store_true", help="write the documents from the results and run nothing")
    parser.add_argument("--grid", type=Path, default=HERE / "grid.toml")
    parser.add_argument("--results", type=Path, default=BENCH / "results/learning.jsonl")
    parser.add_argument("--docs", type=Path, default=BENCH.parent / "docs", help="folder for learning.md and its plots")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/learning"), help="folder for models and for the present run"
    )
    return parser


def read_results(path: Path) -> Results:
    """Reads the results; the last line of each key counts."""
    return {line["key"]: line for line in read_lines(path)}


def _all_parts(grid: Grid) -> Parts:
    """Returns all cases that --only may name, with the proof of every candidate of the search."""
    return {**grid.parts({}), "claim": [case for each in grid.claim.candidates for case in grid.claim.proof(each)]}


def run(options: argparse.Namespace, selected: CaseFilter, grid: Grid, results: Results) -> Results:
    """Runs the selected cases that have no result, and returns all results.

    Once the search for the setting of the claim is complete, the grid also holds the proof of that setting.
    """
    with (
        tempfile.TemporaryDirectory(prefix="asyncrl-learning-") as name,
        TrainingChild(Path(name) / "log.txt") as child,
    ):
        return _run_left(options, selected, grid, results, child)


def _run_left(
    options: argparse.Namespace, selected: CaseFilter, grid: Grid, results: Results, child: TrainingChild
) -> Results:
    again, budget = options.again, RunBudget(options.minutes, options.runs)
    while True:
        parts = selected.of_parts(grid.parts(held_out(results)))
        left = left_to_run(grid, parts, results, again)
        print("\n".join(estimate_lines(grid, parts, results, again)), flush=True)
        if options.estimate or not left:
            return results
        for key, case in left:
            if not budget.allows(expected_seconds(grid, case, results)):
                print(f"the budget does not allow {case}")
                return results
            results[key] = _run_case(key, case, grid, options, child)
        again = False


class RunBudget:
    """Limits the runs of one call: minutes from now, and a number of runs; None: no limit."""

    def __init__(self, minutes: float | None, runs: int | None) -> None:
        self._ends = time.monotonic() + 60 * minutes if minutes is not None else math.inf
        self._runs = math.inf if runs is None else runs

    def allows(self, seconds: float) -> bool:
        """Counts one more run and returns whether a run of so many seconds fits."""
        self._runs -= 1
        return self._runs >= 0 and time.monotonic() + seconds <= self._ends


def left_to_run(
    grid: Grid, parts: Mapping[str, Sequence[Case]], results: Results, again: bool
) -> list[tuple[str, Case]]:
    done = {key for key, line in results.items() if not (again and "failed" in line)}
    return list(missing([case for cases in parts.values() for case in cases], grid.defaults, dict.fromkeys(done)))


def _run_case(key: str, case: Case, grid: Grid, options: argparse.Namespace, child: TrainingChild) -> dict[str, Any]:
    """Runs a case and writes its line of results."""
    print(f"{datetime.now():%H:%M:%S} {case}: ", end="", flush=True)
    began = time.monotonic()
    wire = case.settings(grid.defaults).get("fleet.wire", "ipc")
    identity = {
        "key": key,
        "task": case.task,
        "limit": case.limit,
        "seed": case.seed,
        "wire": wire,
        "values": dict(case.values),
    }
    try:
        found: dict[str, Any] = asdict(run_case(case, grid.defaults, grid.goal, options.folder, child))
        print(f"held out {found['held_out_before']:.3f} -> {found['held_out']:.3f}", end="")
    except RunFailed as failed:
        found = {"failed": str(failed)}
        print(f"failed, {str(failed)[-300:]}", end="")
    took = round(time.monotonic() - began, 1)
    print(f", {took:.0f} s", flush=True)
    line = {**identity, "took": took, "date": f"{datetime.now():%Y-%m-%d}", "revision": _revision(), **found}
    file = LineFile(options.results)
    file.append(line)
    file.close()
    return line


def _revision() -> str:
    """Returns the commit of this checkout; empty outside a checkout."""
    command = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip()


# ---- expected duration ------------------------------------------------------------------------------------


def expected_seconds(grid: Grid, case: Case, results: Results) -> float:
    """Returns the mean duration of the runs of this task at this limit, or of this task, or the value of the grid."""
    for like in ({"task": case.task, "limit": case.limit}, {"task": case.task}):
        durations = [line["took"] for line in results.values() if like.items() <= line.items() and "failed" not in line]
        if durations:
            return fmean(durations)
    return grid.expected_seconds[case.task]


def estimate_lines(grid: Grid, parts: Parts, results: Results, again: bool = False) -> Iterable[str]:
    """Makes a table: the runs of each part, those without a result, and the hours for these."""
    rows, counted = [], dict[str, Case]()
    for name, cases in parts.items():
        left = dict(left_to_run(grid, {name: cases}, results, again))
        counted |= left
        hours = sum(expected_seconds(grid, case, results) for case in left.values()) / 3600
        rows.append((name, str(len({case.key(grid.defaults) for case in cases})), str(len(left)), f"{hours:.1f}"))
    hours = sum(expected_seconds(grid, case, results) for case in counted.values()) / 3600
    rows.append(("all, each once", "", str(len(counted)), f"{hours:.1f}"))
    return [table(("table", "runs", "left", "hours"), rows)]

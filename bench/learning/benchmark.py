"""Measures learning: runs a declared grid of cases on tiny models and writes docs/learning.md from their results.

    grid.toml ──> cases ──> asyncrl.train, one after the other ──> results/learning.jsonl ──> docs/learning.md, SVG

A case with a result is not run again, so that a grid of many hours can run in parts: --only task=quickstart limit=0,2
selects cases, and --minutes 20 starts no run that would end later. Two processes, each with --only and seeds of its
own, can share one file of results; --report writes the page. The expected duration is printed first.
"""

import argparse
import math
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from asyncrl.bench.learning.grid import Case, Grid, Line, Parts, Results, read_grid
from asyncrl.bench.learning.report_pages import write_pages
from asyncrl.bench.learning.training_runs import RunFailed, TrainingChild, run_case
from asyncrl.bench.measurements import at_least, table
from asyncrl.telemetry.jsonl import LineFile, read_lines

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1] if (HERE.parents[1] / "pyproject.toml").exists() else Path()
"""Folder of results and pages; the working directory of an installed package."""
FILTERS = ("table", "task", "row", "limit", "seed")
SEPARATOR = re.compile(r",(?! )")
"""Separates values; a comma before a space is part of the name of a row."""

CaseFilter = Mapping[str, frozenset[str]]
"""The wanted values by name of a filter; a filter that is not given selects every case."""


def main(arguments: Sequence[str]) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    grid = read_grid(options.grid.read_text())
    results = read_results(options.results)
    try:
        wanted = read_filter(options.only)
        check_filter(wanted, grid, results)
    except ValueError as error:
        parser.error(str(error))
    if not options.report:
        with (
            tempfile.TemporaryDirectory(prefix="asyncrl-learning-") as name,
            closing(TrainingChild(Path(name) / "log.txt")) as child,
        ):
            run_left(options, wanted, grid, results, child)
    if not options.estimate:
        for path in write_pages(grid, results, options.docs):
            print(f"written: {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("asyncrl-bench learning", description=__doc__.partition("\n\n")[0])
    only = f"select cases by KEY: {', '.join(FILTERS)}; repeated flags add up"
    parser.add_argument("--only", action="extend", nargs="+", default=[], metavar="KEY=VALUE,...", help=only)
    minutes = "start no run that would end later than in so many minutes"
    parser.add_argument("--minutes", type=float, default=math.inf, help=minutes)
    parser.add_argument("--runs", type=at_least(1), default=math.inf, help="stop after so many runs")
    parser.add_argument("--again", action="store_true", help="run failed cases again")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--estimate", action="store_true", help="print the expected duration and run nothing")
    mode.add_argument("--report", action="store_true", help="write the documents from the results and run nothing")
    parser.add_argument("--grid", type=Path, default=HERE / "grid.toml")
    parser.add_argument("--results", type=Path, default=CHECKOUT / "bench/results/learning.jsonl")
    parser.add_argument("--docs", type=Path, default=CHECKOUT / "docs", help="folder for learning.md and its plots")
    folder = "folder for models and for the present run"
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"), help=folder)
    return parser


def read_results(path: Path) -> dict[str, Line]:
    """Reads the results; the last line of each key counts."""
    return {line["key"]: line for line in read_lines(path)}


def run_left(
    options: argparse.Namespace, wanted: CaseFilter, grid: Grid, results: dict[str, Line], child: TrainingChild
) -> None:
    """Runs the selected cases that have no result, and adds their results. Once the search for the setting of the claim
    is complete, the grid also holds the proof of that setting."""
    again = options.again
    ends = time.monotonic() + 60 * options.minutes
    runs = options.runs
    while True:
        parts = select_cases(grid.parts(results), wanted)
        left = left_to_run(grid, parts, results, again)
        print(estimate(grid, parts, results, again), flush=True)
        if options.estimate or not left:
            return
        for key, case in left.items():
            runs -= 1
            if runs < 0 or time.monotonic() + expected_seconds(grid, case, results) > ends:
                print(f"the budget does not allow {case}")
                return
            results[key] = _run_case(key, case, grid, options, child)
        again = False


def left_to_run(grid: Grid, parts: Parts, results: Results, again: bool) -> dict[str, Case]:
    """Returns each run without a result once, by key. again: a failed run counts as one without a result."""
    found: dict[str, Case] = {}
    for case in [case for cases in parts.values() for case in cases]:
        key = case.key(grid.defaults)
        if key not in results or (again and "failed" in results[key]):
            found.setdefault(key, case)
    return found


def _run_case(key: str, case: Case, grid: Grid, options: argparse.Namespace, child: TrainingChild) -> Line:
    """Runs a case and writes its line of results."""
    print(f"{datetime.now():%H:%M:%S} {case}: ", end="", flush=True)
    began = time.monotonic()
    wire = case.settings(grid.defaults).get("fleet.wire", "ipc")
    line: dict[str, Any] = {"key": key, "task": case.task, "limit": case.limit, "seed": case.seed, "wire": wire}
    try:
        found = run_case(case, grid.defaults, grid.goal, options.folder, child)
        print(f"held out {found['held_out_before']:.3f} -> {found['held_out']:.3f}", end="")
    except RunFailed as failed:
        found = {"failed": str(failed)}
        print(f"failed, {str(failed)[-300:]}", end="")
    took = round(time.monotonic() - began, 1)
    print(f", {took:.0f} s", flush=True)
    line |= {"values": dict(case.values), "took": took, "date": f"{datetime.now():%Y-%m-%d}", "revision": _revision()}
    line |= found
    with closing(LineFile(options.results)) as file:
        file.append(line)
    return line


def _revision() -> str:
    """Returns the commit of this checkout; empty outside a checkout."""
    command = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()


# ---- selection by --only ----------------------------------------------------------------------------------


def read_filter(written: Sequence[str]) -> CaseFilter:
    """Reads `task=quickstart,longer`, `row=cap, token,cap, sequence` and the like. Raises ValueError for a name that is
    not one of FILTERS, and for a value that holds a second name."""
    wanted: dict[str, frozenset[str]] = {}
    for each in written:
        name, _, values = each.partition("=")
        if name not in FILTERS or not values:
            raise ValueError(f"--only {each}: write one of {', '.join(FILTERS)}, =, and values with commas")
        if joined := re.search(rf",({'|'.join(FILTERS)})=", values):
            separate = f"{name}={values[: joined.start()]} {values[joined.start() + 1 :]}"
            raise ValueError(f"--only {each}: separate names with a space, not a comma: --only {separate}")
        wanted[name] = wanted.get(name, frozenset()) | frozenset(SEPARATOR.split(values))
    return wanted


def check_filter(wanted: CaseFilter, grid: Grid, results: Results) -> None:
    """Raises ValueError for a value that no case of the grid can have, and for values that no case has all of."""
    known = [_filtered_values(part, case) for part, cases in grid.possible_parts().items() for case in cases]
    for name, values in wanted.items():
        choices = list(dict.fromkeys(each[name] for each in known))
        if unknown := sorted(values.difference(choices)):
            raise ValueError(f"--only {name}={','.join(unknown)}: choose from {', '.join(choices)}")
    if not select_cases(grid.parts(results), wanted):
        written = " ".join(f"{name}={','.join(sorted(values))}" for name, values in wanted.items())
        raise ValueError(f"--only {written}: no case of the grid has all these values")


def select_cases(parts: Parts, wanted: CaseFilter) -> dict[str, list[Case]]:
    """Returns the selected cases of each part, without parts that have none."""
    found: dict[str, list[Case]] = {}
    for part, cases in parts.items():
        for case in cases:
            filtered = _filtered_values(part, case)
            if all(filtered[name] in values for name, values in wanted.items()):
                found.setdefault(part, []).append(case)
    return found


def _filtered_values(table: str, case: Case) -> dict[str, str]:
    return {"table": table, "task": case.task, "row": case.row, "limit": str(case.limit), "seed": str(case.seed)}


# ---- expected duration ------------------------------------------------------------------------------------


def expected_seconds(grid: Grid, case: Case, results: Results) -> float:
    """Returns the mean duration of the runs of this task at this limit, or of this task, or the value of the grid."""
    for like in ({"task": case.task, "limit": case.limit}, {"task": case.task}):
        durations = [line["took"] for line in results.values() if like.items() <= line.items() and "failed" not in line]
        if durations:
            return fmean(durations)
    return grid.expected_seconds[case.task]


def estimate(grid: Grid, parts: Parts, results: Results, again: bool = False) -> str:
    """Makes a table: the runs of each part, those without a result, and the hours for these."""

    def hours(cases: dict[str, Case]) -> str:
        return f"{sum(expected_seconds(grid, case, results) for case in cases.values()) / 3600:.1f}"

    rows = []
    for name, cases in parts.items():
        left = left_to_run(grid, {name: cases}, results, again)
        rows.append((name, str(len({case.key(grid.defaults) for case in cases})), str(len(left)), hours(left)))
    left = left_to_run(grid, parts, results, again)
    return table(("table", "runs", "left", "hours"), [*rows, ("all, each once", "", str(len(left)), hours(left))])

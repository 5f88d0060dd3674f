"""Does it learn? A declared grid of runs on tiny models, one line of results a run, and docs/learning.md from them.

    learning.toml ──> cases ──> asyncrl.train, one after the other ──> results/learning.jsonl ──> docs/learning.md, SVG

What has a result is not run again, so a grid of many hours is done in pieces: --only task=quickstart limit=0,2, and
--minutes 20 begins no run that would last longer than that. Two of these side by side, each with --only and seeds of
its own, share one file of results; --report writes the page. How long everything takes is printed before it starts.
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

from asyncrl.bench.figures import table
from asyncrl.bench.learning_child import Child, RunFailed
from asyncrl.bench.learning_grid import FILTERS, Case, Grid, Only, missing, read_grid
from asyncrl.bench.learning_report import write_report
from asyncrl.bench.learning_run import run_case
from asyncrl.bench.learning_tables import held_out
from asyncrl.telemetry.lines import LineFile, read_lines

HERE = Path(__file__).resolve().parent
Results = dict[str, dict[str, Any]]
"""Lines of results by key of their case."""
Parts = Mapping[str, Sequence[Case]]
"""Cases by name of the table."""


def main(arguments: Sequence[str]) -> None:
    parser = _parser()
    asked = parser.parse_args(arguments)
    grid = read_grid(asked.grid.read_text())
    results = read_results(asked.results)
    try:
        only = Only.of(asked.only)
        only.refuse_unknown(_nameable(grid))
        only.refuse_nothing(grid.parts(held_out(results)))
    except ValueError as error:
        parser.error(str(error))
    if not asked.report:
        results = run(asked, only, grid, results)
    if not asked.estimate:
        for path in write_report(grid, results, asked.docs):
            print(f"written: {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("asyncrl-bench learning", description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--only",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE,...",
        help=f"KEY: {', '.join(FILTERS)}; repeated, what is named adds up",
    )
    parser.add_argument("--minutes", type=float, help="begin no run that would end later than that")
    parser.add_argument("--runs", type=int, help="end after so many")
    parser.add_argument("--again", action="store_true", help="run again what failed before")
    does = parser.add_mutually_exclusive_group()
    does.add_argument("--estimate", action="store_true", help="say how long everything takes, and run nothing")
    does.add_argument("--report", action="store_true", help="write the documents from the results, and run nothing")
    parser.add_argument("--grid", type=Path, default=HERE / "learning.toml")
    parser.add_argument("--results", type=Path, default=HERE / "results/learning.jsonl")
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs", help="folder of learning.md and its plots")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/learning"), help="of models, and runs while they last"
    )
    return parser


def read_results(path: Path) -> Results:
    """The last line of each key counts."""
    return {line["key"]: line for line in read_lines(path)}


def _nameable(grid: Grid) -> Parts:
    """All that may ever be asked for: the proof of each candidate, too, of which the search chooses one."""
    return {**grid.parts({}), "claim": [case for each in grid.claim.candidates for case in grid.claim.proof(each)]}


def run(asked: argparse.Namespace, only: Only, grid: Grid, results: Results) -> Results:
    """Run what is asked for and has no result. Returns all results.

    Once the search for the setting of the claim is complete, its proof is a part of the grid, so this looks again.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-learning-") as name, Child(Path(name) / "said.txt") as child:
        return _run(asked, only, grid, results, child)


def _run(asked: argparse.Namespace, only: Only, grid: Grid, results: Results, child: Child) -> Results:
    again, budget = asked.again, Budget(asked.minutes, asked.runs)
    while True:
        parts = only.of_parts(grid.parts(held_out(results)))
        left = left_to_run(grid, parts, results, again)
        print("\n".join(estimate_lines(grid, parts, results, again)), flush=True)
        if asked.estimate or not left:
            return results
        for key, case in left:
            if not budget.allows(expected_seconds(grid, case, results)):
                print(f"no time left for {case}")
                return results
            results[key] = _result(key, case, grid, asked, child)
        again = False


class Budget:
    """minutes from now, runs: None for as many as there are."""

    def __init__(self, minutes: float | None, runs: int | None) -> None:
        self._ends = time.monotonic() + 60 * minutes if minutes is not None else math.inf
        self._runs = math.inf if runs is None else runs

    def allows(self, seconds: float) -> bool:
        """Whether one more run of so many seconds fits; it is counted."""
        self._runs -= 1
        return self._runs >= 0 and time.monotonic() + seconds <= self._ends


def left_to_run(
    grid: Grid, parts: Mapping[str, Sequence[Case]], results: Results, again: bool
) -> list[tuple[str, Case]]:
    done = {key for key, line in results.items() if not (again and "failed" in line)}
    return list(missing([case for cases in parts.values() for case in cases], grid.defaults, dict.fromkeys(done)))


def _result(key: str, case: Case, grid: Grid, asked: argparse.Namespace, child: Child) -> dict[str, Any]:
    """Run a case and write its line."""
    print(f"{datetime.now():%H:%M:%S} {case}: ", end="", flush=True)
    began = time.monotonic()
    wire = case.settings(grid.defaults).get("fleet.wire", "ipc")
    told = {"key": key, "task": case.task, "limit": case.limit, "seed": case.seed, "wire": wire}
    told["values"] = dict(case.values)
    try:
        found: dict[str, Any] = asdict(run_case(case, grid.defaults, grid.goal, asked.folder, child))
        print(f"held out {found['held_out_before']:.3f} -> {found['held_out']:.3f}", end="")
    except RunFailed as failed:
        found = {"failed": str(failed)}
        print(f"failed, {str(failed)[-300:]}", end="")
    took = round(time.monotonic() - began, 1)
    print(f", {took:.0f} s", flush=True)
    line = {**told, "took": took, "date": f"{datetime.now():%Y-%m-%d}", "revision": _revision(), **found}
    file = LineFile(asked.results)
    file.append(line)
    file.close()
    return line


def _revision() -> str:
    """Of the checkout this lies in; empty when it is none."""
    command = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip()


# ---- how long it takes -----------------------------------------------------------------------------------


def expected_seconds(grid: Grid, case: Case, results: Results) -> float:
    """Mean of the runs of this task at this limit, or of this task, or what the grid expects."""
    for like in ({"task": case.task, "limit": case.limit}, {"task": case.task}):
        seen = [line["took"] for line in results.values() if like.items() <= line.items() and "failed" not in line]
        if seen:
            return fmean(seen)
    return grid.expected_seconds[case.task]


def estimate_lines(grid: Grid, parts: Parts, results: Results, again: bool = False) -> Iterable[str]:
    """A table: for each part its runs, those without a result, and the hours that these take."""
    rows, counted = [], dict[str, Case]()
    for name, cases in parts.items():
        left = dict(left_to_run(grid, {name: cases}, results, again))
        counted |= left
        hours = sum(expected_seconds(grid, case, results) for case in left.values()) / 3600
        rows.append((name, str(len({case.key(grid.defaults) for case in cases})), str(len(left)), f"{hours:.1f}"))
    hours = sum(expected_seconds(grid, case, results) for case in counted.values()) / 3600
    rows.append(("together, each once", "", str(len(counted)), f"{hours:.1f}"))
    return [table(("table", "runs", "left", "hours"), rows)]

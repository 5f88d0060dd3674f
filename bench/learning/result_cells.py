"""Gathers the results of the learning grid into cells, the runs of one row at one limit, from which pages are made."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from statistics import fmean, median
from typing import Any

from asyncrl.bench.learning.grid import Case, Grid, Line, Results, Table
from asyncrl.bench.measurements import LOADED, differences


@dataclass(frozen=True, slots=True)
class Cell:
    """Holds the runs of one row at one limit of one task by seed, with their synchronous runs if these exist."""

    row: str
    limit: int
    lines: Mapping[int, Line]
    synchronous: Mapping[int, Line]

    @property
    def rewards(self) -> list[float]:
        return [line["held_out"] for line in self.lines.values()]

    @property
    def costs(self) -> list[float]:
        """Returns the mean held-out cost of each run with costs."""
        return [line["cost"] for line in self.lines.values() if line.get("cost") is not None]

    @property
    def losses(self) -> list[float]:
        """Returns the loss of held-out reward against the synchronous run, seed by seed."""
        sides = (self.synchronous, self.lines)
        return differences(*({seed: line["held_out"] for seed, line in side.items()} for side in sides))

    @property
    def reached(self) -> int:
        """Counts the runs that reached the goal."""
        return sum(line["steps_to_goal"] is not None for line in self.lines.values())

    def to_goal(self, unit: str) -> float:
        """Returns the median of `steps` or `seconds` to the goal over all runs; infinite if half of them missed it."""
        found = [line[f"{unit}_to_goal"] for line in self.lines.values()]
        return float(median(math.inf if each is None else each for each in found))

    @property
    def pairs(self) -> list[tuple[Line, Line]]:
        """Returns each run with its synchronous run, if that exists."""
        return [(line, self.synchronous[seed]) for seed, line in self.lines.items() if seed in self.synchronous]

    @property
    def time_shares(self) -> list[float]:
        """Returns the seconds to the goal over those of the synchronous run, for pairs in which both reached it."""
        times = [[line["seconds_to_goal"] for line in pair] for pair in self.pairs]
        return [seconds / waited for seconds, waited in times if seconds is not None and waited is not None]

    @property
    def of_processes(self) -> bool:
        """Checks that each worker was a process: in a shared process, stages wait for each other."""
        return all(line["wire"] != "inproc" for line in self.lines.values())

    @property
    def trained_by_decile(self) -> list[float]:
        """Returns the mean over seeds; empty if no run was long enough. With a mask or a rejection, only lines with
        `rejected` count: the others do not hold the tokens that a correction rejects."""
        complete = [line for line in self.lines.values() if "rejected" in line or not _rejects_tokens(line["values"])]
        shares = [line["trained_by_decile"] for line in complete if line["trained_by_decile"]]
        return [fmean(of_decile) for of_decile in zip(*shares, strict=True)]

    @property
    def loaded(self) -> bool:
        """Checks whether other programs used much of the machine, or their share was not measured."""
        return any(line["others"] is None or line["others"] > LOADED for line in self.lines.values())


def _rejects_tokens(values: Mapping[str, Any]) -> bool:
    """Checks whether the correction of a row gives some tokens no weight."""
    return values.get("algorithm.correction") == "mask" or "algorithm.rejection" in values


def cells(grid: Grid, table: Table, task: str, results: Results) -> list[Cell]:
    """Returns the cells of one task that have runs, in the order of rows and limits, with those of controls."""
    found = list(_own_cells(grid, table, task, results))
    return found + (cells(grid, table.controls, task, results) if table.controls else [])


def _own_cells(grid: Grid, table: Table, task: str, results: Results) -> Iterator[Cell]:
    for row, limit in product(table.rows, table.limits):
        cases = {seed: Case(task, row, limit, seed, table.rows[row]) for seed in table.seeds}
        if lines := _successful(grid, cases, results):
            reference = {seed: table.synchronous_of(case) for seed, case in cases.items()}
            yield Cell(row, limit, lines, _successful(grid, reference, results))


def _successful(grid: Grid, cases: Mapping[int, Case], results: Results) -> dict[int, Line]:
    """Returns the results of successful runs under the numbers of their cases."""
    found = {number: results.get(case.key(grid.defaults), {"failed": ""}) for number, case in cases.items()}
    return {number: line for number, line in found.items() if "failed" not in line}


def ranking(grid: Grid, table: Table, results: Results) -> list[tuple[str, list[float]]]:
    """Returns complete rows, best first, with their held-out rewards of all tasks, limits and seeds."""
    found = []
    for row, values in table.rows.items():
        places = product(table.tasks, table.limits, table.seeds)
        cases = dict(enumerate(Case(task, row, limit, seed, values) for task, limit, seed in places))
        lines = _successful(grid, cases, results)
        if len(lines) == len(cases):
            found.append((row, [line["held_out"] for line in lines.values()]))
    return sorted(found, key=lambda each: -fmean(each[1]))


def results_in_grid(grid: Grid, results: Results) -> tuple[Results, int]:
    """Returns the results that count, because a changed setting voids others, and the number of runs of the grid."""
    keys = {case.key(grid.defaults) for cases in grid.parts(results).values() for case in cases}
    return {key: line for key, line in results.items() if key in keys}, len(keys)

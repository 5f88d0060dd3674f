"""Lines of results as rows of tables: what is shown of a row at one limit, and the verdicts on claims. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean, median
from typing import Any

from asyncrl.bench.learning_grid import SYNCHRONOUS, Candidate, Case, Grid, Table
from asyncrl.bench.paired import Spread, differences, recovered_share, spread, upper_bound

Line = Mapping[str, Any]
Results = Mapping[str, Line]
LOADED = 0.1
"""Share of the machine that others used, above which wall clock tells little."""
NO_WORSE = 0.03
"""Bound of the loss at limit 2 under which asynchrony is called no worse."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Runs of one row at one limit of one task, by seed; beside each its synchronous run, where that is there."""

    task: str
    row: str
    limit: int
    lines: Mapping[int, Line]
    synchronous: Mapping[int, Line]

    @property
    def held_out(self) -> dict[int, float]:
        return {seed: line["held_out"] for seed, line in self.lines.items()}

    @property
    def reward(self) -> Spread:
        return spread(list(self.held_out.values()))

    @property
    def costs(self) -> list[float]:
        """Mean held-out cost of each run that has costs."""
        return [line["cost"] for line in self.lines.values() if line.get("cost") is not None]

    @property
    def losses(self) -> list[float]:
        """Of held-out reward against the synchronous run, seed by seed."""
        return differences({seed: line["held_out"] for seed, line in self.synchronous.items()}, self.held_out)

    @property
    def reached(self) -> int:
        """Runs that reached the goal."""
        return sum(line["steps_to_goal"] is not None for line in self.lines.values())

    def to_goal(self, unit: str) -> float:
        """Median over all runs of `steps` or `seconds` to the goal; infinite when half of them never reached it."""
        found = [line[f"{unit}_to_goal"] for line in self.lines.values()]
        return float(median(math.inf if each is None else each for each in found))

    @property
    def pairs(self) -> list[tuple[Line, Line]]:
        """Each run that has its synchronous one, with it."""
        return [(line, self.synchronous[seed]) for seed, line in self.lines.items() if seed in self.synchronous]

    @property
    def time_shares(self) -> list[float]:
        """Seconds to the goal over those of the synchronous run, of the pairs in which both got there."""
        times = [[line["seconds_to_goal"] for line in pair] for pair in self.pairs]
        return [seconds / waited for seconds, waited in times if seconds is not None and waited is not None]

    @property
    def of_processes(self) -> bool:
        """Whether each worker was a process: in one, stages wait for each other, and wall clock says nothing."""
        return all(line["wire"] != "inproc" for line in self.lines.values())

    @property
    def trained_by_decile(self) -> list[float]:
        """Mean over seeds; empty when no run was long enough to tell. What a correction leaves out is known of lines
        with `rejected` alone."""
        told = [line for line in self.lines.values() if "rejected" in line or not _leaves_out(line["values"])]
        shares = [line["trained_by_decile"] for line in told if line["trained_by_decile"]]
        return [fmean(of_decile) for of_decile in zip(*shares, strict=True)]

    @property
    def loaded(self) -> bool:
        """Whether others used much of the machine, or nobody knows how much."""
        return any(line["others"] is None or line["others"] > LOADED for line in self.lines.values())


def _leaves_out(values: Mapping[str, Any]) -> bool:
    """Whether a correction of the row gives some tokens no weight."""
    return values.get("algorithm.correction") == "mask" or "algorithm.rejection" in values


def cells(grid: Grid, table: Table, task: str, results: Results) -> list[Cell]:
    """Of one task, in the order of the rows and then of the limits; without those of which no run is there."""
    found = list(_cells(grid, table, task, results))
    return found + (cells(grid, table.controls, task, results) if table.controls else [])


def _cells(grid: Grid, table: Table, task: str, results: Results) -> Iterator[Cell]:
    for row, values in table.rows.items():
        for limit in table.limits:
            cases = {seed: Case(task, row, limit, seed, values) for seed in table.seeds}
            if lines := found_lines(grid, cases, results):
                reference = {seed: synchronous_of(case, table) for seed, case in cases.items()}
                yield Cell(task, row, limit, lines, found_lines(grid, reference, results))


def synchronous_of(case: Case, table: Table) -> Case:
    """What a run is compared with: its own setting at limit 0, or the table's base where it has no such limit."""
    values = case.values if SYNCHRONOUS in table.limits else table.base
    return replace(case, limit=SYNCHRONOUS, values=values)


def found_lines(grid: Grid, cases: Mapping[int, Case], results: Results) -> dict[int, Line]:
    """Results under the numbers of their cases, of the runs that are there and did not fail."""
    told = {number: results.get(case.key(grid.defaults)) for number, case in cases.items()}
    return {number: line for number, line in told.items() if line is not None and "failed" not in line}


def held_out(results: Results) -> dict[str, float | None]:
    """Final held-out reward by key; None for a run that failed."""
    return {key: None if "failed" in line else line["held_out"] for key, line in results.items()}


# ---- as text ---------------------------------------------------------------------------------------------

HEAD = (
    *("", "η", "seeds", "held out", "loss against η = 0", "steps to the goal", "seconds to the goal"),
    *("of that at η = 0", "tokens trained by decile, %", "age"),
)


def columns(cell: Cell) -> tuple[str, ...]:
    """In the order of HEAD."""
    return (
        cell.row,
        str(cell.limit),
        str(cell.reward.seeds),
        reward_text(cell.reward) + (f", cost {fmean(cell.costs):.3f}" if cell.costs else ""),
        loss_text(cell),
        steps_text(cell),
        seconds_text(cell),
        shares_text(cell),
        " ".join(f"{100 * share:.0f}" for share in cell.trained_by_decile),
        f"{fmean(line['staleness_mean'] for line in cell.lines.values()):.2f}",
    )


def reward_text(seen: Spread) -> str:
    return f"{seen.mean:.3f}" if math.isnan(seen.deviation) else f"{seen.mean:.3f} ± {seen.deviation:.3f}"


def loss_text(cell: Cell) -> str:
    """Mean and one-sided 95 % bound; nothing for a synchronous run."""
    if cell.limit == SYNCHRONOUS or not cell.losses:
        return ""
    bound = upper_bound(cell.losses)
    return f"{fmean(cell.losses):+.3f}" + (f" (< {bound:+.3f})" if math.isfinite(bound) else "")


def steps_text(cell: Cell) -> str:
    """Median, and how many reached the goal when not all did."""
    return _goal_text(cell, f"{cell.to_goal('steps'):.0f}")


def seconds_text(cell: Cell) -> str:
    """The same in seconds; nothing where workers shared a process."""
    if not cell.of_processes:
        return ""
    return _goal_text(cell, f"{cell.to_goal('seconds'):.1f}" + ("*" if cell.loaded else ""))


def shares_text(cell: Cell) -> str:
    """Least to most of the pairs in which both runs got there, and of how many pairs when not of all."""
    if cell.limit == SYNCHRONOUS or not cell.of_processes or not (shares := cell.time_shares):
        return ""
    there, pairs = len(shares), len(cell.pairs)
    mixed = any(line["revision"] != synchronous["revision"] for line, synchronous in cell.pairs)
    told = f"{min(shares):.2f} to {max(shares):.2f}" + ("*" if mixed else "")
    return told + (f" ({there} of {pairs})" if there < pairs else "")


def _goal_text(cell: Cell, middle: str) -> str:
    runs = len(cell.lines)
    shown = "never" if math.isinf(cell.to_goal("steps")) else middle
    return shown + (f" ({cell.reached} of {runs})" if 0 < cell.reached < runs else "")


def ranking(grid: Grid, table: Table, results: Results) -> list[tuple[str, Spread]]:
    """Rows of which every run is there, best first, with their held-out reward over all tasks, limits and seeds."""
    found = []
    for row, values in table.rows.items():
        places = product(table.tasks, table.limits, table.seeds)
        cases = [Case(task, row, limit, seed, values) for task, limit, seed in places]
        lines = found_lines(grid, dict(enumerate(cases)), results)
        if len(lines) == len(cases):
            found.append((row, spread([line["held_out"] for line in lines.values()])))
    return sorted(found, key=lambda each: -each[1].mean)


# ---- claims ----------------------------------------------------------------------------------------------


def no_worse(cell: Cell, seeds: int) -> str:
    """Whether asynchrony with defaults costs no reward; only said when all pairs are there."""
    if len(cell.losses) < seeds:
        return f"not decided: {len(cell.losses)} of {seeds} pairs"
    bound = upper_bound(cell.losses)
    verdict = "holds" if bound < NO_WORSE else "does not hold"
    return f"{verdict}: mean loss {fmean(cell.losses):+.3f}, one-sided 95 % bound {bound:+.3f}, wanted under {NO_WORSE}"


def searched(grid: Grid, results: Results) -> list[tuple[str, str, str, str]]:
    """Of each candidate: name, runs that are there, held out when synchronous, loss at the large limit."""
    claim, found = grid.claim, []
    for candidate in claim.candidates:
        synchronous, stale = _both_ends(grid, claim.uncorrected_cases(candidate, claim.search_seeds), results)
        lost = differences(synchronous, stale)
        runs = f"{len(synchronous) + len(stale)} of {2 * len(claim.search_seeds)}"
        at_zero = f"{fmean(synchronous.values()):.3f}" if synchronous else ""
        found.append((candidate.name, runs, at_zero, f"{fmean(lost):+.3f}" if lost else ""))
    return found


def recovery(grid: Grid, candidate: Candidate, results: Results) -> str:
    """What the default correction gives back in the chosen setting."""
    claim = grid.claim
    synchronous, uncorrected = _both_ends(grid, claim.uncorrected_cases(candidate, claim.seeds), results)
    _, corrected = _both_ends(grid, claim.corrected_cases(candidate), results)
    there = len(synchronous.keys() & uncorrected.keys() & corrected.keys())
    if there < len(claim.seeds):
        return f"is not decided: {there} of {len(claim.seeds)} seeds"
    lost, share = differences(synchronous, uncorrected), recovered_share(synchronous, uncorrected, corrected)
    if fmean(lost) < claim.least_loss:
        return f"does not hold: with these seeds the uncorrected run loses {fmean(lost):+.3f} only"
    verdict = "holds" if share >= 0.5 else "does not hold"
    return f"{verdict}: of a loss of {fmean(lost):.3f} the default correction recovers {share:.0%}, wanted half"


def _both_ends(grid: Grid, cases: Sequence[Case], results: Results) -> tuple[dict[int, float], dict[int, float]]:
    """Held-out rewards by seed: synchronous, and at the large limit."""
    at = {
        limit: {case.seed: case for case in cases if case.limit == limit} for limit in (SYNCHRONOUS, grid.claim.limit)
    }
    lines = [found_lines(grid, by_seed, results) for by_seed in at.values()]
    synchronous, stale = ({seed: line["held_out"] for seed, line in found.items()} for found in lines)
    return synchronous, stale

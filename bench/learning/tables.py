"""Turns lines of results into rows of tables, and decides claims."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean, median
from typing import Any

from asyncrl.bench.learning.grid import SYNCHRONOUS, Candidate, Case, Grid, Table
from asyncrl.bench.learning.paired_statistics import Spread, differences, recovered_share, spread, upper_bound
from asyncrl.bench.measurements import LOADED

Line = Mapping[str, Any]
Results = Mapping[str, Line]
NO_WORSE = 0.03
"""Bound of the loss at limit 2 below which asynchrony counts as no worse."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Holds the runs of one row at one limit of one task by seed, with their synchronous runs if these exist."""

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
        """Returns the mean held-out cost of each run with costs."""
        return [line["cost"] for line in self.lines.values() if line.get("cost") is not None]

    @property
    def losses(self) -> list[float]:
        """Returns the loss of held-out reward against the synchronous run, seed by seed."""
        return differences({seed: line["held_out"] for seed, line in self.synchronous.items()}, self.held_out)

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
    """Returns the run to compare with: the same setting at limit 0, or the base of a table without limit 0."""
    values = case.values if SYNCHRONOUS in table.limits else table.base
    return replace(case, limit=SYNCHRONOUS, values=values)


def found_lines(grid: Grid, cases: Mapping[int, Case], results: Results) -> dict[int, Line]:
    """Returns the results of successful runs under the numbers of their cases."""
    found = {number: results.get(case.key(grid.defaults)) for number, case in cases.items()}
    return {number: line for number, line in found.items() if line is not None and "failed" not in line}


def held_out(results: Results) -> dict[str, float | None]:
    """Returns the final held-out reward by key; None for a failed run."""
    return {key: None if "failed" in line else line["held_out"] for key, line in results.items()}


# ---- as text ---------------------------------------------------------------------------------------------

HEAD = (
    *("", "η", "seeds", "held out", "loss against η = 0", "steps to the goal", "seconds to the goal"),
    *("of that at η = 0", "tokens trained by decile, %", "age"),
)


def columns(cell: Cell) -> tuple[str, ...]:
    """Returns the text of a cell in the order of HEAD."""
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


def reward_text(rewards: Spread) -> str:
    return f"{rewards.mean:.3f}" + ("" if math.isnan(rewards.deviation) else f" ± {rewards.deviation:.3f}")


def loss_text(cell: Cell) -> str:
    """Shows the mean and the one-sided 95 % bound; empty for a synchronous run."""
    if cell.limit == SYNCHRONOUS or not cell.losses:
        return ""
    bound = upper_bound(cell.losses)
    return f"{fmean(cell.losses):+.3f}" + (f" (< {bound:+.3f})" if math.isfinite(bound) else "")


def steps_text(cell: Cell) -> str:
    """Shows the median, and how many runs reached the goal if not all did."""
    return _goal_text(cell, f"{cell.to_goal('steps'):.0f}")


def seconds_text(cell: Cell) -> str:
    """Shows the median in seconds; empty if workers shared a process."""
    if not cell.of_processes:
        return ""
    return _goal_text(cell, f"{cell.to_goal('seconds'):.1f}" + ("*" if cell.loaded else ""))


def shares_text(cell: Cell) -> str:
    """Shows the range over pairs in which both runs reached the goal, and how many if not all did."""
    if cell.limit == SYNCHRONOUS or not cell.of_processes or not (shares := cell.time_shares):
        return ""
    reached, pairs = len(shares), len(cell.pairs)
    mixed = any(line["revision"] != synchronous["revision"] for line, synchronous in cell.pairs)
    shown = f"{min(shares):.2f} to {max(shares):.2f}" + ("*" if mixed else "")
    return shown + (f" ({reached} of {pairs})" if reached < pairs else "")


def _goal_text(cell: Cell, median_text: str) -> str:
    runs = len(cell.lines)
    shown = "never" if math.isinf(cell.to_goal("steps")) else median_text
    return shown + (f" ({cell.reached} of {runs})" if 0 < cell.reached < runs else "")


def ranking(grid: Grid, table: Table, results: Results) -> list[tuple[str, Spread]]:
    """Returns complete rows, best first, with their held-out reward over all tasks, limits and seeds."""
    found = []
    for row, values in table.rows.items():
        combinations = product(table.tasks, table.limits, table.seeds)
        cases = [Case(task, row, limit, seed, values) for task, limit, seed in combinations]
        lines = found_lines(grid, dict(enumerate(cases)), results)
        if len(lines) == len(cases):
            found.append((row, spread([line["held_out"] for line in lines.values()])))
    return sorted(found, key=lambda each: -each[1].mean)


# ---- claims ----------------------------------------------------------------------------------------------


def no_worse(cell: Cell, seeds: int) -> str:
    """Decides whether asynchrony with defaults loses reward; undecided until all pairs have results."""
    if len(cell.losses) < seeds:
        return f"not decided: {len(cell.losses)} of {seeds} pairs"
    bound = upper_bound(cell.losses)
    decision = "holds" if bound < NO_WORSE else "does not hold"
    mean_loss = f"mean loss {fmean(cell.losses):+.3f}, one-sided 95 % bound {bound:+.3f}"
    return f"{decision}: {mean_loss}, wanted under {NO_WORSE}"


def searched(grid: Grid, results: Results) -> list[tuple[str, str, str, str]]:
    """Returns name, number of runs, synchronous held-out reward and loss at the large limit of each candidate."""
    claim, found = grid.claim, []
    for candidate in claim.candidates:
        synchronous, stale = _rewards(grid, claim.uncorrected_cases(candidate, claim.search_seeds), results)
        lost = differences(synchronous, stale)
        runs = f"{len(synchronous) + len(stale)} of {2 * len(claim.search_seeds)}"
        at_zero = f"{fmean(synchronous.values()):.3f}" if synchronous else ""
        found.append((candidate.name, runs, at_zero, f"{fmean(lost):+.3f}" if lost else ""))
    return found


def recovery(grid: Grid, candidate: Candidate, results: Results) -> str:
    """Decides how much of the loss the default correction recovers in the chosen setting."""
    claim = grid.claim
    synchronous, uncorrected = _rewards(grid, claim.uncorrected_cases(candidate, claim.seeds), results)
    _, corrected = _rewards(grid, claim.corrected_cases(candidate), results)
    complete = len(synchronous.keys() & uncorrected.keys() & corrected.keys())
    if complete < len(claim.seeds):
        return f"is not decided: {complete} of {len(claim.seeds)} seeds"
    lost, share = differences(synchronous, uncorrected), recovered_share(synchronous, uncorrected, corrected)
    if fmean(lost) < claim.least_loss:
        return f"does not hold: with these seeds the uncorrected run loses {fmean(lost):+.3f} only"
    decision = "holds" if share >= 0.5 else "does not hold"
    return f"{decision}: of a loss of {fmean(lost):.3f} the default correction recovers {share:.0%}, wanted half"


def _rewards(grid: Grid, cases: Sequence[Case], results: Results) -> tuple[dict[int, float], dict[int, float]]:
    """Returns held-out rewards by seed: synchronous, and at the large limit."""
    by_limit = {
        limit: {case.seed: case for case in cases if case.limit == limit} for limit in (SYNCHRONOUS, grid.claim.limit)
    }
    lines = [found_lines(grid, by_seed, results) for by_seed in by_limit.values()]
    synchronous, stale = ({seed: line["held_out"] for seed, line in found.items()} for found in lines)
    return synchronous, stale

"""Writes docs/learning.md with its plots, and the page of full tables beside the results, from the results alone.

The text of the pages stands in summary_page.md.j2 and tables_page.md.j2; this file decides the claims and makes tables.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from asyncrl.bench.learning.grid import SYNCHRONOUS, Candidate, Case, Claim, Grid, Line, Results, Table
from asyncrl.bench.measurements import LOADED, differences, recovered_share, upper_bound
from asyncrl.experiments import experiments

# Gathers the results of the learning grid into cells, the runs of one row at one limit, from which pages are made.


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


# Draws the plots of docs/learning.md as SVG text from the cells of a grid; chart.svg.j2 holds their elements.


WIDTH = 640
HEIGHT = 360
LEFT = 56
RIGHT = 176
TOP = 34
BOTTOM = 44
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#000000", "#bb8866", "#777777", "#4444cc")
"""Colours that most people can tell apart (Paul Tol's scheme `bright`)."""

FOLDER = FileSystemLoader(Path(__file__).parent)
TEMPLATES = Environment(
    loader=FOLDER, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
)

Tick = tuple[float, str]
REWARD_TICKS: Sequence[Tick] = [(number / 5, f"{number / 5:g}") for number in range(6)]
DECILE_TICKS: Sequence[Tick] = [(number, f"d{number}") for number in range(1, 11)]


class Point(NamedTuple):
    """Places a point. whisker: its ends, if it has one."""

    x: float
    y: float
    whisker: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """Draws lines: points by name, in the order of x. ticks: positions with what is written there, the ends among them.
    The axis upwards is that of rewards and shares, from 0 to 1."""

    title: str
    across: str
    upwards: str
    x_ticks: Sequence[Tick]
    lines: Mapping[str, Sequence[Point]]

    def svg(self) -> str:
        first = self.x_ticks[0][0]
        last = self.x_ticks[-1][0]
        right = WIDTH - RIGHT
        bottom = HEIGHT - BOTTOM
        places = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": right, "top": TOP, "bottom": bottom}
        return TEMPLATES.get_template("chart.svg.j2").render(
            **places,
            chart=self,
            x=lambda value: round(LEFT + (value - first) / ((last - first) or 1) * (right - LEFT), 1),
            y=lambda value: round(bottom - value * (bottom - TOP), 1),
            reward_ticks=REWARD_TICKS,
            colours=COLOURS,
        )


# ---- charts of a table -----------------------------------------------------------------------------------


def plots(grid: Grid, results: Results) -> dict[str, str]:
    """Returns SVG text by `TABLE-TASK-WHAT`, of what has runs enough to draw."""
    found: dict[str, str] = {}
    for table in grid.tables:
        for task in table.tasks:
            own = [cell for cell in cells(grid, table, task, results) if cell.row in table.rows]
            for what, chart in _charts(table, task, own):
                found[f"{table.name}-{task}-{what}"] = chart.svg()
    return found


def _charts(table: Table, task: str, own: Sequence[Cell]) -> Iterator[tuple[str, Chart]]:
    limits = sorted({cell.limit for cell in own} | ({SYNCHRONOUS} if any(cell.synchronous for cell in own) else set()))
    if len(limits) > 2:
        yield "reward", _by_limit(table, task, own, limits)
    stale = [limit for limit in limits if limit != SYNCHRONOUS]
    for limit in (stale[0], stale[-1]) if len(table.limits) > 2 and stale else ():
        shares = {cell.row: cell.trained_by_decile for cell in own if cell.limit == limit and cell.trained_by_decile}
        if shares:
            lines = {row: [Point(*place) for place in enumerate(of_row, 1)] for row, of_row in shares.items()}
            title = f"{task}: tokens trained, η = {limit}"
            chart = Chart(title, "decile of answer length", "share of sampled tokens", DECILE_TICKS, lines)
            yield f"deciles-{limit}", chart
    if len(table.rows) == 1 and own:
        yield "curves", _curves(task, own)


def _by_limit(table: Table, task: str, own: Sequence[Cell], limits: Sequence[int]) -> Chart:
    """Draws limits side by side whatever lies between them."""
    lines: dict[str, list[Point]] = {}
    for cell in own:
        at_zero = [line["held_out"] for line in cell.synchronous.values()]
        points = lines.setdefault(cell.row, [])
        if not points and cell.limit != SYNCHRONOUS and at_zero:
            points.append(Point(limits.index(SYNCHRONOUS), fmean(at_zero), (min(at_zero), max(at_zero))))
        rewards = cell.rewards
        points.append(Point(limits.index(cell.limit), fmean(rewards), (min(rewards), max(rewards))))
    ticks = [(place, str(limit)) for place, limit in enumerate(limits)]
    title = f"{task}. {table.title}; mean and range over seeds"
    return Chart(title, "staleness limit η", "held-out reward", ticks, lines)


def _curves(task: str, own: Sequence[Cell]) -> Chart:
    """Draws for each limit the mean over its seeds, point by point: (step, seconds, reward)."""
    lines: dict[str, list[Point]] = {}
    for cell in own:
        points = zip(*(line["curve"] for line in cell.lines.values()), strict=True)
        lines[f"η = {cell.limit}"] = [Point(of_seeds[0][0], fmean(each[2] for each in of_seeds)) for of_seeds in points]
    longest = max(point.x for points in lines.values() for point in points)
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 500) if longest / step <= 10)
    return Chart(f"{task}: GRPO by staleness limit", "step", "reward of five steps", ticks_to(longest, step), lines)


def ticks_to(highest: float, step: int) -> list[Tick]:
    """Returns ticks at multiples of `step` from 0 to the first that is no less than `highest`, at least two."""
    return [(number * step, str(number * step)) for number in range(max(-int(-highest // step), 1) + 1)]


PLOTS = "learning"
"""Folder of the plots, beside docs/learning.md."""
TABLES = "bench/results/learning.md"
"""The page of full tables, seen from the folder above docs."""
NO_WORSE = 0.03
"""Bound of the loss at limit 2 below which asynchrony counts as no worse."""


def write_pages(grid: Grid, results: Results, docs: Path) -> list[Path]:
    """Writes docs/learning.md, its plots below docs/learning, and the full tables to TABLES; returns their paths."""
    drawn = plots(grid, results)
    texts = {
        docs / "learning.md": page("summary_page.md.j2", grid, results, list(drawn)),
        docs.parent / TABLES: page("tables_page.md.j2", grid, results, list(drawn)),
        **{docs / PLOTS / f"{name}.svg": chart for name, chart in drawn.items()},
    }
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return list(texts)


def page(template: str, grid: Grid, results: Results, drawn: Sequence[str]) -> str:
    """Returns the text of a page. drawn: names of the plots that exist."""
    counted, runs = results_in_grid(grid, results)
    dates = sorted({str(line["date"]) for line in counted.values()})
    tasks = {task: experiments()[task] for table in grid.tables for task in table.tasks}
    of_table = {
        table.name: {task: found for task in table.tasks if (found := cells(grid, table, task, results))}
        for table in grid.tables
    }
    constants = {"tables_page": TABLES, "plots_folder": PLOTS, "no_worse_bound": NO_WORSE, "loaded": LOADED}
    functions = {"by_task": _by_task, "by_row": _by_row, "beside": _beside, "own": _own, "full_table": _full_table}
    return TEMPLATES.get_template(template).render(
        **{**constants, **functions, "grid": grid, "results": results, "drawn": drawn, "tasks": tasks},
        counted=counted,
        runs=runs,
        when=f"run {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}" if dates else "none run yet",
        cells=of_table,
        findings=_findings(grid, of_table["defaults"]),
        chosen=grid.claim.chosen(results),
        recovery=recovery,
        missing=_missing(grid, results),
        ranking=partial(ranking, grid, results=results),
        search=_search(grid.claim, results),
        mean=fmean,
        markdown=_markdown,
    )


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table, or that there is nothing."""
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]]) if rows else "nothing"


# ---- docs/learning.md ------------------------------------------------------------------------------------


def _by_task(table: Table, found: dict[str, list[Cell]]) -> str:
    """Returns one line a task of a table that has a single row, and what the controls reached."""
    limits = [limit for limit in table.limits if limit != SYNCHRONOUS]
    head = ["task", "η = 0", *(f"loss at {limit} (bound)" for limit in limits), "steps to the goal", "controls"]
    return _markdown(head, [_task_line(task, of_task, table) for task, of_task in found.items()])


def _task_line(task: str, found: Sequence[Cell], table: Table) -> list[str]:
    own = {cell.limit: cell for cell in _own(table, found)}
    losses = {limit: cell.losses for limit, cell in sorted(own.items()) if limit != SYNCHRONOUS}
    return [
        task,
        f"{fmean(own[SYNCHRONOUS].rewards):.3f}" if SYNCHRONOUS in own else "",
        *(f"{fmean(lost):z.3f} ({upper_bound(lost):z.3f})" if lost else "" for lost in losses.values()),
        ", ".join(_steps_text(own[limit]) for limit in sorted(own)),
        _controls(table, found),
    ]


def _own(table: Table, found: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in found if cell.row in table.rows]


def _controls(table: Table, found: Sequence[Cell]) -> str:
    return ", ".join(f"{fmean(cell.rewards):.3f}" for cell in found if cell.row not in table.rows)


def _beside(table: Table, found: Sequence[Cell]) -> str:
    """Returns what a table by row is compared with: the synchronous reward, unless a row has it, and the controls."""
    own = _own(table, found)
    controls = _controls(table, found)
    synchronous = [line["held_out"] for cell in own for line in cell.synchronous.values()]
    alone = synchronous and all(cell.limit != SYNCHRONOUS for cell in own)
    compared = f", synchronous {fmean(synchronous):.3f}" if alone else ""
    return compared + (f", controls {controls}" if controls else "")


def _by_row(own: Sequence[Cell]) -> str:
    """Returns one line a row: its seconds where its workers were processes, else its losses, at each limit."""
    timed = all(cell.of_processes for cell in own)
    at = {(cell.row, cell.limit): _seconds_text(cell) if timed else _reward_or_loss(cell) for cell in own}
    limits = sorted({cell.limit for cell in own})
    synchronous = "0" if timed else "0, held out"
    head = ["seconds at η" if timed else "loss at η", *(str(limit) if limit else synchronous for limit in limits)]
    rows = dict.fromkeys(cell.row for cell in own)
    return _markdown(head, [[row, *(at.get((row, limit), "") for limit in limits)] for row in rows])


def _reward_or_loss(cell: Cell) -> str:
    shown = cell.rewards if cell.limit == SYNCHRONOUS or not cell.losses else cell.losses
    return f"{fmean(shown):z.3f}"


def _missing(grid: Grid, results: Results) -> list[tuple[str, str, str]]:
    """Returns table, task and count of the runs that are there, where some are not."""
    keys: dict[tuple[str, str], set[str]] = {}
    for name, cases in grid.parts(results).items():
        for case in cases:
            keys.setdefault((name, case.task), set()).add(case.key(grid.defaults))
    left = {place: wanted for place, wanted in keys.items() if not wanted <= results.keys()}
    return [(*place, f"{len(wanted & results.keys())} of {len(wanted)}") for place, wanted in left.items()]


# ---- claims ----------------------------------------------------------------------------------------------


def _findings(grid: Grid, found: dict[str, list[Cell]]) -> dict[str, list[str]]:
    """Returns the tasks of each finding whether asynchrony with its defaults loses reward."""
    (defaults,) = [table for table in grid.tables if table.name == "defaults"]
    findings: dict[str, list[str]] = {}
    for task in defaults.tasks:
        stale = [cell for cell in _own(defaults, found.get(task, [])) if cell.limit == 2]
        finding = no_worse(stale[0], len(defaults.seeds)) if stale else "not run"
        findings.setdefault(finding.partition(": mean")[0], []).append(task)
    return findings


def no_worse(cell: Cell, seeds: int) -> str:
    """Decides whether asynchrony with defaults loses reward; undecided until all pairs have results."""
    if len(cell.losses) < seeds:
        return f"not decided: {len(cell.losses)} of {seeds} pairs"
    bound = upper_bound(cell.losses)
    decision = "holds" if bound < NO_WORSE else "does not hold"
    mean_loss = f"mean loss {fmean(cell.losses):+.3f}, one-sided 95 % bound {bound:+.3f}"
    return f"{decision}: {mean_loss}, wanted under {NO_WORSE}"


def recovery(claim: Claim, candidate: Candidate, results: Results) -> str:
    """Decides how much of the loss the default correction recovers in the chosen setting."""
    synchronous, uncorrected = claim.rewards(claim.uncorrected_cases(candidate, claim.seeds), results)
    _, corrected = claim.rewards(claim.corrected_cases(candidate), results)
    complete = len(synchronous.keys() & uncorrected.keys() & corrected.keys())
    if complete < len(claim.seeds):
        return f"is not decided: {complete} of {len(claim.seeds)} seeds"
    lost = differences(synchronous, uncorrected)
    share = recovered_share(synchronous, uncorrected, corrected)
    if fmean(lost) < claim.least_loss:
        return f"does not hold: with these seeds the uncorrected run loses {fmean(lost):+.3f} only"
    decision = "holds" if share >= 0.5 else "does not hold"
    return f"{decision}: of a loss of {fmean(lost):.3f} the default correction recovers {share:.0%}, wanted half"


def _search(claim: Claim, results: Results) -> str:
    """Returns for each candidate its runs, the synchronous held-out reward and the loss at the large limit."""
    rows = []
    for candidate in claim.candidates:
        synchronous, stale = claim.rewards(claim.uncorrected_cases(candidate, claim.search_seeds), results)
        lost = differences(synchronous, stale)
        runs = f"{len(synchronous) + len(stale)} of {2 * len(claim.search_seeds)}"
        at_zero = f"{fmean(synchronous.values()):.3f}" if synchronous else ""
        rows.append((candidate.name, runs, at_zero, f"{fmean(lost):+.3f}" if lost else ""))
    return _markdown(("candidate", "runs", "held out, η = 0", f"loss, η = {claim.limit}"), rows)


# ---- full tables -----------------------------------------------------------------------------------------

HEAD = (
    *("", "η", "seeds", "held out", "loss against η = 0", "steps to the goal", "seconds to the goal"),
    *("of that at η = 0", "tokens trained by decile, %", "age"),
)


def _full_table(found: Sequence[Cell]) -> str:
    before = fmean(line["held_out_before"] for cell in found for line in cell.lines.values())
    return f"Held out before training: {before:.3f}.\n\n" + _markdown(HEAD, [columns(cell) for cell in found])


def columns(cell: Cell) -> tuple[str, ...]:
    """Returns the text of a cell in the order of HEAD."""
    spread = f" ± {stdev(cell.rewards):.3f}" if len(cell.rewards) > 1 else ""
    cost = f", cost {fmean(cell.costs):.3f}" if cell.costs else ""
    return (
        cell.row,
        str(cell.limit),
        str(len(cell.rewards)),
        f"{fmean(cell.rewards):.3f}{spread}{cost}",
        _loss_text(cell),
        _steps_text(cell),
        _seconds_text(cell, "*" if cell.loaded else "") if cell.of_processes else "",
        _shares_text(cell),
        " ".join(f"{100 * share:.0f}" for share in cell.trained_by_decile),
        f"{fmean(line['staleness_mean'] for line in cell.lines.values()):.2f}",
    )


def _loss_text(cell: Cell) -> str:
    """Shows the mean and the one-sided 95 % bound; empty for a synchronous run."""
    if cell.limit == SYNCHRONOUS or not cell.losses:
        return ""
    bound = upper_bound(cell.losses)
    return f"{fmean(cell.losses):+.3f}" + (f" (< {bound:+.3f})" if math.isfinite(bound) else "")


def _steps_text(cell: Cell) -> str:
    return _goal_text(cell, f"{cell.to_goal('steps'):.0f}")


def _seconds_text(cell: Cell, star: str = "") -> str:
    return _goal_text(cell, f"{cell.to_goal('seconds'):.1f}{star}")


def _goal_text(cell: Cell, median_text: str) -> str:
    """Shows the median, and how many runs reached the goal if not all did."""
    runs = len(cell.lines)
    shown = "never" if math.isinf(cell.to_goal("steps")) else median_text
    return shown + (f" ({cell.reached} of {runs})" if 0 < cell.reached < runs else "")


def _shares_text(cell: Cell) -> str:
    """Shows the range over pairs in which both runs reached the goal, and how many if not all did."""
    if cell.limit == SYNCHRONOUS or not cell.of_processes or not (shares := cell.time_shares):
        return ""
    mixed = any(line["revision"] != synchronous["revision"] for line, synchronous in cell.pairs)
    shown = f"{min(shares):.2f} to {max(shares):.2f}" + ("*" if mixed else "")
    return shown + (f" ({len(shares)} of {len(cell.pairs)})" if len(shares) < len(cell.pairs) else "")

"""Draws the plots of docs/learning.md as SVG text from the cells of a grid; chart.svg.j2 holds their elements."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from asyncrl.bench.learning.grid import SYNCHRONOUS, Grid, Results, Table
from asyncrl.bench.learning.result_cells import Cell, cells

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

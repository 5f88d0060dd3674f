"""Draws the plots of docs/learning.md as SVG text from the cells of a grid: lines with whiskers, ticks, a legend."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean
from typing import NamedTuple

from asyncrl.bench.learning.grid import SYNCHRONOUS, Grid, Results, Table
from asyncrl.bench.learning.result_cells import Cell, cells

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 176, 34, 44
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#000000", "#bb8866", "#777777", "#4444cc")
"""Told apart by most people (after Paul Tol's scheme `bright`)."""

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
        opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ground = '<rect width="100%" height="100%" fill="white"/>'
        parts = [f'{opening} font-family="sans-serif" font-size="12">', ground]
        return "\n".join([*parts, *self._frame(), *self._drawn(), *self._legend(), "</svg>\n"])

    def _x(self, value: float) -> float:
        low, high = self.x_ticks[0][0], self.x_ticks[-1][0]
        return round(LEFT + (value - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT), 1)

    def _y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - value * (HEIGHT - TOP - BOTTOM), 1)

    def _frame(self) -> Iterator[str]:
        right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
        yield f'<text x="{LEFT}" y="20" font-size="14">{escape(self.title)}</text>'
        yield f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(self.across)}</text>'
        middle = (TOP + bottom) / 2
        turned = f'transform="rotate(-90 14 {middle})"'
        yield f'<text x="14" y="{middle}" text-anchor="middle" {turned}>{escape(self.upwards)}</text>'
        for value, text in REWARD_TICKS:
            yield f'<path d="M{LEFT} {self._y(value)}H{right}" stroke="#dddddd"/>'
            yield f'<text x="{LEFT - 6}" y="{self._y(value) + 4}" text-anchor="end">{escape(text)}</text>'
        for value, text in self.x_ticks:
            yield f'<path d="M{self._x(value)} {bottom}v4" stroke="black"/>'
            yield f'<text x="{self._x(value)}" y="{bottom + 18}" text-anchor="middle">{escape(text)}</text>'
        yield f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="black"/>'

    def _drawn(self) -> Iterator[str]:
        for number, points in enumerate(self.lines.values()):
            colour = COLOURS[number % len(COLOURS)]
            places = " ".join(f"{self._x(point.x)},{self._y(point.y)}" for point in points)
            yield f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>'
            for point in points:
                x = self._x(point.x)
                yield f'<circle cx="{x}" cy="{self._y(point.y)}" r="3" fill="{colour}"/>'
                if point.whisker and point.whisker[0] != point.whisker[1]:
                    low, high = map(self._y, point.whisker)
                    yield f'<path d="M{x} {low}V{high}" stroke="{colour}"/>'

    def _legend(self) -> Iterator[str]:
        x = WIDTH - RIGHT + 14
        for number, name in enumerate(self.lines):
            y = TOP + 18 * number + 6
            yield f'<path d="M{x} {y}h16" stroke="{COLOURS[number % len(COLOURS)]}" stroke-width="3"/>'
            yield f'<text x="{x + 22}" y="{y + 4}">{escape(name)}</text>'


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
        reward = cell.reward
        points.append(Point(limits.index(cell.limit), reward.mean, (reward.lowest, reward.highest)))
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

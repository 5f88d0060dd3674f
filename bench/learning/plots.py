"""The plots of docs/learning.md: charts by name, made from the same cells as the tables. Pure."""

from collections.abc import Iterator, Sequence
from statistics import fmean

from asyncrl.bench.learning.grid import SYNCHRONOUS, Grid, Table
from asyncrl.bench.learning.svg_chart import Chart, Point, Tick, steps_of
from asyncrl.bench.learning.tables import Cell, Results, cells

REWARD_TICKS: Sequence[Tick] = [(number / 5, f"{number / 5:g}") for number in range(6)]
DECILE_TICKS: Sequence[Tick] = [(number, f"d{number}") for number in range(1, 11)]


def plots(grid: Grid, results: Results) -> dict[str, str]:
    """SVG text by `TABLE-TASK-WHAT`, of what has runs enough to draw."""
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
        there = [cell for cell in own if cell.limit == limit]
        if any(cell.trained_by_decile for cell in there):
            yield f"deciles-{limit}", _by_decile(task, there)
    if len(table.rows) == 1 and own:
        yield "curves", _curves(table, task, own)


def _by_limit(table: Table, task: str, own: Sequence[Cell], limits: Sequence[int]) -> Chart:
    """Limits stand side by side whatever lies between them."""
    place = {limit: float(number) for number, limit in enumerate(limits)}
    lines: dict[str, list[Point]] = {}
    for cell in own:
        seen = cell.reward
        at_zero = [line["held_out"] for line in cell.synchronous.values()]
        points = lines.setdefault(cell.row, [])
        if not points and cell.limit != SYNCHRONOUS and at_zero:
            points.append(Point(place[SYNCHRONOUS], fmean(at_zero), min(at_zero), max(at_zero)))
        points.append(Point(place[cell.limit], seen.mean, seen.lowest, seen.highest))
    ticks = [(place[limit], str(limit)) for limit in limits]
    title = f"{task}. {table.title}; mean and range over seeds"
    return Chart(title, "staleness limit η", "held-out reward", ticks, REWARD_TICKS, lines)


def _by_decile(task: str, there: Sequence[Cell]) -> Chart:
    """there: of one limit."""

    def points(cell: Cell) -> list[Point]:
        return [Point(number, share, share, share) for number, share in enumerate(cell.trained_by_decile, 1)]

    lines = {cell.row: points(cell) for cell in there if cell.trained_by_decile}
    title = f"{task}: tokens trained, η = {there[0].limit}"
    return Chart(title, "decile of answer length", "share of sampled tokens", DECILE_TICKS, REWARD_TICKS, lines)


def _curves(table: Table, task: str, own: Sequence[Cell]) -> Chart:
    """Returns for each limit the mean over its seeds, point by point."""
    lines = {f"η = {cell.limit}": _mean_curve([line["curve"] for line in cell.lines.values()]) for cell in own}
    longest = max(point.x for points in lines.values() for point in points)
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 500) if longest / step <= 10)
    ticks = steps_of(0, longest, step)
    return Chart(f"{task}: GRPO by staleness limit", "step", "reward of five steps", ticks, REWARD_TICKS, lines)


def _mean_curve(curves: Sequence[Sequence[Sequence[float]]]) -> list[Point]:
    """curves: (step, seconds, reward), of as many points each."""
    found = []
    for points in zip(*curves, strict=True):
        reward = fmean(point[2] for point in points)
        found.append(Point(points[0][0], reward, reward, reward))
    return found

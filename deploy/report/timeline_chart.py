"""The timeline: a row for each thread and call of each worker, and arrows from samples to steps to versions."""

from typing import Any
from zlib import crc32

from bokeh.models import ColumnDataSource, CrosshairTool, FixedTicker, HoverTool
from bokeh.palettes import Category20_20

from asyncrl.deploy.report.curve_charts import legend_below, plain_figure
from asyncrl.deploy.report.worker_trace import Slice, WorkerTrace

ROW_PIXELS = 13
ARROW_COLOURS = {"samples": "#9aa4b2", "weights": "#d1495b"}


def timeline_chart(trace: WorkerTrace) -> Any:
    """Returns the chart of a trace with at least one slice; time begins with the first."""
    heights, names = _rows(trace)
    start = trace.slices[0].begin
    chart = plain_figure(
        "Timeline of the last steps",
        "seconds",
        "",
        height=110 + ROW_PIXELS * len(heights),
        y_range=(-0.7, len(heights) - 0.3),
        output_backend="canvas",
    )
    chart.tools = [tool for tool in chart.tools if not isinstance(tool, HoverTool)]
    bars = chart.hbar(
        y="y",
        left="left",
        right="right",
        height=0.85,
        color="colour",
        line_color=None,
        source=_bars(trace, heights, start),
    )
    _add_arrows(chart, trace, heights, start)
    text = [("worker", "@worker"), ("span", "@name"), ("ms", "@ms{0.00}"), ("version", "@version")]
    chart.add_tools(HoverTool(renderers=[bars], tooltips=text), CrosshairTool(dimensions="height", line_alpha=0.3))
    chart.yaxis.ticker = FixedTicker(ticks=list(names))
    chart.yaxis.major_label_overrides = {row: name for row, name in names.items()}
    chart.ygrid.grid_line_color = None
    return chart


def _rows(trace: WorkerTrace) -> tuple[dict[tuple[str, int], int], dict[int, str]]:
    """Returns the height of each row, the first worker on top, and the label at the first row of each worker."""
    workers = trace.workers
    rows = sorted({(each.worker, each.row) for each in trace.slices}, key=lambda row: (workers.index(row[0]), row[1]))
    rows.reverse()
    heights = {row: height for height, row in enumerate(rows)}
    names = {max(height for (name, _), height in heights.items() if name == worker): worker for worker in workers}
    return heights, names


def _bars(trace: WorkerTrace, heights: dict[tuple[str, int], int], start: float) -> ColumnDataSource:
    return ColumnDataSource(
        {
            "y": [heights[each.worker, each.row] for each in trace.slices],
            "left": [round(each.begin - start, 6) for each in trace.slices],
            "right": [round(each.end - start, 6) for each in trace.slices],
            "ms": [round(1e3 * (each.end - each.begin), 3) for each in trace.slices],
            "name": [each.name for each in trace.slices],
            "worker": [each.worker for each in trace.slices],
            "version": ["" if each.version is None else str(each.version) for each in trace.slices],
            "colour": [_colour(each) for each in trace.slices],
        }
    )


def _add_arrows(chart: Any, trace: WorkerTrace, heights: dict[tuple[str, int], int], start: float) -> None:
    """Draws a thin line from the end of one slice to the begin of the other, for each kind of arrow."""
    for what, colour in ARROW_COLOURS.items():
        arrows = [arrow for arrow in trace.arrows if arrow.what == what]
        if arrows:
            chart.segment(
                x0=[arrow.begin.end - start for arrow in arrows],
                y0=[heights[arrow.begin.worker, arrow.begin.row] for arrow in arrows],
                x1=[arrow.end.begin - start for arrow in arrows],
                y1=[heights[arrow.end.worker, arrow.end.row] for arrow in arrows],
                color=colour,
                alpha=0.6,
                legend_label=what,
            )
    if trace.arrows:
        legend_below(chart)


def _colour(each: Slice) -> str:
    """Returns the colour of a span's name, the same in all reports."""
    colour: str = Category20_20[crc32(each.name.encode()) % len(Category20_20)]
    return colour

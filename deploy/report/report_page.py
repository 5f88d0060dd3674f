"""Writes the page: one HTML file that loads nothing, with charts, samples, evaluations, audit and configuration."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

from bokeh.embed import components
from bokeh.models import ColumnDataSource, CrosshairTool, FixedTicker, HoverTool
from bokeh.palettes import Category20_20
from bokeh.resources import Resources
from jinja2 import Environment, PackageLoader, StrictUndefined

from asyncrl.config.toml_writer import dump
from asyncrl.deploy.report.curve_charts import (
    curve_charts,
    legend_below,
    plain_figure,
    staleness_histogram,
    state_chart,
)
from asyncrl.deploy.report.run_record import (
    RunRecord,
    acting_facts,
    newest_picture,
    numbers_of,
    oldest_trained,
    policy_of,
    trained_per_second,
)
from asyncrl.deploy.report.sample_tokens import ShownToken, shown_tokens, signed_colour, token_decoder
from asyncrl.deploy.report.worker_trace import Slice, WorkerTrace, read_trace
from asyncrl.telemetry.jsonl import Object
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.samples_file import SampleRecord

SHOWN_SAMPLES = 120
SHOWN_CHARACTERS = 2000
"""Characters of a prompt or an answer; a longer one is cut in its middle."""
SHOWN_TOKENS = 8000
"""Tokens with colours of their own, some 200 bytes each, which bounds the size of the report."""
TEMPLATE = "report.html.j2"
ROW_PIXELS = 13
ARROW_COLOURS = {"samples": "#9aa4b2", "weights": "#d1495b"}


@dataclass(frozen=True, slots=True)
class Fact:
    """A line of the table at the top: one text for each run."""

    name: str
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShownSample:
    """A sample as the page shows it. tint: CSS colour of its advantage; behind: versions by which its first token was
    behind the weights that it trained. tokens: none where the run recorded none, or after SHOWN_TOKENS."""

    record: SampleRecord
    prompt: str
    text: str
    tint: str
    behind: int
    tokens: list[ShownToken]


def write_report(runs: Sequence[RunRecord], target: Path, heading: str = "") -> None:
    """Writes the report of one run, or the comparison of several. heading: text above it. The file appears at once.
    Raises OSError."""
    unfinished = target.with_name(f"{target.name}.part")
    unfinished.write_text(report_html(runs, heading), encoding="utf-8")
    os.replace(unfinished, target)


def report_html(runs: Sequence[RunRecord], heading: str = "") -> str:
    charts: dict[str, Any] = {f"curve{number}": chart for number, chart in enumerate(curve_charts(runs))}
    curves = list(charts)
    trace = WorkerTrace([], [], 0)
    if len(runs) == 1:
        trace = read_trace(runs[0].path / "logs")
        single = {"states": state_chart(runs[0]), "ages": staleness_histogram(runs[0])}
        single["timeline"] = timeline_chart(trace) if trace.slices else None
        charts |= {name: chart for name, chart in single.items() if chart is not None}
    script, places = components(charts)
    page: str = _template().render(
        heading=heading,
        runs=runs,
        curves=[places[name] for name in curves],
        places=places,
        script=script,
        library=Resources(mode="inline", components=["bokeh"]).render_js(),
        facts=list(facts(runs)),
        trace=trace,
        samples=shown_samples(runs[0]) if len(runs) == 1 else [],
        acts=all(run.config.acting.env for run in runs),
        pictures=[(run.name, picture) for run in runs if (picture := newest_picture(run))],
        configs=[dump(run.config) for run in runs],
    )
    return page


@cache
def _template() -> Any:
    loader = PackageLoader("asyncrl.deploy", "report")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template(TEMPLATE)


def facts(runs: Sequence[RunRecord]) -> Iterator[Fact]:
    """Yields what the table at the top says of each run."""
    yield Fact("run", tuple(run.name for run in runs))
    yield Fact("experiment", tuple(f"{run.config.name}, {policy_of(run.config)}" for run in runs))
    yield Fact("steps", tuple(f"{run.steps[-1]['step']:,}" for run in runs))
    yield Fact("time trained", tuple(_duration(run.seconds[-1]) for run in runs))
    yield Fact("devices", tuple(str(run.devices) for run in runs))
    yield Fact("resumes", tuple(str(run.steps[-1]["incarnation"]) for run in runs))
    if all(run.config.acting.env for run in runs):
        for same in zip(*map(acting_facts, runs), strict=True):
            yield Fact(same[0][0], tuple(text for _, text in same))
    else:
        yield from _language_facts(runs)
    yield Fact("staleness, mean of the last tenth", tuple(_last_tenth(run, "staleness/mean") for run in runs))
    yield Fact("staleness.limit", tuple(str(run.config.staleness.limit) for run in runs))
    yield Fact("audit", tuple(_audit_result(run) for run in runs))


def _language_facts(runs: Sequence[RunRecord]) -> Iterator[Fact]:
    """Yields what the table says of language models."""
    yield Fact("reward, mean of the last tenth", tuple(_last_tenth(run, "reward/mean") for run in runs))
    if any(map(_has_unnamed_set, runs)) or not any(run.sets for run in runs):
        yield Fact("held out", tuple(_mean(run.evaluations[-1]) if _has_unnamed_set(run) else "-" for run in runs))
    for name in dict.fromkeys(name for run in runs for name in run.sets):
        yield Fact(f"held out, {name}", tuple(_mean(run.sets[name]) if name in run.sets else "-" for run in runs))
    yield Fact("trained tokens", tuple(f"{sum(numbers_of(run, 'tokens/trained')):,.0f}" for run in runs))
    yield Fact("trained tokens per second", tuple(map(trained_per_second, runs)))
    yield Fact("oldest trained token", tuple(map(oldest_trained, runs)))


def _audit_result(run: RunRecord) -> str:
    if run.audit is None:
        return "the journal cannot be read"
    return "holds" if run.audit.ok else "FAILS"


def _last_tenth(run: RunRecord, metric: str) -> str:
    found = numbers_of(run, metric)
    last = found[-max(1, len(found) // 10) :]
    return f"{sum(last) / len(last):.3f}" if last else "-"


def _has_unnamed_set(run: RunRecord) -> bool:
    """Returns whether the prompts of `[evaluate]` itself were evaluated; named sets have lines of their own."""
    return bool(run.evaluations) and not run.evaluations[-1].get("name")


def _mean(evaluation: Object) -> str:
    mean = "unknown" if evaluation["mean"] is None else f"{evaluation['mean']:.3f}"
    return f"{mean} ± {evaluation.get('stderr') or 0:.3f} at version {evaluation['version']}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.2f} h"


def shown_samples(run: RunRecord) -> list[ShownSample]:
    """Returns whole groups evenly spread over the recorded ones, so that early and late steps are both there."""
    groups: dict[tuple[int, int], list[SampleRecord]] = {}
    for record in run.samples[::-1]:
        groups.setdefault((record.step, record.group), []).insert(0, record)
    every = max(1, -(-len(run.samples) // SHOWN_SAMPLES))
    decode = token_decoder([RunDirectory(run.path).model, Path(run.config.model.name)])
    shown = []
    tokens = 0
    for group in list(groups.values())[::every]:
        for record in group:
            split = decode is not None and bool(record.token_ids) and tokens < SHOWN_TOKENS
            parts = shown_tokens(record, decode, run.config) if decode and split else []
            tokens += len(parts)
            tint = signed_colour(record.advantage or 0.0, full=2.0)
            behind = record.step - 1 - record.first
            shown.append(ShownSample(record, _cut(record.prompt), _cut(record.text), tint, behind, parts))
    return shown[:SHOWN_SAMPLES]


def _cut(text: str) -> str:
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]} [{len(text) - 2 * half} characters] {text[-half:]}"


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

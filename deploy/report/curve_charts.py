"""Charts of numbers by step or time, of one run or of several beside one another."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bokeh.models import ColumnDataSource, HoverTool, Whisker
from bokeh.palettes import Category10_10
from bokeh.plotting import figure

from asyncrl.deploy.report.run_record import RunRecord, binned, lengths_of, mean_shares, services_of

MAX_POINTS = 1000
"""Points of a line. More are averaged in bins, which bounds the size of the report."""
STATE_COLOURS = {
    "busy": "#2a9d55",
    "starved": "#d0d3d8",
    "blocked": "#e9a03b",
    "sync": "#3b7dd8",
    "overhead": "#9467bd",
    "unaccounted": "#d62728",
}
"""Colour of each state of a worker's time."""
TEXT_COLOUR = "#808895"
"""Colour of text that is readable on a light and on a dark page."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric of each run. across: what the horizontal axis counts: steps, minutes or device-hours."""

    title: str
    metrics: tuple[str, ...]
    across: str = "step"
    unit: str = ""


CURVES_OF_ACTING = (
    Curve("Return of episodes", ("acting/return_mean", "acting/return_last20")),
    Curve("Return, mean of the last 20 episodes", ("acting/return_last20",), "minutes"),
    Curve("Length of episodes", ("acting/length_mean",), unit="steps"),
    Curve("Trained transitions", ("perf/tokens_per_s",), "minutes", "transitions per second"),
    Curve("Staleness of trained transitions", ("staleness/mean", "staleness/max"), unit="versions"),
    Curve("Age of transitions drawn from the replay", ("replay/age_mean",), unit="versions"),
    Curve("Replay", ("replay/transitions",), unit="transitions"),
    Curve("Entropy", ("policy/entropy",), unit="nats"),
    Curve("Temperature", ("sac/temperature",)),
    Curve("Loss of the policy", ("loss/policy",)),
    Curve("Loss of the critic", ("critic/loss",)),
    Curve("Explained variance of returns", ("critic/explained_variance",), unit="share"),
    Curve("Acting policy against trainer: KL per action", ("policy/kl_rollout_train",), unit="nats"),
    Curve("Left out or clipped transitions", ("policy/clip_frac", "mask/stale_fraction"), unit="share"),
    Curve("Gradient norm", ("grad_norm",)),
)
"""Curves of policies that act."""
CURVES = (
    Curve("Reward", ("reward/mean",)),
    Curve("Reward", ("reward/mean",), "minutes"),
    Curve("Reward", ("reward/mean",), "device-hours"),
    Curve("Groups that teach nothing", ("reward/equal_groups", "completions/equal_groups"), unit="share"),
    Curve("Staleness of trained tokens", ("staleness/mean", "staleness/max"), unit="versions"),
    Curve("Length of completions", ("completions/length_mean",), unit="tokens"),
    Curve("Trained tokens", ("perf/tokens_per_s",), "minutes", "tokens per second"),
    Curve("Sampler against trainer: KL per token", ("mismatch/kl",), unit="nats"),
    Curve("Effective sample size of the weights", ("mismatch/ess", "mismatch/sequence_ess"), unit="share"),
    Curve("Entropy", ("policy/entropy",), unit="nats"),
    Curve("Left out tokens", ("policy/clip_frac", "mask/stale_fraction", "mask/rejected_fraction"), unit="share"),
    Curve("Gradient norm", ("grad_norm",)),
)


def curve_charts(runs: Sequence[RunRecord]) -> Iterator[Any]:
    """Yields a chart for each curve of which a run has at least one number."""
    acting = [run for run in runs if run.config.acting.env]
    curves = [*(CURVES if len(acting) < len(runs) else ()), *(CURVES_OF_ACTING if acting else ())]
    if any(run.evaluations for run in acting):
        yield _evaluated_returns([run for run in acting if run.evaluations])
    for curve in dict.fromkeys(curves):
        lines = [line for run in runs for line in _lines(curve, run, several=len(runs) > 1)]
        if lines:
            yield _chart(curve, lines, runs)


def _lines(curve: Curve, run: RunRecord, several: bool) -> Iterator[tuple[str, list[float], list[float]]]:
    """Yields the label and the coordinates of each metric that the run has."""
    across = positions(run, curve.across)
    for metric in curve.metrics:
        points = [(x, step[metric]) for x, step in zip(across, run.steps, strict=True) if _is_number(step.get(metric))]
        if points:
            xs, ys = map(list, zip(*binned(points, MAX_POINTS), strict=True))
            name = metric.rpartition("/")[2] if len(curve.metrics) > 1 else ""
            yield (f"{run.name} {name}".strip() if several else name), xs, ys


def positions(run: RunRecord, across: str) -> list[float]:
    """Returns where each step lies on an axis."""
    match across:
        case "step":
            return [float(step["step"]) for step in run.steps]
        case "minutes":
            return [seconds / 60 for seconds in run.seconds]
        case "device-hours":
            return [seconds / 3600 * run.devices for seconds in run.seconds]
    raise ValueError(f"{across!r} is no axis of a report")


def _chart(curve: Curve, lines: list[tuple[str, list[float], list[float]]], runs: Sequence[RunRecord]) -> Any:
    chart = plain_figure(curve.title, curve.across, curve.unit)
    for colour, (label, xs, ys) in zip(_colours(len(lines)), lines, strict=True):
        legend = {"legend_label": label} if label else {}
        chart.line(xs, ys, color=colour, line_width=1.5, **legend)
    if curve.metrics == ("reward/mean",) and curve.across == "step":
        for colour, run in zip(_colours(len(lines)), runs, strict=False):
            _add_evaluations(chart, run, colour)
    if chart.legend:
        legend_below(chart)
    return chart


def _evaluated_returns(runs: Sequence[RunRecord]) -> Any:
    """Returns a chart of the mean return of each evaluated version, with its interval of 95 %."""
    chart = plain_figure("Return of evaluated versions", "version", "")
    for colour, run in zip(_colours(len(runs)), runs, strict=True):
        found = [each for each in run.evaluations if _is_number(each["mean"])]
        data = {name: [each[name] for each in found] for name in ("version", "mean")}
        data |= {
            name: [each[name] if _is_number(each.get(name)) else each["mean"] for each in found]
            for name in ("low", "high")
        }
        source = ColumnDataSource(data)
        legend = {"legend_label": run.name} if len(runs) > 1 else {}
        chart.line("version", "mean", source=source, color=colour, line_width=1.5, **legend)
        chart.scatter("version", "mean", source=source, size=6, color=colour, **legend)
        chart.add_layout(Whisker(base="version", lower="low", upper="high", source=source, line_color=colour))
    if len(runs) > 1:
        legend_below(chart)
    return chart


def _add_evaluations(chart: Any, run: RunRecord, colour: str) -> None:
    """Adds the held-out reward of each evaluated version, with its standard error to both sides."""
    if not run.evaluations:
        return
    found = run.evaluations
    source = ColumnDataSource(
        {
            "version": [each["version"] for each in found],
            "mean": [each["mean"] for each in found],
            "low": [each["mean"] - (each["stderr"] or 0) for each in found],
            "high": [each["mean"] + (each["stderr"] or 0) for each in found],
        }
    )
    chart.scatter("version", "mean", source=source, size=7, color=colour, line_color="#888", legend_label="held out")
    chart.add_layout(Whisker(base="version", lower="low", upper="high", source=source, line_color=colour))


def staleness_histogram(run: RunRecord) -> Any | None:
    """Returns a chart of the age of recorded samples when they were trained: by how many versions their first token or
    transition, the oldest, was behind the weights that step trained. It may be masked: then its age is over the
    limit."""
    ages = Counter(sample.step - 1 - sample.first for sample in run.samples if sample.trained)
    if not ages:
        return None
    unit = "transition" if run.config.acting.env else "token"
    chart = plain_figure(f"Age of the first {unit} of trained samples", "versions", "recorded samples")
    chart.vbar(x=list(ages), top=list(ages.values()), width=0.8, color=Category10_10[0])
    return chart


def state_chart(run: RunRecord) -> Any | None:
    """Returns a bar for each service, divided by what its workers did in the time of all steps."""
    lengths = lengths_of(run.seconds)
    shares = {name: mean_shares(run.steps, lengths, name) for name in services_of(run.steps)}
    if not shares:
        return None
    names = list(shares)[::-1]
    chart = plain_figure("What workers did", "share of the time", "", y_range=names, height=90 + 32 * len(names))
    data = {"service": names} | {state: [shares[name].get(state, 0.0) for name in names] for state in STATE_COLOURS}
    source = ColumnDataSource(data)
    bars = chart.hbar_stack(
        list(STATE_COLOURS),
        y="service",
        height=0.7,
        color=list(STATE_COLOURS.values()),
        source=source,
        legend_label=list(STATE_COLOURS),
    )
    for state, bar in zip(STATE_COLOURS, bars, strict=True):
        chart.add_tools(HoverTool(renderers=[bar], tooltips=f"@service: {state} @{{{state}}}{{0.0%}}"))
    legend_below(chart)
    return chart


def plain_figure(title: str, across: str, upwards: str, height: int = 290, **settings: Any) -> Any:
    """Returns an empty chart that is readable on a light and on a dark page."""
    chart = figure(
        title=title,
        x_axis_label=across,
        y_axis_label=upwards,
        height=height,
        sizing_mode="stretch_width",
        tools="pan,box_zoom,xwheel_zoom,hover,reset",
        toolbar_location="above",
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color="#888888",
        **settings,
    )
    chart.toolbar.logo = None
    chart.toolbar.active_drag = None  # A drag scrolls the page.
    chart.grid.grid_line_color = "#888888"
    chart.grid.grid_line_alpha = 0.25
    for text in (chart.title, *chart.axis):
        for name in ("text_color", "axis_label_text_color", "major_label_text_color"):
            if hasattr(text, name):
                setattr(text, name, TEXT_COLOUR)
    return chart


def legend_below(chart: Any) -> None:
    """Puts the legend where it covers no line; a click on a name hides its lines."""
    chart.add_layout(chart.legend[0], "below")
    chart.legend.location = "center"
    chart.legend.ncols = 3
    chart.legend.background_fill_alpha = 0.0
    chart.legend.border_line_alpha = 0.0
    chart.legend.label_text_color = TEXT_COLOUR
    chart.legend.label_text_font_size = "11px"
    chart.legend.click_policy = "hide"


def _colours(count: int) -> list[str]:
    return [Category10_10[number % len(Category10_10)] for number in range(count)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)

"""Writes `report.html` of a search: one file that loads nothing, with all candidates and the curves of the best."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bokeh.embed import components
from bokeh.resources import Resources
from jinja2 import Environment, PackageLoader, StrictUndefined

from asyncrl.deploy.commands.tuning.search import SearchCandidate
from asyncrl.deploy.commands.tuning.search_space import parse_space
from asyncrl.deploy.commands.tuning.study import OWN, SearchRequest, run_path, shown_value, shown_values
from asyncrl.deploy.report.curve_charts import curve_charts, plain_figure
from asyncrl.deploy.report.run_record import RunRecord, read_run

SHOWN_RUNS = 8
"""Runs whose curves are shown: of the experiment's own values and of the best candidates, with the first seed."""


def write_tuning_report(
    folder: Path, request: SearchRequest, own: SearchCandidate, found: Sequence[SearchCandidate]
) -> Path:
    """Writes the report and returns its path. The file appears at once. Raises OSError."""
    trained = [each for each in found if each.difference is not None]
    runs = [_named_run(folder, each, request.seeds[0]) for each in (own, *trained)[:SHOWN_RUNS]]
    values = dict(enumerate(_value_charts(request, trained)))
    charts = {f"value{number}": chart for number, chart in values.items()}
    charts |= {f"curve{number}": chart for number, chart in enumerate(curve_charts(runs))}
    script, places = components(charts) if charts else ("", {})
    loader = PackageLoader("asyncrl.deploy", "commands/tuning")
    template = Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template("tuning.html.j2")
    target = folder / "report.html"
    unfinished = target.with_name("report.html.part")
    page = template.render(
        request=request,
        own=own,
        found=found,
        shown_values=shown_values,
        places=list(places.values()),
        script=script,
        library=Resources(mode="inline", components=["bokeh"]).render_js(),
    )
    unfinished.write_text(page, encoding="utf-8")
    os.replace(unfinished, target)
    return target


def _named_run(folder: Path, candidate: SearchCandidate, seed: int) -> RunRecord:
    """Returns a candidate's run under the name that charts show."""
    name = "own values" if candidate.number == OWN else f"candidate {candidate.number}"
    return replace(read_run(run_path(folder, candidate.number, seed)), path=Path(name))


def _value_charts(request: SearchRequest, trained: Sequence[SearchCandidate]) -> Iterator[Any]:
    """Yields a chart for each key: how much better each of its values was, the darker the longer it trained."""
    for dimension in parse_space(request.search):
        settings: dict[str, Any] = {"x_axis_type": "log"} if dimension.log else {}
        if dimension.choices:
            settings = {"x_range": [shown_value(choice) for choice in dimension.choices]}
        chart = plain_figure(dimension.key, dimension.key, f"{request.metric} over own values", **settings)
        values = [each.values[dimension.key] for each in trained]
        xs = [shown_value(value) for value in values] if dimension.choices else values
        ys = [each.difference.mean for each in trained if each.difference is not None]
        alphas = [0.25 + 0.75 * each.steps / request.steps for each in trained]
        chart.scatter(xs, ys, size=9, fill_alpha=alphas, line_alpha=alphas)
        yield chart

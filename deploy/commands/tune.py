"""`asyncrl tune` searches for better values of an experiment's keys: short runs, of which the better ones go on."""

import argparse
import difflib
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import islice, product
from pathlib import Path

from asyncrl.config.install_hints import program
from asyncrl.config.sources import load
from asyncrl.deploy.commands.command_parser import CommandParser, positive
from asyncrl.deploy.commands.tuning_search import (
    Dimension,
    Search,
    SearchCandidate,
    SearchRequest,
    open_search,
    parse_space,
    run_trial,
    shown_values,
    typed,
)
from asyncrl.errors import ConfigError, Interrupted
from asyncrl.telemetry.jsonl import FURTHER_METRICS, METRICS

DESCRIPTION = f"""{__doc__} Optuna (extra `tune`) proposes values, and sequential halving spends the steps. All
candidates and the experiment's own values train with the same seeds, and are compared seed by seed. The same command
goes on after an end. Further --section.key flags set keys of every run."""
MOST_COMBINATIONS = 64
"""Combinations of the other keys' ends beside which a value is tried, before it counts as refused."""
SHOWN_RUNS = 8
"""Runs in the report: of the experiment's own values and of the best candidates."""


def main(arguments: list[str]) -> int:
    asked, flags = _parser().parse_known_args(arguments)
    _refuse_mistakes(asked, arguments)
    wanted = _request(asked, flags) if asked.experiment else None
    name = Path(asked.experiment or "").stem
    folder = asked.to or Path("runs") / f"tune-{name}-{datetime.now().astimezone():%Y%m%d-%H%M%S}"
    again = f"{program()} tune --to {shlex.quote(str(folder))}"
    with open_search(folder, wanted) as (study, request):
        search = Search(folder, request, study, run_trial, partial(print, flush=True))
        try:
            own, found = search.run()
        except Interrupted as error:
            raise Interrupted(f"{error}. Go on with: {again}") from None
    lines = table(request, own, found)
    print("\n" + "\n".join(lines))
    print(conclusion(request, found))
    if failed := sum(bool(each.failure) for each in found):
        print(f"candidates that failed: {failed}; `{again}` tries them again")
    print(f"report: {_write_report(search, own, found, lines)}")
    return 0


def _parser() -> CommandParser:
    parser = CommandParser("asyncrl tune", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("experiment", nargs="?", metavar="NAME|FILE", help="Name the experiment; without: see --to.")
    text = "A key and its values: KEY=LOW..HIGH, KEY=LOW..HIGH:log or KEY=A,B,C. Several keys: several times."
    parser.add_argument("--search", action="append", default=[], metavar="KEY=VALUES", help=text)
    parser.add_argument("--candidates", type=positive, default=9, help="Candidates in each round; default: 9.")
    parser.add_argument("--keep", type=positive, default=3, metavar="N", help="One candidate in N goes on; default: 3.")
    text = "Rounds, of which each is guided by the results of those before; default: 1."
    parser.add_argument("--rounds", type=positive, default=1, help=text)
    parser.add_argument("--seeds", type=positive, default=2, metavar="N", help="Seeds of each candidate; default: 2.")
    parser.add_argument("--stop-at", type=positive, metavar="STEP", help="Last step; default: the experiment's.")
    text = "Metric of metrics.jsonl that decides, as its mean over the last fourth of the steps; default: reward/mean."
    parser.add_argument("--metric", default="reward/mean", help=text)
    parser.add_argument("--minimize", action="store_true", help="Lower values of the metric are better.")
    text = "Directory of the search; default: runs/tune-NAME-TIME. `asyncrl tune --to DIR` goes on."
    parser.add_argument("--to", type=Path, metavar="DIR", help=text)
    return parser


def _refuse_mistakes(asked: argparse.Namespace, arguments: Sequence[str]) -> None:
    if asked.experiment is None:
        if asked.to is None:
            raise ConfigError(f"name an experiment: `{program()} tune quickstart --search KEY=VALUES`")
        if arguments not in (["--to", str(asked.to)], [f"--to={asked.to}"]):
            raise ConfigError("a search goes on as it began: write --to alone, or name the experiment again")
        return
    if not asked.search:
        raise ConfigError("name what to search, for instance --search training.learning_rate=1e-5..1e-3:log")
    if min(asked.keep, asked.candidates) < 2:
        raise ConfigError("--candidates, --keep: a search needs two at least, and one candidate in 2 goes on at most")


def _request(asked: argparse.Namespace, flags: Sequence[str]) -> SearchRequest:
    """Raises ConfigError for mistakes in the experiment, in flags, and in the ends of what is searched."""
    config = load(asked.experiment, flags).config
    _refuse_metric(asked.metric, config.reward.terms)
    space = parse_space(asked.search)
    for dimension in space:
        if any(flag.partition("=")[0] == f"--{dimension.key}" for flag in flags):
            raise ConfigError(f"--search: {dimension.key} is set by a flag too; remove one")
    given = {name: value for name, value in vars(asked).items() if name not in ("to", "stop_at")}
    given["steps"] = min(asked.stop_at or config.steps, config.steps)
    given["seeds"] = [config.seed + number for number in range(asked.seeds)]
    request = SearchRequest(**given, flags=flags)
    _refuse_values(request, space)
    return request


def _refuse_values(request: SearchRequest, space: Sequence[Dimension]) -> None:
    """Raises ConfigError for an end of a range, or a choice, that the config refuses beside all ends of the others."""
    for dimension in space:
        for value in dimension.ends:
            beside = product(*([value] if each is dimension else each.ends for each in space))
            candidates = (dict(zip((each.key for each in space), values, strict=True)) for values in beside)
            problems = map(request.problem, islice(candidates, MOST_COMBINATIONS))
            if (first := next(problems)) and all(problems):
                raise ConfigError(f"--search {dimension.key}: {first}")


def _refuse_metric(metric: str, terms: Sequence[str]) -> None:
    """Raises ConfigError for a name that no metric can have, or that is nearly the name of one."""
    known = [*METRICS, *FURTHER_METRICS, *(f"reward/{term}" for term in terms)]
    if metric in known:
        return
    near = [f"{metric}/mean"] if f"{metric}/mean" in known else difflib.get_close_matches(metric, known, 1, 0.85)
    patterns = [re.sub(r"<\w+>", "[^/]+", name) for name in known if "<" in name]
    if near or not any(re.fullmatch(pattern, metric) for pattern in patterns):
        meant = f"did you mean {near[0]}?" if near else "docs/metrics.md has all names"
        raise ConfigError(f"--metric: there is no metric {metric!r}; {meant}")


def table(request: SearchRequest, own: SearchCandidate, found: Sequence[SearchCandidate]) -> list[str]:
    """Returns the lines of the table: two for each candidate, of which the second has its values."""
    head = f"{'':>9} {'steps':>6} {request.metric:>12} {'over own values':>20} {'s a step':>9}"
    lines = [head]
    for each in (own, *found):
        name = each.number or "own"
        numbers = f"{each.mean:>12.4g} {'-' if each is own else str(each.difference):>20} {each.step_seconds:>9.3g}"
        line = f"{name:>9} {each.steps:>6} " + (f"failed: {each.failure}" if each.failure else numbers)
        lines += [line] if each is own else [line, f"{'':>11}{shown_values(each.values)}"]
    return lines


def conclusion(request: SearchRequest, found: Sequence[SearchCandidate]) -> str:
    """Returns the sentence that says what to do. found: the best first."""
    if not found or (difference := found[0].difference) is None:
        return "no candidate could be trained; the messages above say why"
    best = f"candidate {found[0].number}"
    if difference.error is None:
        return f"{best} is the best, by {difference}; one seed cannot tell that from chance: --seeds 3"
    if not difference.is_clear:
        return (
            f"no candidate is clearly better than the experiment's own values; the best is {best}, by {difference}: "
            "more seeds or longer runs tell more"
        )
    flags = [part for key, value in found[0].values.items() for part in (f"--{key}", typed(value))]
    command = shlex.join(["run", request.experiment, *request.flags, *flags])
    return (
        f"{best} is better by {difference} over {len(request.seeds)} seeds; as the best of {len(found)} it may be "
        f"lucky, so try seeds that the search did not use:\n  {program()} {command} --seed {max(request.seeds) + 1}"
    )


def _write_report(search: Search, own: SearchCandidate, found: Sequence[SearchCandidate], lines: Sequence[str]) -> Path:
    """Writes the table, and a comparison of the own values with the best candidates, all with the first seed."""
    from asyncrl.deploy.report.report_page import write_report
    from asyncrl.deploy.report.run_record import read_run

    runs = []
    for each in [own, *(each for each in found if each.difference is not None)][:SHOWN_RUNS]:
        run = read_run(search.run_of(each, search.request.seeds[0], each.steps).run_dir)
        runs.append(replace(run, path=Path(f"candidate {each.number}" if each.number else "own values")))
    target = search.folder / "report.html"
    write_report(runs, target, "\n".join(lines))
    return target

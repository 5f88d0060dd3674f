"""Says in the report what a policy that acts came to, and holds the picture of its last evaluation."""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.schema import Config
from asyncrl.deploy.report.run_record import RunRecord
from asyncrl.telemetry.run_directory import RunDirectory

MOST_BYTES = 3 * 2**20
"""Bytes of a picture that a report holds."""


@dataclass(frozen=True, slots=True)
class EpisodePicture:
    """The newest picture of an evaluation. address: of its data."""

    version: int
    address: str


def policy_of(config: Config) -> str:
    """Returns what is trained: the name of the model, or the algorithm of a policy that acts and its environment."""
    acting = config.acting
    return f"{acting.algorithm.upper()} in {acting.env}" if acting.env else config.model.name


def acting_facts(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Yields what the table at the top says of a run whose policy acts, beside what it says of each run."""
    yield "return, mean of the last 20 episodes", _newest(run, "acting/return_last20")
    yield "evaluated", _evaluated(run)
    yield "steps of an episode, newest mean", _newest(run, "acting/length_mean")
    yield "trained transitions", _newest(run, "acting/transitions")
    trained = sum(_numbers(run, "tokens/trained"))
    yield "trained transitions per second", f"{trained / run.seconds[-1]:,.0f}" if run.seconds[-1] else "-"
    yield "oldest trained transition", f"{max(_numbers(run, 'staleness/max'), default=0.0):.0f} versions"
    yield "lost episodes", f"{sum(_numbers(run, 'environment/lost_episodes')):,.0f}"


def newest_picture(run: RunRecord) -> EpisodePicture | None:
    """Returns the picture of the last evaluation that has one; None where there is none, or it is too large."""
    paths = [each for each in RunDirectory(run.path).answers.glob("*.gif") if each.stem.isdecimal()]
    newest = max(paths, key=lambda path: int(path.stem), default=None)
    if newest is None or newest.stat().st_size > MOST_BYTES:
        return None
    data = base64.b64encode(Path(newest).read_bytes()).decode()
    return EpisodePicture(int(newest.stem), f"data:image/gif;base64,{data}")


def _numbers(run: RunRecord, metric: str) -> Sequence[float]:
    return [step[metric] for step in run.steps if step.get(metric) is not None]


def _newest(run: RunRecord, metric: str) -> str:
    found = _numbers(run, metric)
    return f"{found[-1]:,.6g}" if found else "-"


def _evaluated(run: RunRecord) -> str:
    if not run.evaluations:
        return "-"
    last = run.evaluations[-1]
    if last["mean"] is None:
        return f"unknown at version {last['version']}"
    interval = "" if last["low"] is None else f" [{last['low']:.5g} - {last['high']:.5g}]"
    return f"{last['mean']:.5g}{interval} at version {last['version']}"

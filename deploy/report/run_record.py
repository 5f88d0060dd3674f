"""Reads what a run left in its directory: steps, evaluations, how its workers spent the time, and what a policy that
acts came to."""

import base64
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from asyncrl.config.schema import Config
from asyncrl.config.sources import read
from asyncrl.controller.journal.audit import Audit, audit
from asyncrl.deploy.service_specs import device_of, service_specs
from asyncrl.errors import ConfigError, JournalError
from asyncrl.telemetry.jsonl import Object, read_lines, read_metrics
from asyncrl.telemetry.logs import repeated
from asyncrl.telemetry.run_directory import NO_RUN, RunDirectory, missing_run
from asyncrl.telemetry.samples_file import SampleRecord, read_samples
from asyncrl.telemetry.state_clock import STATES

# Says what share of the time the workers of each service spent in each state, over several steps.


ACCOUNTED = (*STATES, "unaccounted")
"""States whose shares of a worker's time add up to 1."""


def services_of(steps: Iterable[Object]) -> list[str]:
    """Returns the services whose time the metrics of these steps account for."""
    return list({key.split("/")[1]: None for step in steps for key in step if key.startswith("time/")})


def lengths_of(ends: Sequence[float]) -> list[float]:
    """Returns how many seconds each step took. ends: when they ended, the first since the begin of the run."""
    return [end - begin for begin, end in pairwise((0.0, *ends))]


def mean_shares(steps: Sequence[Object], lengths: Sequence[float], service: str) -> dict[str, float]:
    """Returns the share of each state, each step weighted by its length; {} where no step has the service."""
    found = [(step, length) for step, length in zip(steps, lengths, strict=True) if f"time/{service}/busy" in step]
    total = sum(length for _, length in found)
    if not total:
        return {}
    return {
        state: sum(length * (step.get(f"time/{service}/{state}") or 0.0) for step, length in found) / total
        for state in ACCOUNTED
    }


def binned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Returns at most so many points, each the mean of as many that follow each other."""
    size = max(1, -(-len(points) // most))
    bins = [points[start : start + size] for start in range(0, len(points), size)]
    return [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in bins]


def numbers_of(run: "RunRecord", metric: str) -> list[float]:
    return [step[metric] for step in run.steps if step.get(metric) is not None]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run. steps: the metrics of each step that counts, oldest first; seconds: how long the run had trained when
    each of them ended, without the time between a stop and its resume. evaluations: one for each version, by version,
    on the prompts of `[evaluate]` itself or, where there are none, on those of the first set; sets: the newest of each
    other set.
    audit: None when the journal cannot be read, and `audit_text` says why. devices: GPUs of the run; the CPUs of a host
    count as one device. warnings: a line for each kind that the run gave."""

    path: Path
    config: Config
    steps: list[Object]
    seconds: list[float]
    evaluations: list[Object]
    samples: list[SampleRecord]
    sets: dict[str, Object]
    audit: Audit | None
    audit_text: str
    devices: int
    warnings: list[str]

    @property
    def name(self) -> str:
        return self.path.name


def read_run(path: Path) -> RunRecord:
    """Reads the run in a directory. Raises ConfigError when it holds no run, or one that has not trained a step."""
    directory = RunDirectory(path.absolute())
    if not directory.started_before:
        raise missing_run(path, NO_RUN)
    steps = read_metrics(directory.metrics)
    if not steps:
        raise ConfigError(f"{path}: this run has not trained a step; a report shows at least one")
    config = read(directory.config)
    audited, text = _audited(directory.path)
    return RunRecord(
        path=directory.path,
        config=config,
        steps=steps,
        seconds=_seconds_trained(list(read_lines(directory.metrics)), steps),
        evaluations=_newest_evaluations(directory.evaluations),
        samples=read_samples(directory.samples),
        sets={line["name"]: line for line in read_lines(directory.evaluations) if line.get("name")},
        audit=audited,
        audit_text=text,
        devices=len(set(_devices(config))),
        warnings=list(repeated(directory.warnings)),
    )


def _seconds_trained(lines: list[Object], steps: list[Object]) -> list[float]:
    """Returns when each step ended, in seconds of training. `time` of a line begins at 0 with each incarnation, so the
    time of the incarnations before is added, that of steps which were trained again included."""
    ends: dict[int, float] = {}
    for line in lines:
        ends[line["incarnation"]] = max(ends.get(line["incarnation"], 0.0), line["time"])
    before = {one: sum(end for other, end in ends.items() if other < one) for one in ends}
    return [before[step["incarnation"]] + step["time"] for step in steps]


def _newest_evaluations(path: Path) -> list[Object]:
    """Returns the newest evaluation of each version; a resume evaluates the versions again that it repeats. Of several
    held-out sets they are those of `[evaluate]` itself, or of the first one where it has none."""
    lines = list(read_lines(path))
    name = min((line.get("name", "") for line in lines), key=lambda name: name != "", default="")
    by_version = {line["version"]: line for line in lines if line.get("name", "") == name}
    return [by_version[version] for version in sorted(by_version)]


def _audited(path: Path) -> tuple[Audit | None, str]:
    try:
        found = audit(path)
    except (ConfigError, JournalError) as error:
        return None, str(error)
    return found, str(found)


def _devices(config: Config) -> Iterator[tuple[str, str]]:
    """Yields the host and device of each worker, as the config places them. Each worker that joins is taken to have a
    host of its own."""
    for spec in service_specs(config):
        joined = config.fleet.joined.get(spec.name, 0)
        workers = spec.devices or [(str(device_of(config, spec)),)] * max(1, joined)
        for number, names in enumerate(workers):
            yield from ((f"{spec.name}{number}" if joined else "", name) for name in names)


# Says in the report what a policy that acts came to, and holds the picture of its last evaluation.


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
    yield "trained transitions per second", trained_per_second(run)
    yield "oldest trained transition", oldest_trained(run)
    yield "lost episodes", f"{sum(numbers_of(run, 'environment/lost_episodes')):,.0f}"


def newest_picture(run: RunRecord) -> EpisodePicture | None:
    """Returns the picture of the last evaluation that has one; None where there is none, or it is too large."""
    paths = [each for each in RunDirectory(run.path).answers.glob("*.gif") if each.stem.isdecimal()]
    newest = max(paths, key=lambda path: int(path.stem), default=None)
    if newest is None or newest.stat().st_size > MOST_BYTES:
        return None
    data = base64.b64encode(Path(newest).read_bytes()).decode()
    return EpisodePicture(int(newest.stem), f"data:image/gif;base64,{data}")


def trained_per_second(run: RunRecord) -> str:
    return f"{sum(numbers_of(run, 'tokens/trained')) / run.seconds[-1]:,.0f}" if run.seconds[-1] else "-"


def oldest_trained(run: RunRecord) -> str:
    return f"{max(numbers_of(run, 'staleness/max'), default=0.0):.0f} versions"


def _newest(run: RunRecord, metric: str) -> str:
    found = numbers_of(run, metric)
    return f"{found[-1]:,.6g}" if found else "-"


def _evaluated(run: RunRecord) -> str:
    if not run.evaluations:
        return "-"
    last = run.evaluations[-1]
    if last["mean"] is None:
        return f"unknown at version {last['version']}"
    interval = "" if last["low"] is None else f" [{last['low']:.5g} - {last['high']:.5g}]"
    return f"{last['mean']:.5g}{interval} at version {last['version']}"

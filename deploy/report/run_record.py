"""Reads what a run left in its directory."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.schema import Config
from asyncrl.config.sources import read
from asyncrl.controller.journal.audit import Audit, audit
from asyncrl.deploy.service_specs import device_of, service_specs
from asyncrl.errors import ConfigError, JournalError
from asyncrl.telemetry.jsonl import Object, read_lines, read_metrics
from asyncrl.telemetry.run_directory import NO_RUN, RunDirectory, missing_run
from asyncrl.telemetry.samples_file import SampleRecord, read_samples
from asyncrl.telemetry.screen.warning_recap import repeated


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

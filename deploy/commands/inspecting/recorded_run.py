"""Finds in a run directory what was recorded, and a state from which it can be replayed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from asyncrl.config.install_hints import program
from asyncrl.engines.training.batch.train_rows import TrainRow, columns_of, train_rows
from asyncrl.errors import ConfigError
from asyncrl.fleet.worker.worker_spec import WorkerSpec
from asyncrl.lanes.data.recorder import LEARNING, REPLAYED, is_whole, read_records, recorded_instances
from asyncrl.protocols.batch import Array, Batch, BatchRef, Column, Cuts, SampleName
from asyncrl.telemetry.run_directory import NO_RUN, RunDirectory, missing_run


@dataclass(frozen=True, slots=True)
class RecordedWorker:
    """The records of one instance. spec: as it was started."""

    run_dir: Path
    spec: WorkerSpec

    @property
    def records(self) -> Iterator[Any]:
        return read_records(RunDirectory(self.run_dir).recorded, self.spec.instance)

    @property
    def versions(self) -> list[int]:
        """Returns the versions from which batches were learnt, in order, without one whose rows may be forgotten; none
        of a service that does not learn."""
        found = [
            record[3][0].version
            for record in self.records
            if record[0] == "call" and record[2] in LEARNING and isinstance(record[3][0], Cuts)
        ]
        is_all = is_whole(RunDirectory(self.run_dir).recorded, self.spec.instance)
        return list(dict.fromkeys(found))[0 if is_all else 1 :]

    def start(self, version: int) -> tuple[int, Path | None]:
        """Returns the newest version up to `version` of which there is a state, and its checkpoint; None: the beginning
        of the run. Raises ConfigError where there is none."""
        recorded = self.versions
        states = dict[int, Path | None]()
        if (first := self.spec.facts.checkpoint_dir) is None:
            states[0] = None
        elif first.exists():
            states[int(first.name)] = first
        folder = RunDirectory(self.run_dir).checkpoints
        for path in folder.iterdir() if folder.exists() else ():
            if path.name.isdigit():
                states[int(path.name)] = path
        usable = [each for each in states if each in recorded and each <= version]
        if not usable:
            text = f"steps {recorded[0] + 1} to {recorded[-1] + 1} are recorded" if recorded else "no step is recorded"
            raise ConfigError(
                f"--from: no state before step {version + 1} is left: {text}, and there are checkpoints of versions "
                f"{', '.join(map(str, sorted(states))) or '(none)'}; keep more (training.keep_checkpoints), or replay "
                "from a later step"
            )
        return max(usable), states[max(usable)]

    def records_from(self, version: int) -> Iterator[Any]:
        """Returns the records since the call before the one that learnt from `version`. The trainer reads the rows of a
        batch while the batch before it is trained, or before that: for it they begin where that call came or those rows
        were prefetched, without calls that learnt from earlier versions; else where the call before ended."""
        begins = 0
        prefetched = dict[SampleName, int]()
        wanted = list[SampleName]()
        for number, record in enumerate(self.records):
            learns = record[0] == "call" and record[2] in LEARNING
            if learns and record[3][0].version >= version:
                wanted = [row.name for row in record[3][0].batch] if record[2] == "step" else []
                break
            if record[0] == "call" and record[2] == "prefetch":
                prefetched |= {row.name: number for row in record[3][0] if row.name not in prefetched}
            if learns if self.spec.service == "training" else record[0] in ("answer", "failed"):
                begins = number + 1
        begins = min([begins, *(prefetched[name] for name in wanted if name in prefetched)])
        return (record for record in islice(self.records, begins, None) if not _learnt_before(record, version))

    def batch(self, version: int) -> tuple[Cuts, list[TrainRow]]:
        """Returns the batch that was trained from a version. Raises ConfigError when it is not recorded."""
        rows: dict[SampleName, dict[str, Array]] = {}
        cuts: Cuts | None = None
        for record in self.records:
            match record:
                case "read", list(names), list(), Batch() as batch:
                    for number, name in enumerate(names):
                        found = rows.setdefault(tuple(name), {})
                        found |= {column: values[number] for column, values in batch.columns.items()}
                case "call", _, "step", [Cuts() as each] if each.version == version:
                    cuts = each
                case "answer", *_ if cuts is not None and all(row.name in rows for row in cuts.batch):
                    break
        if cuts is None:
            raise ConfigError(f"step {version + 1} is not recorded")
        return cuts, _joined(cuts.batch, rows, self.spec)


def _learnt_before(record: Any, version: int) -> bool:
    return record[0] == "call" and record[2] in LEARNING and record[3][0].version < version


def _joined(refs: BatchRef, rows: dict[SampleName, dict[str, Array]], spec: WorkerSpec) -> list[TrainRow]:
    config = spec.facts.config
    columns = {name: Column.of([rows[row.name][name] for row in refs]) for name in columns_of(config)}
    return train_rows(refs, Batch(columns), config.generation.temperature)


def recorded_worker(run_dir: Path, service: str, replica: int) -> RecordedWorker:
    """Returns the newest recorded instance of a worker. Raises ConfigError when there is none, or it cannot be
    replayed."""
    if not RunDirectory(run_dir).started_before:
        raise missing_run(run_dir, NO_RUN)
    folder = RunDirectory(run_dir).recorded
    instances = recorded_instances(folder)
    if service not in REPLAYED:
        raise ConfigError(f"--service: {service} is not recorded; those that are: {', '.join(REPLAYED)}")
    specs = [_spec(folder, each) for each in instances if each.startswith(f"{service}{replica}.0-")]
    if not specs:
        known = ", ".join(sorted({each.partition(".")[0] for each in instances})) or "nothing"
        raise ConfigError(
            f"{folder} has no records of {service}{replica}, but of {known}: record a run with "
            f"`{program()} run NAME --record`"
        )
    spec = max(specs, key=lambda each: (each.facts.incarnation, _age(folder, each.instance)))
    if spec.layout.size > 1:
        raise ConfigError(f"{service} has {spec.layout.size} ranks, which exchange gradients: replay a run with one")
    return RecordedWorker(run_dir, spec)


def _age(folder: Path, instance: str) -> float:
    return max(path.stat().st_mtime for path in folder.glob(f"{instance}.[0-9]*"))


def _spec(folder: Path, instance: str) -> WorkerSpec:
    """Raises ConfigError when the records of an instance are empty: it was killed before it wrote any."""
    match next(read_records(folder, instance), None):
        case "worker", str(text):
            return WorkerSpec.from_json(text)
    raise ConfigError(f"{folder}/{instance}: its first file, which names the worker, is empty")


def steps_from(arguments: Sequence[int | None], recorded: Sequence[int]) -> tuple[int, int]:
    """Returns the first and the last version to replay from, for the asked steps. Raises ConfigError for
    one that is not recorded."""
    first, last = (None if step is None else step - 1 for step in arguments)
    for flag, version in (("--from", first), ("--to", last)):
        if version is not None and version not in recorded:
            raise ConfigError(f"{flag}: steps {recorded[0] + 1} to {recorded[-1] + 1} are recorded, not {version + 1}")
    return (recorded[0] if first is None else first), (recorded[-1] if last is None else last)

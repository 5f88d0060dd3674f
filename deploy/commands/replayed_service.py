"""Gives a service in this process what a worker was given: the calls, and the rows that it read, in their order.

record "call" ──> a task calls the service ──> reads rows: waits until a record "read" has them
record "answer" ──> waits for the task, compares answer and tensors
"""

import asyncio
import operator
import re
import secrets
import shutil
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from transformers.utils import logging

from asyncrl.config.install_hints import program
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow, columns_of, train_rows
from asyncrl.engines.training.training_step import StepOutcome, run_step
from asyncrl.errors import AsyncrlError, ConfigError, DeadlineExceeded
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.fleet.worker.service import Service, WorkerContext, load_implementation
from asyncrl.fleet.worker.worker_spec import Addresses, WorkerSpec
from asyncrl.lanes.control.wire import InprocWire, Wakeup
from asyncrl.lanes.data.recorder import LEARNING, REPLAYED, is_whole, read_records, recorded_instances
from asyncrl.lanes.data.row_reader import Cells, RowReader
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.lanes.shared_memory import unlink_run_segments
from asyncrl.protocols.batch import Array, Batch, BatchRef, Column, Cuts, SampleName
from asyncrl.telemetry.run_directory import NO_RUN, RunDirectory, missing_run
from asyncrl.telemetry.state_clock import Occupancy, StateClock
from asyncrl.telemetry.trace import Tracer

# Finds in a run directory what was recorded, and a state from which it can be replayed.


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


Signature = tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]
Difference = tuple[str, Any, Any]
IGNORED = ("published", "places", "place", "seconds")
"""Fields that say where something is, or how long it took, which differs at each start."""


def differences(recorded: Any, found: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields the place, the recorded and the found value of each difference. Floats that are not numbers are equal."""
    one = _parts(recorded)
    other = _parts(found)
    if one is None or other is None or type(recorded) is not type(found):
        if not _same(recorded, found):
            yield place, recorded, found
        return
    if one.keys() != other.keys():
        yield place, f"{len(one)} parts", f"{len(other)} parts"
    for name in one.keys() & other.keys() if isinstance(recorded, Mapping) else one:
        if name in other and name not in IGNORED:
            yield from differences(one[name], other[name], f"{place}.{name}" if place else str(name))


def _parts(value: Any) -> Mapping[Any, Any] | None:
    """Returns the named parts of a value; None for one without parts."""
    if isinstance(value, np.ndarray | str | bytes):
        return None
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return dict(value._asdict())
    if isinstance(value, Mapping):
        return value
    return dict(enumerate(value)) if isinstance(value, Sequence) else None


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return bool(one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes())
    return bool(one == other or (one != one and other != other))


@dataclass(frozen=True, slots=True)
class ReplayedCall:
    """One call and where its outcome differs from the recorded one. tensors: those that differ, in the order of the
    model, with recorded and found norm."""

    method: str
    args: Sequence[Any]
    differences: Sequence[Difference]
    tensors: Sequence[Difference] = ()
    tensor_count: int = 0


@dataclass
class RecordedReads:
    """The rows that a worker read, in the order of its reads of the same rows."""

    deadline: float
    _reads: dict[Signature, deque[Batch]] = field(default_factory=lambda: defaultdict(deque))
    _came: Wakeup = field(default_factory=Wakeup)

    def add(self, names: Iterable[Iterable[int]], columns: Iterable[str], rows: Batch) -> None:
        self._reads[tuple(map(tuple, names)), tuple(columns)].append(rows)
        self._came.wake()

    async def next(self, refs: BatchRef, columns: Sequence[str]) -> Batch:
        """Returns the rows of the next read of these. Raises DeadlineExceeded when none was recorded."""
        signature = (tuple(tuple(row.name) for row in refs), tuple(columns))
        try:
            async with asyncio.timeout(self.deadline):
                while not self._reads[signature]:
                    await self._came.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"this build reads columns {', '.join(columns)} of {len(refs)} rows, which the recorded one did not"
            ) from None
        return self._reads[signature].popleft()


class ReplayReader(RowReader):
    """Reads what was recorded."""

    def __init__(self, reads: RecordedReads, wire: InprocWire, spec: WorkerSpec) -> None:
        super().__init__(wire, spec.hello)
        self._recorded = reads

    async def read(self, refs: BatchRef, columns: Sequence[str]) -> Batch:
        return await self._recorded.next(refs, columns)

    @asynccontextmanager
    async def views(self, refs: BatchRef, columns: Sequence[str]) -> AsyncIterator[Cells]:
        rows = await self._recorded.next(refs, columns)
        yield {name: list(rows[name]) for name in columns}


@dataclass
class KeptRows:
    """Compares the rows that a service keeps with those that it kept, which come in the order of its calls. unordered:
    values that a critic computed beside an update, before it now and after it then, or the reverse: they are not
    compared, because the order of computations inside a worker is not recorded."""

    recorded: dict[SampleName, deque[Batch]] = field(default_factory=lambda: defaultdict(deque))
    found: dict[SampleName, deque[Mapping[str, Array]]] = field(default_factory=lambda: defaultdict(deque))
    unordered: int = 0

    def kept(self, sample: SampleName, columns: Mapping[str, Array]) -> None:
        self.found[sample].append(columns)

    def differences(self) -> Iterator[Difference]:
        """Yields those of the rows that both have by now, which are forgotten."""
        for sample, batches in self.recorded.items():
            while batches and self.found[sample]:
                columns = self.found[sample].popleft()
                batch = batches.popleft()
                row = {name: column[0] for name, column in batch.columns.items()}
                if any(name.endswith(VALUED_AT) and row[name] != columns[name] for name in row if name in columns):
                    self.unordered += 1
                    continue
                yield from differences(row, dict(columns), f"row {'.'.join(map(str, sample))}")


VALUED_AT = "valued_at"
"""Column of the updates that a critic had taken before it computed a value, with a prefix for costs."""


class _ReplayEnded(Exception):
    """Leaves the task group of a worker, which cancels the tasks that still run."""


def spec_here(recorded: WorkerSpec, folder: Path, checkpoint: Path | None) -> WorkerSpec:
    """Returns the specification of the recorded worker, for a worker in this process. folder: takes what it prints."""
    name = secrets.token_hex(4)
    facts = replace(
        recorded.facts, run=name, run_dir=folder, weights_arena=f"asyncrl-{name}-0-weights", checkpoint_dir=checkpoint
    )
    return replace(recorded, addresses=Addresses.inproc(recorded.instance), facts=facts)


async def replay(
    recorded: WorkerSpec,
    records: Iterable[Any],
    checkpoint: Path | None,
    take: Callable[[ReplayedCall], bool],
    deadline: float,
) -> int:
    """Calls `take` with each recorded call once it was answered again, until it returns False. Returns the number of
    rows that could not be compared.

    checkpoint: what the service loads; None: it begins as at the first start of a run. deadline: seconds that a
    call may take. Raises what the start of the service raises.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-replay-") as folder:
        spec = spec_here(recorded, Path(folder), checkpoint)
        kept = KeptRows()
        try:
            async with asyncio.TaskGroup() as tasks:
                with closing(ThreadCompute(Occupancy(clock := StateClock(time.monotonic)))) as compute:
                    reads = RecordedReads(deadline)
                    context = _context(spec, reads, kept, compute, clock, tasks)
                    service = load_implementation(spec.implementation)(context)
                    try:
                        await service.begin()
                        await service.started()
                        await _call_again(service, records, reads, kept, take, deadline)
                    finally:
                        await service.stop()
                raise _ReplayEnded
        except* _ReplayEnded:
            pass
        finally:
            unlink_run_segments(spec.facts.run)
    return kept.unordered


def _context(
    spec: WorkerSpec,
    reads: RecordedReads,
    kept: KeptRows,
    compute: ThreadCompute,
    clock: StateClock,
    tasks: asyncio.TaskGroup,
) -> WorkerContext:
    log = structlog.get_logger()
    tracer = Tracer(None, spec.service)
    reader: Any = ReplayReader(reads, InprocWire(), spec)
    recorder: Any = kept
    return WorkerContext(
        spec, reader, compute, clock, compute.occupancy, tracer, log, tasks, _private_rows, recorder=recorder
    )


def _private_rows(slots: int, row_bytes: int) -> RowStore:
    return RowStore.private("inproc://replay", slots, row_bytes)


async def _call_again(
    service: Service,
    records: Iterable[Any],
    reads: RecordedReads,
    kept: KeptRows,
    take: Callable[[ReplayedCall], bool],
    deadline: float,
) -> None:
    running: dict[int, tuple[str, Sequence[Any], asyncio.Task[_Outcome]]] = {}
    for record in records:
        match record:
            case "call", int(number), str(method), list(args):
                call = getattr(service, method)(*args)
                running[number] = method, args, service.context.tasks.create_task(_outcome(call), name=method)
                await asyncio.sleep(0)
            case "read", list(names), list(columns), Batch() as rows:
                reads.add(names, columns, rows)
            case "kept", list(sample), Batch() as rows:
                kept.recorded[tuple(sample)].append(rows)
            case "answer", int(number), answer, dict(tensors) if number in running:
                method, called, task = running.pop(number)
                recorded = _Outcome(answer, tensors=tensors)
                if not take(await _compared(service, method, called, recorded, await _within(deadline, task), kept)):
                    return
            case "failed", int(number), str(error), str(text) if number in running:
                method, called, task = running.pop(number)
                recorded = _Outcome(error=error, text=text)
                if not take(await _compared(service, method, called, recorded, await _within(deadline, task), kept)):
                    return


@dataclass(frozen=True, slots=True)
class _Outcome:
    """An answer, or the class and text of an error. tensors: digest and norm of those that a call may change."""

    answer: Any = None
    error: str = ""
    text: str = ""
    tensors: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.error}: {self.text}" if self.error else "an answer"


async def _within(seconds: float, task: "asyncio.Task[_Outcome]") -> _Outcome:
    async with asyncio.timeout(seconds):
        return await task


async def _outcome(call: Awaitable[Any]) -> _Outcome:
    try:
        return _Outcome(await call)
    except AsyncrlError as error:
        return _Outcome(error=type(error).__name__, text=str(error))


async def _compared(
    service: Service, method: str, args: Sequence[Any], recorded: _Outcome, found: _Outcome, kept: KeptRows
) -> ReplayedCall:
    if recorded.error or found.error:
        same = recorded.error == found.error
        return ReplayedCall(method, args, [] if same else [("outcome", str(recorded), str(found))])
    tensors = list(_tensor_differences(recorded.tensors, await service.tensor_digests())) if recorded.tensors else []
    parts = [*differences(recorded.answer, found.answer), *kept.differences()]
    return ReplayedCall(method, args, parts, tensors, len(recorded.tensors))


def _tensor_differences(
    recorded: Mapping[str, Sequence[Any]], found: Mapping[str, tuple[str, float]]
) -> Iterator[Difference]:
    for name, (digest, norm) in recorded.items():
        if name not in found:
            yield name, norm, None
        elif found[name][0] != digest:
            yield name, norm, found[name][1]


# Shrinks a batch to the smallest set of groups with which its step still shows what is wrong: delta debugging (Zeller
# and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", TSE 2002, section 3: ddmin).


OPERATORS = {">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le}
CONDITION = re.compile(r"\s*([\w/.@-]+)\s*(>=|<=|>|<)\s*(-?[\d.]+(?:e-?\d+)?)\s*")
SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Condition:
    """Tells whether a step shows what is looked for: a metric beyond a bound, or "skipped": the trainer took no step,
    because loss or gradient was not finite."""

    text: str = SKIPPED

    def __post_init__(self) -> None:
        if self.text != SKIPPED and CONDITION.fullmatch(self.text) is None:
            raise ConfigError(f"--when: {self.text!r} is neither {SKIPPED!r} nor METRIC > NUMBER")

    def holds(self, outcome: StepOutcome) -> bool:
        """Raises ConfigError for a metric that the step does not have."""
        if self.text == SKIPPED:
            return bool(outcome.skipped)
        found = CONDITION.fullmatch(self.text)
        assert found is not None
        name, sign, bound = found.groups()
        if name not in outcome.metrics:
            raise ConfigError(f"--when: the step has no metric {name!r}; it has {', '.join(sorted(outcome.metrics))}")
        return bool(OPERATORS[sign](outcome.metrics[name], float(bound)))


def smallest(groups: Sequence[int], shows: Callable[[Sequence[int]], bool]) -> list[int]:
    """Returns a set of groups that shows it and from which none can be left out. shows: tries some groups, and is
    true of all."""
    kept = list(groups)
    parts = 2
    while len(kept) > 1:
        size = -(-len(kept) // parts)
        chunks = [kept[at : at + size] for at in range(0, len(kept), size)]
        rests = [[group for group in kept if group not in chunk] for chunk in chunks]
        found = next((each for each in (*chunks, *rests) if 0 < len(each) < len(kept) and shows(each)), None)
        if found is not None:
            parts = 2 if found in chunks else max(parts - 1, 2)
            kept = found
        elif parts >= len(kept):
            return kept
        else:
            parts = min(len(kept), 2 * parts)
    return kept


class StepTrials:
    """Repeats one step with some of its groups, each time from the same state."""

    def __init__(self, trainer: PolicyTrainer, spec: WorkerSpec) -> None:
        logging.disable_progress_bar()  # transformers shows one for each file of a model that it writes.
        self._spec = spec
        self._state = Path(tempfile.mkdtemp(prefix="asyncrl-step-"))
        trainer.save(self._state, {})

    def close(self) -> None:
        shutil.rmtree(self._state)

    def outcome(self, rows: Sequence[TrainRow], incarnation: int, version: int) -> StepOutcome:
        return run_step(_trainer(self._spec, self._state), rows, incarnation, version)


def trainer_at(worker: RecordedWorker, version: int) -> PolicyTrainer:
    """Returns the trainer before the step from `version`, by training the recorded steps before it."""
    begin, checkpoint = worker.start(version)
    trainer = _trainer(worker.spec, checkpoint)
    for earlier in worker.versions:
        if begin <= earlier < version:
            cuts, rows = worker.batch(earlier)
            run_step(trainer, rows, cuts.incarnation, earlier)
    return trainer


def _trainer(spec: WorkerSpec, checkpoint: Path | None) -> PolicyTrainer:
    facts = spec.facts
    config = spec.facts.config
    texts = Path(spec.options["pretrain"]) if config.algorithm.pretrain_coefficient > 0 else None
    if checkpoint is None:
        return PolicyTrainer(config, facts.model_dir, None, texts)
    return PolicyTrainer.resume(config, checkpoint, None, texts, facts.model_dir)[0]

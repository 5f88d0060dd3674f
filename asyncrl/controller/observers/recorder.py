"""Records a run: metrics, samples and evaluations, from the events of the controller.

    events -> queue -> Recorder.run -> metrics.jsonl, samples.jsonl, evaluations.jsonl -> sinks, display

The controller never waits for the recorder between two steps. A checkpoint is committed, and a run ends, once its
steps are written: also a run that fails, which waits for answers of workers no longer than LAST_ANSWERS.
Rows that training would free before their texts are read wait in ShownRows.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, TypeVar

from asyncrl.concurrency import running_beside, to_its_end
from asyncrl.controller.journal.ledger import Dropped, SampleKey
from asyncrl.controller.observers.evaluation import Evaluation, code_metrics
from asyncrl.controller.observers.events import Event, SampleScored, StepBegan, StepDone
from asyncrl.controller.observers.step_metrics import (
    WorkerMetrics,
    batch_metrics,
    equal_texts,
    report_metrics,
    step_of,
    term_metric,
)
from asyncrl.errors import AsyncrlError, FleetFailed, Retryable
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.batch import BatchRef, RowRef, SampleName
from asyncrl.protocols.messages import Health, SampleText, TrainedSample
from asyncrl.telemetry.jsonl import LineFile
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.samples_file import SampleRecord, SamplesFile, sample_record
from asyncrl.telemetry.sinks import SinkWorker

# ---- rows that are shown -------------------------------------------------------------------------------------------


class ShownRows:
    """Samples of steps whose texts have yet to be read: what is released of them meanwhile waits until then."""

    def __init__(self) -> None:
        self._release: Callable[[Iterable[SampleName]], None] = lambda names: None
        self._uses = Counter[SampleKey]()
        self._waiting: dict[SampleKey, list[SampleName]] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def released_by(self, release: Callable[[Iterable[SampleName]], None]) -> None:
        self._release = release

    def keep(self, samples: Iterable[SampleKey]) -> None:
        self._uses.update(samples)

    def let_go(self, samples: Iterable[SampleKey]) -> None:
        """Ends one `keep` of each of these samples, and releases those that nobody reads any more."""
        free: list[SampleName] = []
        for key in samples:
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key]
                free += self._waiting.pop(key, ())
        if free:
            self._release(free)

    def take(self, names: Iterable[SampleName]) -> list[SampleName]:
        """Returns those that may be released now; the others wait."""
        free = []
        for name in names:
            if name[:2] in self._uses:
                self._waiting.setdefault(name[:2], []).append(name)
            else:
                free.append(name)
        return free

    def oldest(self, in_flight: int) -> int:
        """Returns the first group whose rows a service has to keep, given the first one in flight."""
        return min((in_flight, *(group for group, _ in self._uses)))


WAITING_EVENTS = 100_000
"""Bound of the queue: far more than the samples of all groups in flight; reaching it means that the disk hangs."""

LAST_ANSWERS = 3.0
"""Seconds that the end of a run waits for texts and health of its last steps, which living workers send in 50 ms."""

T = TypeVar("T")
Key = tuple[int, int]  # group, member: what an earlier attempt was worth is overwritten
Metrics = dict[str, float]


@dataclass
class Recorder:
    """Writes the files of a run directory. show: takes the metrics and a sample of each step. sinks: get metrics.
    shown: keeps the rows of samples until their texts are read. paused: returns for how many seconds the run was paused
    since it was asked before. samples_bytes: most bytes of samples.jsonl. warn: takes what could not be written."""

    directory: RunDirectory
    fleet: Fleet
    poll_health: Callable[[], Coroutine[Any, Any, Sequence[Health]]]
    incarnation: int
    show: Callable[[Mapping[str, float], SampleRecord | None], None]
    sinks: Sequence[SinkWorker] = ()
    shown: ShownRows = field(default_factory=ShownRows)
    paused: Callable[[], float] = float
    samples_bytes: int = 10**9
    warn: Callable[[str], None] = lambda text: None
    turn_discount: float | None = None

    def __post_init__(self) -> None:
        self._metrics = LineFile(self.directory.metrics)
        self._samples = SamplesFile(self.directory.samples, self.samples_bytes)
        self._evaluations = LineFile(self.directory.evaluations)
        self._events: asyncio.Queue[tuple[Event, float]] = asyncio.Queue(WAITING_EVENTS)
        self._terms: dict[Key, Mapping[str, float]] = {}
        self._texts: dict[Key, SampleText] = {}
        self._texts_lost = False
        self._dropped: Counter[str] = Counter()
        self._evaluated: list[Evaluation] = []
        self._workers = WorkerMetrics()
        self._began = asyncio.get_running_loop().time()
        self._last_step = self._began
        self._until: float | None = None
        self._answer: asyncio.Timeout | None = None
        self._ended = asyncio.Event()

    def observe(self, event: Event) -> None:
        """Takes an event without waiting. Raises FleetFailed when far too many events are not written yet."""
        if isinstance(event, SampleScored):
            self._terms[event.sample.key] = event.score.terms
            return
        if isinstance(event, StepBegan):
            self.shown.keep(row.key for row in event.recorded)
        try:
            self._events.put_nowait((event, asyncio.get_running_loop().time()))
        except asyncio.QueueFull:
            raise FleetFailed(
                f"{self._events.maxsize:,} events wait to be written below {self.directory.path}: its disk takes no "
                "writes any more; look at that disk or mount"
            ) from None

    def terms_of(self, samples: Iterable[Key]) -> dict[Key, Mapping[str, float]]:
        return {key: self._terms[key] for key in samples if key in self._terms}

    def restore_terms(self, terms: Mapping[Key, Mapping[str, float]]) -> None:
        """Takes the terms of samples that were scored before a resume."""
        self._terms.update(terms)

    async def run(self) -> None:
        try:
            while True:
                await self._handle(*await self._events.get())
                self._events.task_done()
        finally:
            self._ended.set()

    @asynccontextmanager
    async def recording(self) -> AsyncIterator[None]:
        """Writes beside a block what is observed, to the last event, however the block ends."""
        async with running_beside({"recorder": self.run()}):
            try:
                yield
            finally:
                await to_its_end(self._finish())

    async def _finish(self) -> None:
        self._until = asyncio.get_running_loop().time() + LAST_ANSWERS
        if self._answer is not None:  # The recorder waits for it.
            self._answer.reschedule(self._until)
        rest = [asyncio.ensure_future(each) for each in (self.drain(), self._ended.wait())]
        await asyncio.wait(rest, return_when=asyncio.FIRST_COMPLETED)  # No wait for an answer is longer now.
        for each in rest:
            each.cancel()

    async def drain(self) -> None:
        """Returns when everything observed so far is written."""
        await self._events.join()

    def close(self) -> None:
        for file in (self._metrics, self._evaluations):
            file.close()
        self._samples.close()
        for sink in self.sinks:
            sink.close()

    def evaluated(self, evaluation: Evaluation) -> None:
        """Writes one evaluation; sinks get it under its version, `metrics.jsonl` with the first step after that version
        that is not written yet: steps may be written later than they end."""
        self._evaluations.append({"incarnation": self.incarnation, **asdict(evaluation)})
        self._send(evaluation.version, evaluation.metrics())
        self._evaluated.append(evaluation)

    async def _handle(self, event: Event, observed: float) -> None:
        """Records an event. observed: when it happened."""
        match event:
            case Dropped(group, members, reason):
                self._dropped[reason] += len(members)
                self._forget((group, member) for member in members)
            case StepBegan():
                try:
                    self._texts = await self._read_texts(event.recorded)
                finally:
                    self.shown.let_go(row.key for row in event.recorded)
            case StepDone():
                await self._step(event, observed)

    async def _read_texts(self, rows: Sequence[RowRef]) -> dict[Key, SampleText]:
        try:
            texts = await self._answered(self.fleet.generation.texts(BatchRef(tuple(rows))), None)
        except AsyncrlError as error:
            if self._until is None and not isinstance(error, Retryable):
                raise
            texts = None  # The worker of the texts died.
        self._texts_lost = texts is None
        return {(text.group, text.member): text for text in texts or ()}

    async def _answered(self, call: Coroutine[Any, Any, T], otherwise: T) -> T:
        """Returns the answer of workers; `otherwise` when a run that ends waits no longer."""
        try:
            async with asyncio.timeout_at(self._until) as answer:
                self._answer = answer
                return await call
        except TimeoutError:
            if answer.expired():
                return otherwise
            raise
        finally:
            self._answer = None

    async def _step(self, done: StepDone, now: float) -> None:
        metrics: Metrics = {"step": step_of(done.report), "time": now - self._began, "incarnation": self.incarnation}
        metrics |= done.staleness
        episodes = self.fleet.environment is not None
        metrics |= batch_metrics(done.cuts.batch, episodes=episodes, turn_discount=self.turn_discount)
        metrics |= self._term_means(done.cuts.batch)
        metrics |= report_metrics(done.report, now - self._last_step)
        metrics |= {"perf/paused_s": seconds} if (seconds := self.paused()) else {}
        metrics |= {f"skipped/{done.report.skipped}": 1.0} if done.report.skipped else {}
        metrics |= {f"data/dropped/{reason}": float(count) for reason, count in sorted(self._dropped.items())}
        healths = await self._answered(self.poll_health(), [])
        metrics |= self._workers.since_last(healths) | self._evaluated_before(step_of(done.report))
        records = self._records(done)
        metrics |= equal_texts(records)
        if self._texts_lost:
            step = step_of(done.report)
            self.warn(f"samples.jsonl lacks samples of step {step}: the workers that had their texts did not answer")
        self._metrics.append(metrics)
        self._samples.append(records)
        if self._samples.is_full:
            await to_its_end(asyncio.to_thread(self._samples.thin_out))  # Another recorder may follow.
        self._forget(row.key for row in done.cuts.batch)
        if not done.report.skipped:  # Else the record of the next step includes these counts.
            self._dropped.clear()
            self._evaluated = [each for each in self._evaluated if each.version >= step_of(done.report)]
        self._last_step = now
        self._send(step_of(done.report), metrics, records)
        self.show(metrics, records[0] if records else None)

    def _evaluated_before(self, step: int) -> Metrics:
        """Returns the evaluations of versions before this step, the newest of each set."""
        metrics: Metrics = {}
        for each in self._evaluated:
            if each.version < step:
                metrics |= {**each.metrics(), each.metric("version"): each.version}
        return metrics

    def _send(self, step: int, metrics: Metrics, samples: Sequence[SampleRecord] = ()) -> None:
        for sink in self.sinks:
            sink.write(step, metrics, samples)

    def _records(self, done: StepDone) -> list[SampleRecord]:
        trained = {(sample.group, sample.member): sample for sample in done.report.samples}
        by_token = self.fleet.critic is not None  # Then a row carries its reward in place of an advantage.
        return [
            sample_record(
                step_of(done.report),
                row._replace(advantage=None) if by_token else row,
                self._texts[row.key],
                self._terms.get(row.key, {}),
                trained.get(row.key, TrainedSample(row.group, row.member, row.attempt, 0, row.tokens, "skipped")),
                done.report.skipped,
            )
            for row in done.cuts.batch
            if row.key in self._texts
        ]

    def _term_means(self, batch: BatchRef) -> Metrics:
        values: dict[str, list[float]] = {}
        samples = [self._terms.get(row.key, {}) for row in batch]
        for terms in samples:
            for name, value in terms.items():
                values.setdefault(name, []).append(value)
        return {term_metric(name): fmean(each) for name, each in values.items()} | code_metrics(samples)

    def _forget(self, gone: Iterable[Key]) -> None:
        for key in gone:
            self._terms.pop(key, None)

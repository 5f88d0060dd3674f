"""Generation services that only spend time: slots of one speed, and replicas that slow down by what they hold."""

import asyncio
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from io import BufferedIOBase
from pathlib import Path
from typing import TypeAlias

import numpy as np

from asyncrl.errors import AsyncrlError, LostRows, PeerLost, Refused
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.fleet.worker.worker_spec import RunFacts
from asyncrl.lanes.control.wire import Wakeup
from asyncrl.lanes.data.row_file import READY_ROWS, store_again
from asyncrl.lanes.data.row_store import RowStore
from asyncrl.lanes.weights.leases import must_flip
from asyncrl.protocols.batch import Array, BatchRef, RowRef, SampleName
from asyncrl.protocols.messages import PromptGroup, Published, SampleText, Using
from asyncrl.protocols.seeds import member_seed
from asyncrl.protocols.service_contracts import Generation
from asyncrl.simulation.fakes.fake_service import KEY, FakeService, inline, now

Lengths: TypeAlias = Callable[[random.Random], int]
"""Draws the number of tokens of one completion."""
Spans: TypeAlias = tuple[tuple[int, int], ...]
"""(version, number of tokens sampled at it) of one completion, in order."""


NO_VERSIONS: Array = np.zeros(0, np.int32)


def constant(tokens: int) -> Lengths:
    """Gives every completion the same length."""
    return lambda chance: tokens


def stragglers(tokens: int, share: float, times: int) -> Lengths:
    """Makes a share of the completions `times` as long as the others."""
    return lambda chance: tokens * times if chance.random() < share else tokens


def lognormal(median: int, sigma: float) -> Lengths:
    """Draws lengths with a long tail; sigma is the standard deviation of the logarithm."""
    return lambda chance: max(1, round(median * math.exp(chance.gauss(0.0, sigma))))


@dataclass(eq=False)
class FakeSequence:
    """Holds a completion that waits for a slot or is being sampled; `answers` is the stream of its group. before: the
    row of the turn before, of an episode that goes on, with the version of each token. cut: it ends at its deadline."""

    prompts: PromptGroup
    member: int
    tokens: int
    answers: asyncio.Queue[RowRef | AsyncrlError]
    before: "RowRef | None" = None
    versions_before: Array = field(default_factory=lambda: NO_VERSIONS)
    began: float = 0.0
    timer: asyncio.TimerHandle | None = None
    cut: bool = False

    @property
    def name(self) -> SampleName:
        return (self.prompts.id, self.member, self.prompts.attempt)


class FakeGeneration(FakeService, Generation):
    """Samples in `slots` slots, first come, first served; a token takes `token_time` seconds.

    The length of a completion depends on the seeds of its group and member only. Weights take `flip_time` seconds to
    load. busy: slot-seconds spent on completions, aborted ones included.
    """

    row_bytes = 65_536

    def __init__(
        self,
        slots: int,
        token_time: float,
        lengths: Lengths,
        flip_time: float = 0.0,
        context: WorkerContext | None = None,
    ) -> None:
        super().__init__("generation", context)
        self.slots = slots
        self.token_time = token_time
        self.lengths = lengths
        self.flip_time = flip_time
        self.busy = 0.0
        self._published: Published | None = None
        self._weights_changed = Wakeup()
        self._flips: list[tuple[float, int]] = []
        self._queue: deque[FakeSequence] = deque()
        self._sampling: dict[FakeSequence, None] = {}

    async def wait_for_weights(self, version: int) -> None:
        """Waits until these weights, or newer ones, sample."""
        while self.version < version:
            await self._weights_changed.wait()

    async def load_weights(self, published: Published) -> None:
        """Loads new weights while the old ones still sample."""
        deaths = self.deaths
        await asyncio.sleep(self.flip_time)
        self.check_alive(deaths)

    def columns(self, sequence: FakeSequence, spans: Spans) -> dict[str, Array]:
        """Returns the row of a finished completion: the version of each token, and the name of its sample."""
        versions, counts = zip(*spans, strict=True)
        stamps = np.concatenate([sequence.versions_before, np.repeat(np.array(versions, np.int32), counts)])
        return {"versions": stamps, KEY: np.array(sequence.name, np.int32)}

    @property
    def version(self) -> int:
        """Returns the version of the weights that sample now; -1 before the first ones."""
        return self._flips[-1][1] if self._flips else -1

    async def use_weights(self, published: Published) -> Using:
        await self.wait_until_alive()
        if not published.is_kept_for(self.instance):
            return Using((), published.version)
        if must_flip(self._published, published):
            await self.load_weights(published)
            if published.version > self.version:
                self._published = published
                self._flips.append((now(), published.version))
                self._fill_slots()
                self._weights_changed.wake()
        return Using((self.instance,), self.version)

    async def generate(self, prompts: PromptGroup) -> AsyncIterator[BatchRef]:
        await self.wait_until_alive()
        if prompts.incarnation != self.incarnation:
            raise Refused(
                f"group {prompts.id} belongs to incarnation {prompts.incarnation} of the run, this worker to "
                f"{self.incarnation}"
            )
        answers = asyncio.Queue[RowRef | AsyncrlError]()
        sequences = [await self._sequence(prompts, member, answers) for member in prompts.members]
        self._queue.extend(sequences)
        self._fill_slots()
        left = len(sequences)
        try:
            while left:
                finished = [await answers.get()]
                finished += [answers.get_nowait() for _ in range(answers.qsize())]
                left -= len(finished)
                yield BatchRef(tuple(map(_raised, finished)))
        finally:
            self._abort(sequences)

    async def _sequence(
        self, prompts: PromptGroup, member: int, answers: asyncio.Queue[RowRef | AsyncrlError]
    ) -> FakeSequence:
        before = next((row for row in prompts.continues or () if row.member == member), None)
        seed = member_seed(prompts.seed, member) + (before.turns if before is not None else 0)
        tokens = round(self.lengths(random.Random(seed)) * self.pace(now()))
        sequence = FakeSequence(prompts, member, min(tokens, prompts.max_new_tokens), answers, before)
        if before is not None:
            sequence.versions_before = (await self.read_checked(BatchRef((before,)), ["versions"]))["versions"][0]
            assert len(sequence.versions_before) == before.tokens, f"{before} led to the row of another turn"
        return sequence

    def open_file(self, directory: str, file: str) -> BufferedIOBase:
        """Opens a file of a checkpoint."""
        return (Path(directory) / file).open("rb") if self.disk is None else self.disk.open(directory, file)

    async def restore_rows(self, directory: str, samples: BatchRef) -> BatchRef:
        deaths = await self.wait_until_alive()
        with self.open_file(directory, READY_ROWS) as file:
            found = await store_again(file, samples, self.incarnation, self.keep, inline)
        self.check_alive(deaths)
        return found

    async def texts(self, refs: BatchRef) -> list[SampleText]:
        found = []
        for row in refs:
            assert self.rows is not None, "opened in `start`"
            try:
                (text,) = self.rows.read(row.places[0], ["text"])
            except LostRows:
                continue
            found.append(SampleText(row.group, row.member, "", bytes(text).decode()))
        return found

    async def renew(self, facts: RunFacts) -> None:
        await super().renew(facts)
        self._clear()

    async def stop(self) -> None:
        self._clear()
        await super().stop()

    def die(self) -> None:
        self._clear(PeerLost(f"{self.instance} died"))
        super().die()

    def groups_at_work(self) -> list[int]:
        """Returns the group of each sample that waits here or is being sampled."""
        return [sequence.prompts.id for sequence in (*self._queue, *self._sampling)]

    def _fill_slots(self) -> None:
        """Gives free slots to waiting sequences; those that need newer weights let the others pass."""
        late = [sequence for sequence in self._queue if sequence.prompts.not_before > self.version]
        ready = deque(sequence for sequence in self._queue if sequence.prompts.not_before <= self.version)
        while ready and len(self._sampling) < self.slots:
            sequence = ready.popleft()
            self._begin(sequence)
            self._sampling[sequence] = None
        self._queue = deque((*ready, *late)) if late else ready

    def _begin(self, sequence: FakeSequence) -> None:
        """Samples until the completion ends, or for as long as its deadline allows."""
        sequence.began = now()
        if sequence.tokens * self.token_time > sequence.prompts.deadline:
            sequence.tokens = max(1, math.floor(sequence.prompts.deadline / self.token_time))
            sequence.cut = True
        duration = sequence.tokens * self.token_time
        sequence.timer = asyncio.get_running_loop().call_later(duration, self.finish, sequence)

    def finish(self, sequence: FakeSequence) -> None:
        spans = self._spans(sequence)
        self._leave_slot(sequence)
        sequence.answers.put_nowait(self.row(sequence, spans))
        self._fill_slots()

    def _leave_slot(self, sequence: FakeSequence) -> None:
        del self._sampling[sequence]
        self.busy += now() - sequence.began
        if sequence.timer is not None:
            sequence.timer.cancel()

    def _abort(self, sequences: Iterable[FakeSequence]) -> None:
        aborted = set(sequences)
        self._queue = deque(sequence for sequence in self._queue if sequence not in aborted)
        for sequence in [sequence for sequence in self._sampling if sequence in aborted]:
            self._leave_slot(sequence)
        self._fill_slots()

    def _clear(self, error: AsyncrlError | None = None) -> None:
        """Drops all completions and the weights; every open stream raises the error if there is one."""
        streams = dict.fromkeys(sequence.answers for sequence in (*self._queue, *self._sampling))
        for sequence in list(self._sampling):
            self._leave_slot(sequence)
        self._queue.clear()
        self._flips.clear()
        self._published = None
        if error is not None:
            for answers in streams:
                answers.put_nowait(error)

    def row(self, sequence: FakeSequence, spans: Spans) -> RowRef:
        prompts = sequence.prompts
        before = sequence.before
        return RowRef(
            group=prompts.id,
            member=sequence.member,
            attempt=prompts.attempt,
            incarnation=prompts.incarnation,
            prompt_tokens=1,
            tokens=sequence.tokens + (before.tokens if before else 0),
            first=before.first if before else spans[0][0],
            last=spans[-1][0],
            finish="length" if sequence.cut or sequence.tokens == prompts.max_new_tokens else "stop",
            places=(self.keep(sequence.name, self.columns(sequence, spans)),),
            turns=before.turns + 1 if before else 1,
        )

    def tokens_at_flips(self, sequence: FakeSequence) -> list[float]:
        """Returns how far a sequence was at each change of weights; negative before it began."""
        return [(flip - sequence.began) / self.token_time for flip, _ in self._flips[1:]]

    def _spans(self, sequence: FakeSequence) -> Spans:
        """Token k is sampled in [began + k t, began + (k + 1) t) by the weights at the start of that step."""
        flipped = self.tokens_at_flips(sequence)
        ends = [min(sequence.tokens, max(0, math.ceil(end - 1e-6))) for end in flipped] + [sequence.tokens]
        starts = [0, *ends[:-1]]
        spans = zip((version for _, version in self._flips), starts, ends, strict=True)
        return tuple((version, end - start) for version, start, end in spans if end > start)


def _raised(answer: RowRef | AsyncrlError) -> RowRef:
    if isinstance(answer, AsyncrlError):
        raise answer
    return answer


# A generation service whose replicas decode the slower, the more sequences they hold.
#
# Every sequence of a replica gets a token in each decode step, so that one number tells how far all are: `sampled`,
# the tokens that a sequence that never ended would have. A sequence ends when that number has grown by its length.


StepSeconds: TypeAlias = Callable[[int], float]
"""Gives the seconds of a decode step of a replica with so many sequences."""
BYTES_OF_TOKEN = 4
BYTES_OF_ROW = 256
EARLY = 2e-6
"""Seconds by which a timer of the virtual loop may run too early."""


@dataclass(eq=False)
class DecodingReplica:
    """One replica. ends: `sampled` at which each running sequence ends. flips: `sampled` at each change of weights.
    busy: seconds with at least one sequence."""

    sampled: float = 0.0
    updated: float = 0.0
    running: dict[FakeSequence, float] = field(default_factory=dict)
    ends: list[tuple[float, int, FakeSequence]] = field(default_factory=list)
    flips: list[float] = field(default_factory=list)
    busy: float = 0.0
    paused_until: float = 0.0
    timer: asyncio.TimerHandle | None = None

    def advance(self, step: StepSeconds) -> None:
        """Brings `sampled` up to this moment."""
        time = now()
        if self.running:
            began = max(self.updated, min(self.paused_until, time))
            self.sampled += (time - began) / step(len(self.running))
            self.busy += time - self.updated
        self.updated = time

    def set_timer(self, step: StepSeconds, due: Callable[["DecodingReplica"], None]) -> None:
        """Calls `due` when the next sequence ends."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        while self.ends and self.ends[0][2] not in self.running:
            heapq.heappop(self.ends)
        if self.ends:
            left = max(0.0, self.ends[0][0] - self.sampled) * step(len(self.running))
            begin = max(now(), self.paused_until)
            self.timer = asyncio.get_running_loop().call_at(begin + left, due, self)


class FakeReplicas(FakeGeneration):
    """Samples on `replicas` of `slots` sequences each; a new sequence goes to the replica with the fewest.

    step: seconds of a decode step by the sequences of a replica. pause: seconds in which replicas decode nothing while
    they take new weights. rows: that it can store, of at most `longest` tokens.
    """

    def __init__(
        self, replicas: int, slots: int, step: StepSeconds, lengths: Lengths, *, pause: float, rows: int, longest: int
    ) -> None:
        self._rows_at_most = rows
        self.row_bytes = BYTES_OF_TOKEN * longest + BYTES_OF_ROW
        super().__init__(replicas * slots, step(1), lengths)
        self.replicas = [DecodingReplica() for _ in range(replicas)]
        self._slots_each = slots
        self._step = step
        self._pause = pause
        self._of: dict[FakeSequence, DecodingReplica] = {}
        self._order = itertools.count()

    def _begin_instance(self) -> None:
        self.instance = f"{self.service}0.0-1-{self.deaths:08x}"
        self.rows = RowStore.private(f"direct://{self.instance}", self._rows_at_most, self.row_bytes)

    async def use_weights(self, published: Published) -> Using:
        before = self.version
        found = await super().use_weights(published)
        if self.version > before >= 0:
            for replica in self.replicas:
                replica.advance(self._step)
                replica.flips.append(replica.sampled)
                replica.paused_until = now() + self._pause
                replica.set_timer(self._step, self._finish_due)
        return found

    def tokens_at_flips(self, sequence: FakeSequence) -> list[float]:
        replica = self._of[sequence]
        began = replica.running[sequence] - sequence.tokens
        return [flip - began for flip in replica.flips]

    def busy_seconds(self) -> list[float]:
        """Returns the seconds in which each replica has had work."""
        for replica in self.replicas:
            replica.advance(self._step)
        return [replica.busy for replica in self.replicas]

    def _begin(self, sequence: FakeSequence) -> None:
        replica = self._emptiest()
        replica.advance(self._step)
        sequence.began = now()
        self._of[sequence] = replica
        replica.running[sequence] = end = replica.sampled + sequence.tokens
        heapq.heappush(replica.ends, (end, next(self._order), sequence))
        replica.set_timer(self._step, self._finish_due)

    def _leave_slot(self, sequence: FakeSequence) -> None:
        replica = self._of.pop(sequence)
        replica.advance(self._step)
        del replica.running[sequence]
        replica.set_timer(self._step, self._finish_due)
        super()._leave_slot(sequence)

    def _emptiest(self) -> DecodingReplica:
        return min(self.replicas, key=lambda replica: len(replica.running))

    def _finish_due(self, replica: DecodingReplica) -> None:
        replica.advance(self._step)
        reached = replica.sampled + EARLY / self._step(max(1, len(replica.running)))
        while replica.ends and (replica.ends[0][2] not in replica.running or replica.ends[0][0] <= reached):
            sequence = heapq.heappop(replica.ends)[2]
            if sequence in replica.running:
                self.finish(sequence)
        replica.set_timer(self._step, self._finish_due)

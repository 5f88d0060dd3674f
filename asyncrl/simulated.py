"""Twins of the services on virtual time: no model, no tensor, only lengths, versions and deaths.

They implement the same contracts and keep the same promises as the real ones: versions are stamped a token, weights
flip between two of them, rows lie with their owner and vanish with it, a step is a compare-and-set that enforces the
staleness limit from the stamps, and a slot of the weight arena is written when no reader holds it any more.
Everything random is a function of the seed and of what it happens to, so that the same seed gives the same history.
"""

import asyncio
import math
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from asyncrl.errors import AsyncrlError, DeadlineExceeded, LostRows, PeerLost, Refused
from asyncrl.kept import Kept
from asyncrl.protocols.batch import BatchRef, Cuts, Place, RowRef, SampleName
from asyncrl.protocols.chain import GENESIS, chain
from asyncrl.protocols.contracts import Contract, Generation, Reference, Reward, Training
from asyncrl.protocols.messages import Checkpointed, PromptGroup, Published, Score, StepReport, TrainedSample, Using
from asyncrl.protocols.seeds import member_seed
from asyncrl.staleness import live
from asyncrl.together import together

Lengths: TypeAlias = Callable[[random.Random], int]
"""Tokens of one completion."""
Spans: TypeAlias = tuple[tuple[int, int], ...]
"""(version, tokens sampled at it) of one completion, in order."""

PUBLISH_PATIENCE = 60.0
"""Seconds the trainer waits for readers to leave the slot it wants to write."""


def constant(tokens: int) -> Lengths:
    """All completions are as long."""
    return lambda chance: tokens


def stragglers(tokens: int, share: float, times: int) -> Lengths:
    """A share of the completions is `times` as long as the others."""
    return lambda chance: tokens * times if chance.random() < share else tokens


def lognormal(median: int, sigma: float) -> Lengths:
    """A long tail; sigma: of the logarithm."""
    return lambda chance: max(1, round(median * math.exp(chance.gauss(0.0, sigma))))


class Host(Contract):
    """A worker that holds rows, dies and comes back as another instance.

    rows: what lies here, by slot. kept: of which samples. deaths: how often it died.
    """

    def __init__(self, service: str, columns: tuple[str, ...]) -> None:
        self.service, self.columns = service, columns
        self.deaths, self.written = 0, 0
        self.rows: dict[int, Spans] = {}
        self.kept = Kept()
        self._lives = asyncio.Event()
        self._lives.set()

    @property
    def instance(self) -> str:
        return f"{self.service}0.0-1-{self.deaths:08x}"

    def die(self) -> None:
        """All rows are gone, and every running call fails."""
        self.rows.clear()
        self.kept = Kept()
        self._lives.clear()

    def come_back(self) -> None:
        self.deaths += 1
        self._lives.set()

    async def lives(self) -> int:
        """Wait until it lives, as a handle does; returns what `still` compares with."""
        await self._lives.wait()
        return self.deaths

    async def work(self, seconds: float) -> None:
        """A pure call, repeated once. Raises PeerLost when the worker dies both times."""
        for _ in range(2):
            instance = await self.lives()
            await asyncio.sleep(seconds)
            if self.deaths == instance and self._lives.is_set():
                return
        raise PeerLost(f"{self.service} died twice in one call")

    def still(self, deaths: int) -> None:
        """Raises PeerLost when the instance that a call went to has died meanwhile."""
        if self.deaths != deaths or not self._lives.is_set():
            raise PeerLost(f"{self.service}0.0-1-{deaths:08x} died")

    def hold(self, sample: SampleName, spans: Spans) -> Place:
        self.written += 1
        self.rows[self.written] = spans
        place = Place(f"sim://{self.instance}", self.written, 0, self.columns)
        self._free(self.kept.add(sample, place))
        return place

    def holds(self, place: Place) -> bool:
        return place.owner == f"sim://{self.instance}" and place.slot in self.rows

    async def release(self, samples: list[SampleName], oldest: int) -> None:
        self._free(self.kept.let_go(samples, oldest))

    def _free(self, places: Iterable[Place]) -> None:
        for place in places:
            self.rows.pop(place.slot, None)

    async def idle_because(self, state: str) -> None:
        return


@dataclass(eq=False)
class Sequence:
    """A completion that waits for a slot or is being sampled; answers: its group's stream."""

    prompts: PromptGroup
    member: int
    tokens: int
    answers: asyncio.Queue[RowRef | AsyncrlError]
    began: float = 0.0
    timer: asyncio.TimerHandle | None = None

    @property
    def name(self) -> SampleName:
        return (self.prompts.id, self.member, self.prompts.attempt)


class SimulatedGeneration(Host, Generation):
    """Slots that sample one token each in `token_time` seconds, whoever else samples; first come, first served.

    busy: slot-seconds spent on completions, aborted ones included.
    """

    def __init__(self, slots: int, token_time: float, lengths: Lengths, flip_time: float = 0.0) -> None:
        super().__init__("generation", ("tokens", "versions", "logprobs"))
        self.slots, self.token_time, self.lengths, self.flip_time = slots, token_time, lengths, flip_time
        self.busy = 0.0
        self._flips: list[tuple[float, int]] = []
        self._waiting: deque[Sequence] = deque()
        self._running: dict[Sequence, None] = {}

    @property
    def version(self) -> int:
        return self._flips[-1][1] if self._flips else -1

    async def use_weights(self, published: Published) -> Using:
        instance = await self.lives()
        if not published.is_kept_for(self.instance):
            return Using((), published.version)
        await asyncio.sleep(self.flip_time)
        self.still(instance)
        if published.version > self.version:
            self._flips.append((_now(), published.version))
            self._fill()
        return Using((self.instance,), self.version)

    async def generate(self, prompts: PromptGroup) -> AsyncIterator[BatchRef]:
        await self.lives()
        answers = asyncio.Queue[RowRef | AsyncrlError]()
        sequences = [Sequence(prompts, member, self._length(prompts, member), answers) for member in prompts.members]
        self._waiting.extend(sequences)
        self._fill()
        try:
            left = len(sequences)
            while left:
                finished = await self._finished(answers)
                left -= len(finished)
                yield finished
        finally:
            self._abort(sequences)

    async def _finished(self, answers: asyncio.Queue[RowRef | AsyncrlError]) -> BatchRef:
        found = [await answers.get()]
        found += [answers.get_nowait() for _ in range(answers.qsize())]
        for answer in found:
            if isinstance(answer, AsyncrlError):
                raise answer
        return BatchRef(tuple(answer for answer in found if isinstance(answer, RowRef)))

    def die(self) -> None:
        streams = {id(s.answers): s.answers for s in (*self._waiting, *self._running)}
        for sequence in list(self._running):
            self._leave(sequence)
        self._waiting.clear()
        self._flips.clear()
        super().die()
        for answers in streams.values():
            answers.put_nowait(PeerLost(f"{self.instance} died"))

    def works_for(self) -> list[int]:
        """The group of each sample that waits here or is being sampled."""
        return [sequence.prompts.id for sequence in (*self._waiting, *self._running)]

    def _length(self, prompts: PromptGroup, member: int) -> int:
        tokens = self.lengths(random.Random(member_seed(prompts.seed, member)))
        return min(tokens, prompts.max_new_tokens)

    def _fill(self) -> None:
        """Give free slots to those that wait; a group that wants newer weights lets others pass."""
        late = [sequence for sequence in self._waiting if sequence.prompts.not_before > self.version]
        ready = deque(sequence for sequence in self._waiting if sequence.prompts.not_before <= self.version)
        while ready and len(self._running) < self.slots:
            sequence = ready.popleft()
            sequence.began = _now()
            duration = sequence.tokens * self.token_time
            sequence.timer = asyncio.get_running_loop().call_later(duration, self._finish, sequence)
            self._running[sequence] = None
        self._waiting = deque((*ready, *late)) if late else ready

    def _finish(self, sequence: Sequence) -> None:
        spans = self._spans(sequence)
        self._leave(sequence)
        sequence.answers.put_nowait(self._row(sequence, spans))
        self._fill()

    def _leave(self, sequence: Sequence) -> None:
        del self._running[sequence]
        self.busy += _now() - sequence.began
        if sequence.timer is not None:
            sequence.timer.cancel()

    def _abort(self, sequences: Iterable[Sequence]) -> None:
        wanted_no_more = {id(sequence) for sequence in sequences}
        self._waiting = deque(sequence for sequence in self._waiting if id(sequence) not in wanted_no_more)
        for sequence in [sequence for sequence in self._running if id(sequence) in wanted_no_more]:
            self._leave(sequence)
        self._fill()

    def keep(self, sequence: Sequence, spans: Spans) -> Place:
        """Store a finished completion."""
        return self.hold(sequence.name, spans)

    def _row(self, sequence: Sequence, spans: Spans) -> RowRef:
        prompts = sequence.prompts
        return RowRef(
            group=prompts.id,
            member=sequence.member,
            attempt=prompts.attempt,
            epoch=prompts.epoch,
            prompt_tokens=1,
            tokens=sequence.tokens,
            first=spans[0][0],
            last=spans[-1][0],
            finish="length" if sequence.tokens == prompts.max_new_tokens else "stop",
            places=(self.keep(sequence, spans),),
        )

    def _spans(self, sequence: Sequence) -> Spans:
        """Token k is sampled in [began + k t, began + (k + 1) t) by the weights at the start of that step."""
        until = [(flip - sequence.began) / self.token_time for flip, _ in self._flips[1:]]
        ends = [min(sequence.tokens, max(0, math.ceil(end - 1e-6))) for end in until] + [sequence.tokens]
        starts = [0, *ends[:-1]]
        spans = zip((version for _, version in self._flips), starts, ends, strict=True)
        return tuple((version, end - start) for version, start, end in spans if end > start)


class SimulatedReward(Host, Reward):
    """Scores after `delay` seconds; a share of the samples cannot be scored."""

    def __init__(self, delay: float, unscorable: float = 0.0) -> None:
        super().__init__("reward", ())
        self.delay, self.unscorable = delay, unscorable

    async def score(self, samples: BatchRef, row: dict[str, Any]) -> list[Score]:
        return await together(*(self._score(sample) for sample in samples))

    async def _score(self, sample: RowRef) -> Score:
        chance = random.Random(f"reward {sample.key}")
        await self.work(self.delay * chance.uniform(0.5, 1.5))
        reward = None if chance.random() < self.unscorable else float(chance.random() < 0.5)
        return Score(reward, {} if reward is None else {"coin": reward})


class SimulatedReference(Host, Reference):
    """Log-probabilities after `delay` seconds."""

    def __init__(self, delay: float, generation: SimulatedGeneration) -> None:
        super().__init__("reference", ("reference_logprobs",))
        self.delay, self._generation = delay, generation

    async def logprobs(self, samples: BatchRef) -> BatchRef:
        if not all(self._generation.holds(row.places[0]) for row in samples):
            raise LostRows("the rows to look at are gone")
        await self.work(self.delay)
        return samples.with_places([self.hold(row.name, ()) for row in samples])


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: `fixed`, and `token` for each response token. not_finite: chance that it trains nothing."""

    fixed: float
    token: float = 0.0
    not_finite: float = 0.0


class SimulatedTraining(Host, Training):
    """limit: how many versions old a token in the loss may be; None admits all.

    trained: stamps of each (group, member) in the loss, and the version it was trained at. samples_trained: how often
    one was. oldest: staleness of the oldest token in the loss; in_loss: how many there were.
    busy: seconds in steps; blocked: seconds waiting for a slot of the weight arena.
    """

    def __init__(self, cost: StepCost, limit: int | None, hosts: Iterable[Host], seed: int) -> None:
        super().__init__("training", ())
        self.cost, self.limit, self.hosts, self.seed = cost, limit, tuple(hosts), seed
        self.epoch, self.version, self.chain = 0, 0, GENESIS
        self.trained: dict[tuple[int, int], tuple[Spans, int]] = {}
        self.samples_trained, self.oldest, self.in_loss, self.busy, self.blocked = 0, 0, 0, 0.0, 0.0
        self._readers: dict[str, int] = {}
        self._let_go = asyncio.Event()
        self._steps = 0

    def take_up(self, epoch: int, version: int, chain: bytes) -> None:
        """Go on from a checkpoint."""
        self.epoch, self.version, self.chain = epoch, version, chain

    async def published(self) -> Published:
        return Published(self.epoch, self.version, "sim", self.version % 2, "")

    async def using(self, reader: str, version: int) -> None:
        self._readers[reader] = version
        self._let_go.set()

    async def detached(self, reader: str) -> None:
        self._readers.pop(reader, None)
        self._let_go.set()

    async def checkpoint(self, directory: str, epoch: int, version: int) -> Checkpointed:
        return Checkpointed(self.version, self.chain.hex(), {})

    async def step(self, cuts: Cuts) -> StepReport:
        if (cuts.epoch, cuts.version) != (self.epoch, self.version):
            raise Refused(f"a step from version {cuts.version}; the trainer is at {self.version}")
        read = [self._read(row) for row in cuts.batch]
        seconds = self.cost.fixed + self.cost.token * cuts.tokens
        await asyncio.sleep(seconds)
        self.busy += seconds
        self._steps += 1
        samples = tuple(self._sample(row, spans) for row, spans in zip(cuts.batch, read, strict=True))
        if random.Random(f"step {self.seed} {self._steps}").random() < self.cost.not_finite:
            return self._report(samples, "not finite")
        if not any(sample.trained for sample in samples):
            return self._report(samples, "stale")
        await self._write_slot()
        return self._update(cuts, samples, read)

    def _read(self, row: RowRef) -> Spans:
        for place in row.places:
            if not any(host.holds(place) for host in self.hosts):
                raise LostRows(f"sample {row.key} lay at {place.owner}, which does not hold it")
        place = row.place_of("versions")
        return next(host.rows[place.slot] for host in self.hosts if host.holds(place))

    def _sample(self, row: RowRef, spans: Spans) -> TrainedSample:
        trained = sum(count for version, count in spans if self._live(version))
        masked = row.tokens - trained
        return TrainedSample(row.group, row.member, row.attempt, trained, masked, "stale" if masked else "")

    def _live(self, version: int) -> bool:
        return self.limit is None or bool(live(version, self.version, self.limit))

    async def _write_slot(self) -> None:
        """Version v+1 goes where v-1 was: wait until every reader has left that."""
        began = _now()
        try:
            async with asyncio.timeout(PUBLISH_PATIENCE):
                while any(version < self.version for version in self._readers.values()):
                    self._let_go.clear()
                    await self._let_go.wait()
        except TimeoutError as error:
            raise DeadlineExceeded(f"slot {(self.version + 1) % 2} is held by {self._readers}") from error
        self.blocked += _now() - began

    def _update(self, cuts: Cuts, samples: tuple[TrainedSample, ...], read: list[Spans]) -> StepReport:
        self.chain = chain(self.chain, [(row.group, row.member, row.attempt) for row in cuts.batch])
        for row, spans in zip(cuts.batch, read, strict=True):
            self.trained[row.key] = (spans, self.version)
            ages = [self.version - version for version, _ in spans if self._live(version)]
            self.oldest = max(self.oldest, *ages, 0)
        self.samples_trained += len(read)
        self.in_loss += sum(sample.trained for sample in samples)
        self.version += 1
        published = Published(self.epoch, self.version, "sim", self.version % 2, "")
        return replace(self._report(samples, ""), updates=1, published=published)

    def _report(self, samples: tuple[TrainedSample, ...], skipped: str) -> StepReport:
        return StepReport(self.epoch, self.version, 0, skipped, self.chain.hex(), {}, samples, None)


def _now() -> float:
    return asyncio.get_running_loop().time()

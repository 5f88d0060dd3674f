"""The fake services of a trial: they meet its faults, and report what they really did, whatever their messages said."""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, cast

import numpy as np

from asyncrl.errors import LostRows, PeerLost
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.lanes.weights.leases import CopiedVersions, slot_of
from asyncrl.protocols.batch import Batch, BatchRef, Cuts, RowRef, SampleName
from asyncrl.protocols.distribute_collect import ONE_OF
from asyncrl.protocols.hash_chain import chain
from asyncrl.protocols.messages import Opening, PromptGroup, Published, StepReport, Using
from asyncrl.protocols.prompt_row import PackedRow
from asyncrl.protocols.service_contracts import Environment, Reward, endpoint
from asyncrl.simulation.fakes.fake_service import KEY, FakeService, now
from asyncrl.simulation.fakes.generation import FakeGeneration, FakeSequence
from asyncrl.simulation.fakes.scoring import FakeReference, FakeReward
from asyncrl.simulation.fakes.training import FakeTraining, StepCost, WriteCopy
from asyncrl.simulation.faults.slow_disk import SlowDisk
from asyncrl.simulation.faults.trial_plan import TOKEN_TIME, Trial

Key = tuple[int, int]

STATE = "state.txt"
COUNTING_TIME = 1.0
LONGEST_SCORE = 30.0
"""Seconds of the longest score: half of what a call may take, so that no healthy judge is taken for one that hangs."""
CRASH_TIME = 0.3
MOST_CALLS = 10_000
"""More calls than any trial makes at a time."""
SLOT_PATIENCE = 20.0
"""Seconds that the trainer waits for the readers of a slot: twice the controller's deadline for them."""


class FakeEnvironment(FakeService, Environment):
    """Answers a turn in `delay` seconds, and ends an episode after one to `turns` of them.

    answered: turns that this instance answered, by sample. A repeated call gets the stored row.
    """

    renews = False
    row_bytes = 65_536

    def __init__(
        self,
        delay: float,
        turns: int,
        peers: Iterable[FakeService] = (),
        context: WorkerContext | None = None,
    ) -> None:
        super().__init__("environment", context, peers)
        self.delay = delay
        self.turns = turns
        self.answered: dict[SampleName, RowRef] = {}

    async def reset(self, prompts: PromptGroup, row: dict[str, Any] | PackedRow) -> Opening:
        await self.spend(self.delay)
        return Opening(prompts.prompt)

    async def step(self, samples: BatchRef, row: dict[str, Any] | PackedRow) -> BatchRef:
        known = {sample.name: self.answered.get(sample.name) for sample in samples}
        fresh = tuple(sample for sample in samples if not _is_of_turn(known[sample.name], sample))
        rows = await self.read_checked(BatchRef(fresh), ["versions"])
        await self.spend(self.delay)
        for sample, stamps in zip(fresh, rows["versions"], strict=True):
            assert len(stamps) == sample.tokens, f"{sample} led to the row of another turn"
            columns = {
                "versions": stamps,
                "turn_rewards": np.zeros(sample.turns, np.float32),
                KEY: np.array(sample.name, np.int32),
            }
            finish = "stop" if sample.turns >= self.turns_of(sample) else ""
            self.answered[sample.name] = sample._replace(finish=finish, places=(self.keep(sample.name, columns),))
        return BatchRef(tuple(self.answered[sample.name] for sample in samples))

    async def release(self, samples: list[SampleName], oldest: int) -> None:
        await super().release(samples, oldest)
        self._forget(lambda name: 0 <= name[0] < oldest)
        for group, member, attempt in samples:
            for earlier in range(attempt + 1):
                self.answered.pop((group, member, earlier), None)

    def die(self) -> None:
        self.answered.clear()
        super().die()

    def turns_of(self, sample: RowRef) -> int:
        return random.Random(f"turns {sample.key}").randint(1, self.turns)

    def _forget(self, over: Callable[[SampleName], bool]) -> None:
        self.answered = {name: row for name, row in self.answered.items() if not over(name)}


def _is_of_turn(known: RowRef | None, sample: RowRef) -> bool:
    return known is not None and known.turns == sample.turns


class TrialViolation(AssertionError):
    """Ends a trial in which something happened that must never happen; the message says what."""


@dataclass(slots=True)
class GroundTruth:
    """Records what really happened in a trial, and the first thing that must never happen.

    services: what each living worker runs. hung: instances that were made to hang. crashes: calls of each poisonous
    group, each of which kills its worker. reading: version of the weights that each living reader reads in place.
    steps: the samples that led to each version of the surviving history.
    stuck_seconds: how late the next reader that is offered weights answers. continued: episodes that went on after a
    resume, from a row that a checkpoint had saved. violation: "" if nothing was wrong; an
    error raised in a worker would only restart it.
    """

    trial: Trial
    chance: random.Random
    services: "dict[str, TrialService]" = field(default_factory=dict)
    hung: list[str] = field(default_factory=list)
    crashes: Counter[int] = field(default_factory=Counter)
    reading: dict[str, int] = field(default_factory=dict)
    steps: dict[int, tuple[Key, ...]] = field(default_factory=dict)
    tickets: set[int] = field(default_factory=set)
    violation: str = ""
    stuck_seconds: float = 0.0
    continued: int = 0

    def resumed(self, version: int) -> None:
        """A run goes on from this version, and no worker lives yet."""
        self.returned(version)
        self.services.clear()

    def returned(self, version: int) -> None:
        """Takes a run back to this version: later steps are void, and nobody reads weights any more."""
        self.steps = {made: keys for made, keys in self.steps.items() if made <= version}
        self.reading.clear()

    def ended(self, instance: str) -> None:
        if (ended := self.services.pop(instance, None)) is not None:
            ended.ended()
        self.reading.pop(instance, None)

    def counted(self, ticket: int) -> None:
        """Counts a call of an endpoint that must not be repeated."""
        if ticket in self.tickets:
            self.report(f"ticket {ticket} was counted twice: a call that must not be repeated was repeated")
        self.tickets.add(ticket)

    def report(self, violation: str) -> None:
        self.violation = self.violation or violation

    def lose_row(self, service: str) -> None:
        """Frees a row of a worker of this service, whoever still needs it."""
        for instance, worker in self.services.items():
            if instance.startswith(service) and worker.stored_rows:
                return worker.lose_row(self.chance)

    def updated(self, version: int, batch: BatchRef, in_loss: Sequence[Any]) -> None:
        """Notes that a rank of the trainer took an update from this version; all ranks take the same one."""
        if version + 1 not in self.steps:
            self.trained(version, batch, in_loss)
        elif self.steps[version + 1] != (keys := tuple(row.key for row in batch)):
            self.report(f"one rank trained {keys} to version {version + 1}, another one {self.steps[version + 1]}")

    def hang(self, service: str) -> None:
        """Lets a worker of this service finish nothing any more."""
        if running := [worker for name, worker in self.services.items() if name.startswith(service)]:
            hung = self.chance.choice(running)
            hung.hung = True
            self.hung.append(hung.instance)

    def trained(self, version: int, batch: BatchRef, in_loss: Sequence[Any]) -> None:
        """A step trained these samples from this version. in_loss: version stamps of the tokens of each in the loss."""
        before = {key for keys in self.steps.values() for key in keys}
        twice = [row.key for row in batch if row.key in before]
        if twice:
            self.report(f"the samples {twice} were trained twice")
        if version + 1 in self.steps:
            self.report(f"version {version + 1} was made twice")
        self.steps[version + 1] = tuple(row.key for row in batch)
        ages = [version - int(stamps.min()) for stamps in in_loss if len(stamps)]
        limit = self.trial.enforced_limit
        if limit is not None and max(ages) > limit:
            self.report(f"a token {max(ages)} versions old is in the loss; the limit is {limit}")
        newest = max(int(stamps.max()) for stamps in in_loss if len(stamps))
        if newest > version:
            self.report(f"a token of version {newest} is in the loss of a trainer at version {version}")
        for reader, reading in self.reading.items():
            if slot_of(reading) == slot_of(version + 1):
                self.report(f"version {version + 1} overwrites version {reading}, which {reader} reads")


class TrialService(FakeService):
    """Belongs to a trial; the ground truth knows its rows while it lives. hung: it finishes nothing any more."""

    truth: GroundTruth
    hung = False

    @property
    def row_slots(self) -> int:
        return self.truth.trial.gate.row_slots

    async def start(self) -> None:
        await super().start()
        self.truth.services[self.instance] = self

    async def spend(self, seconds: float) -> None:
        await super().spend(seconds)
        if self.hung:
            await asyncio.Event().wait()

    def ended(self) -> None:
        """Takes the end of its process."""


class TrialGeneration(TrialService, FakeGeneration):
    """Crashes on the group that is poison, and is stuck when a fault says so."""

    def __init__(self, truth: GroundTruth, disk: SlowDisk, context: WorkerContext) -> None:
        self.truth = truth
        self.disk = disk
        self._stuck_until = 0.0
        trial = truth.trial
        FakeGeneration.__init__(self, trial.slots, TOKEN_TIME, trial.lengths, trial.flip_time, context)

    async def generate(self, prompts: PromptGroup) -> AsyncIterator[BatchRef]:
        crash: set[asyncio.Task[None]] = set()
        if prompts.id in self.truth.trial.poison:
            self.truth.crashes[prompts.id] += 1
            crash = {self.context.tasks.create_task(self._crash(), name="crash")}
        saved = [row for row in prompts.continues or () if "generation" in row.places[0].owner]  # Not environment.
        self.truth.continued += len(saved)
        async with aclosing(cast(Any, super().generate(prompts))) as items:
            async for samples in items:
                yield samples
        if crash:  # A group whose samples are short crashes its worker too, while that works for it.
            await asyncio.wait(crash)

    def finish(self, sequence: FakeSequence) -> None:
        if not self.hung:
            super().finish(sequence)

    async def use_weights(self, published: Published) -> Using:
        now = asyncio.get_running_loop().time()
        if self.truth.stuck_seconds:
            self._stuck_until = now + self.truth.stuck_seconds
            self.truth.stuck_seconds = 0.0  # The next reader is not stuck.
        await asyncio.sleep(self._stuck_until - now)
        using = await super().use_weights(published)
        if using.readers and not self.truth.trial.joined:  # A reader on another host has a copy.
            self.truth.reading[self.instance] = self.version
        return using

    async def _crash(self) -> None:
        await asyncio.sleep(CRASH_TIME)
        raise MemoryError("out of memory")


class TicketReward(Reward):
    """Adds one endpoint to rewards that must not be repeated."""

    @endpoint(ONE_OF)
    async def count(self, ticket: int) -> None:
        """Counts the ticket at once, and answers after some time."""
        raise NotImplementedError


class TrialReward(TrialService, TicketReward, FakeReward):
    """Reads the rows before it scores."""

    def __init__(self, truth: GroundTruth, context: WorkerContext) -> None:
        self.truth = truth
        FakeReward.__init__(self, truth.trial.reward_time, truth.trial.unscorable, ("versions",), context)
        self._judges = asyncio.Semaphore(truth.trial.judges or MOST_CALLS)

    async def count(self, ticket: int) -> None:
        self.truth.counted(ticket)
        await asyncio.sleep(COUNTING_TIME)

    async def spend(self, seconds: float) -> None:
        async with self._judges:
            await super().spend(seconds)

    def seconds_for(self, samples: BatchRef) -> float:
        chance = random.Random(f"reward {self.truth.trial.seed} {[row.key for row in samples]}")
        return min(self.delay * chance.lognormvariate(0.0, 1.0), LONGEST_SCORE)


class TrialEnvironment(TrialService, FakeEnvironment):
    """Takes as long as a reward for each turn."""

    def __init__(self, truth: GroundTruth, context: WorkerContext) -> None:
        self.truth = truth
        FakeEnvironment.__init__(self, truth.trial.reward_time, truth.trial.turns, context=context)


class TrialReference(TrialService, FakeReference):
    """Takes as long as a reward."""

    def __init__(self, truth: GroundTruth, context: WorkerContext) -> None:
        self.truth = truth
        FakeReference.__init__(self, truth.trial.reward_time, context=context)


class TrialTraining(TrialService, FakeTraining):
    """Goes on from what its checkpoint on the slow disk says, and from nothing else."""

    def __init__(self, truth: GroundTruth, disk: SlowDisk, context: WorkerContext) -> None:
        self.truth = truth
        self.disk = self._disk = disk
        trial = truth.trial
        columns = ("versions", "reference_logprobs") if trial.reference else ("versions",)
        FakeTraining.__init__(
            self,
            StepCost(trial.step_time, rejected=trial.rejected),
            trial.enforced_limit,
            read_columns=columns,
            slot_patience=SLOT_PATIENCE,
            context=context,
            in_lockstep=trial.admission == "lockstep",
        )

    def restore(self, version: int, chain: bytes) -> None:
        super().restore(version, chain)
        if self.truth.trial.joined:
            self._leases = CopiedVersions()
            self._leases.end_write(version)

    async def start(self) -> None:
        if self.context.facts.checkpoint_dir is not None:
            version, chain = self._disk.open(str(self.context.facts.checkpoint_dir), STATE).read().decode().split()
            self.restore(int(version), bytes.fromhex(chain))

    @property
    def held_version(self) -> int:
        """Returns the version of the weights, whatever calls are told."""
        return self.version

    def state_copy(self) -> WriteCopy:
        state = f"{self.held_version} {self.chain.hex()}".encode()

        def write(directory: str) -> dict[str, str]:
            self._disk.block()
            self._disk.put(directory, STATE, state)
            return {STATE: sha256(state).hexdigest()}

        return write

    def write_file(self, directory: str, file: str, data: bytes) -> None:
        self._disk.block()
        super().write_file(directory, file, data)

    def on_trained(self, batch: BatchRef, in_loss: Sequence[Any]) -> None:
        self.truth.trained(self.version, batch, in_loss)


# Several ranks of a trainer with copies of its weights, of which one dies between two exchanges, or during one.
#
# give ──> all have given ──> each gets what all gave, some time later ──> takes the update ──> the next exchange
#                              └── a rank died meanwhile: PeerLost, also where another one had its answer before


SLOWEST = 1.0
"""Seconds until the answer of an exchange has reached the last rank."""
LOSS_NOTICE = 60.0
"""Seconds for which a rank that lost another one stays."""


class RankExchange:
    """Connects the ranks of one start of a trainer: an exchange is complete once all ranks have given.

    Invariant: after one rank has ended, every exchange raises PeerLost at those that wait, complete or not.
    """

    def __init__(self, size: int, seed: str) -> None:
        self._size = size
        self._lost = asyncio.Event()
        self._chance = random.Random(seed)
        self._given: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        self._complete: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)

    async def give(self, number: int, rank: int, value: Any) -> list[Any]:
        """Returns what all ranks gave in the exchange of this number. Raises PeerLost once one is gone."""
        self._given[number][rank] = value
        if len(self._given[number]) == self._size:
            self._complete[number].set()
        waits = [asyncio.ensure_future(event.wait()) for event in (self._complete[number], self._lost)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._chance.uniform(0.0, SLOWEST)):
                await self._lost.wait()
        if self._lost.is_set():
            raise PeerLost(f"rank {rank} lost another rank in exchange {number}")
        return [self._given[number][other] for other in range(self._size)]

    def end(self) -> None:
        """Ends the connections of a rank whose process is gone."""
        self._lost.set()


class RankExchanges:
    """The exchanges of each incarnation of a run, in which the ranks of its trainer start together."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._made: dict[int, RankExchange] = {}

    def of(self, incarnation: int) -> RankExchange:
        if incarnation not in self._made:
            self._made[incarnation] = RankExchange(self._trial.ranks, f"exchange {self._trial.seed} {incarnation}")
        return self._made[incarnation]


class TrialTrainingRank(TrialTraining):
    """One of several ranks. weights: version of what it holds, which an update raises before the step has ended."""

    def __init__(self, truth: GroundTruth, disk: SlowDisk, exchanges: RankExchanges, context: WorkerContext) -> None:
        super().__init__(truth, disk, context)
        self._exchange = exchanges.of(context.facts.incarnation)
        self._exchanges = 0

    def restore(self, version: int, link: bytes) -> None:
        super().restore(version, link)
        self.weights = version

    @property
    def held_version(self) -> int:
        return self.weights

    async def start(self) -> None:
        await super().start()
        self.truth.services[self.instance] = self
        if (folder := self.context.facts.checkpoint_dir) is None:
            return
        found = "nothing"
        with suppress(FileNotFoundError):
            found = self._disk.open(str(folder), STATE).read().decode().partition(" ")[0]
        if folder.name != found:
            self.truth.report(f"checkpoint {folder.name} holds the weights of version {found}")

    async def read_checked(self, samples: BatchRef, columns: Any) -> Batch:
        """Reads the rows of this rank. Raises LostRows on all ranks when one of them lost rows."""
        rows: Batch | None = None
        lost: LostRows | None = None
        try:
            rows = await super().read_checked(samples, columns)
        except LostRows as own:
            lost = own
        found = [each for each in await self._give(lost) if each is not None]
        if rows is None or found:
            raise found[0]
        return rows

    async def train(self, cuts: Cuts, rows: Batch) -> StepReport:
        """Trains this rank's rows; what all ranks trained is one step."""
        began = now()
        try:
            await self.spend(self.cost.fixed + self.cost.token * cuts.tokens)
            samples, in_loss = self._compute_loss(cuts.batch, rows)
            self._steps += 1
            given = await self._give([*zip(cuts.batch, samples, in_loss, strict=True)])
            self.busy += now() - began
            accounts = sorted((each for rank in given for each in rank), key=lambda account: account[0].key)
            trained = [(row, stamps) for row, sample, stamps in accounts if sample.trained]
            if trained:
                await self._wait_for_slot()
                self._leases.begin_write(self.version + 1)
                self._update(trained)
            await self._give(None)
        except PeerLost:
            await asyncio.sleep(LOSS_NOTICE)
            raise
        if not trained:
            return self._report(samples, self.why_skipped([sample for _, sample, _ in accounts]))
        self.chain = chain(self.chain, [row.name for row, _ in trained])
        self.version = self.weights
        self._leases.end_write(self.version)
        return replace(self._report(samples, ""), updates=1, published=await self.published())

    def _update(self, trained: Sequence[tuple[RowRef, Any]]) -> None:
        """Takes an update on the rows of all ranks, each with the version stamps of its tokens in the loss."""
        self.truth.updated(self.version, BatchRef(tuple(row for row, _ in trained)), [stamps for _, stamps in trained])
        self.weights = self.version + 1

    def ended(self) -> None:
        self._exchange.end()

    async def _give(self, value: Any) -> list[Any]:
        self._exchanges += 1
        return await self._exchange.give(self._exchanges, self.context.spec.rank, value)

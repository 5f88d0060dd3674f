"""The fake services of a trial: they meet its faults, and report what they really did, whatever their messages said."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, cast

from asyncrl.controller.journal.run_storage import MemoryStore
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.lanes.weights.leases import slot_of
from asyncrl.protocols.batch import Batch, BatchRef
from asyncrl.protocols.distribute_collect import ONE_OF
from asyncrl.protocols.messages import PromptGroup, Published, Using
from asyncrl.protocols.service_contracts import Reward, endpoint
from asyncrl.simulation.fakes.fake_service import FakeService
from asyncrl.simulation.fakes.generation import FakeGeneration
from asyncrl.simulation.fakes.scoring import FakeReference, FakeReward
from asyncrl.simulation.fakes.training import FakeTraining, StepCost
from asyncrl.simulation.faults.trial_plan import TOKEN_TIME, Trial

Key = tuple[int, int]

STATE = "state.txt"
COUNTING_TIME = 1.0
CRASH_TIME = 0.3
SLOT_PATIENCE = 20.0
"""Seconds that the trainer waits for the readers of a slot: twice the controller's deadline for them."""


class TrialViolation(AssertionError):
    """Ends a trial in which something happened that must never happen; the message says what."""


@dataclass(slots=True)
class GroundTruth:
    """Records what really happened in a trial, and the first thing that must never happen.

    services: what each living worker runs. reading: version of the weights that each living reader reads in place.
    steps: the samples that led to each version of the surviving history. stuck_seconds: how late the next reader that
    is offered weights answers. violation: "" if nothing was wrong; an error raised in a worker would only restart it.
    """

    trial: Trial
    chance: random.Random
    services: dict[str, FakeService] = field(default_factory=dict)
    reading: dict[str, int] = field(default_factory=dict)
    steps: dict[int, tuple[Key, ...]] = field(default_factory=dict)
    tickets: set[int] = field(default_factory=set)
    violation: str = ""
    stuck_seconds: float = 0.0

    def resumed(self, version: int) -> None:
        """A run goes on from this version: later steps are void, and no worker lives yet."""
        self.steps = {made: keys for made, keys in self.steps.items() if made <= version}
        self.services.clear()
        self.reading.clear()

    def ended(self, instance: str) -> None:
        self.services.pop(instance, None)
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

    def trained(self, version: int, batch: BatchRef, in_loss: Sequence[Any]) -> None:
        """A step trained from this version. in_loss: version stamps of the tokens in the loss, by sample."""
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
        for reader, reading in self.reading.items():
            if slot_of(reading) == slot_of(version + 1):
                self.report(f"version {version + 1} overwrites version {reading}, which {reader} reads")


class TrialService(FakeService):
    """Belongs to a trial; the ground truth knows its rows while it lives."""

    truth: GroundTruth

    @property
    def row_slots(self) -> int:
        return self.truth.trial.gate.row_slots

    async def start(self) -> None:
        await super().start()
        self.truth.services[self.instance] = self


class TrialGeneration(TrialService, FakeGeneration):
    """Crashes on the group that is poison, and is stuck when a fault says so."""

    def __init__(self, truth: GroundTruth, context: WorkerContext) -> None:
        self.truth = truth
        trial = truth.trial
        FakeGeneration.__init__(self, trial.slots, TOKEN_TIME, trial.lengths, trial.flip_time, context)

    async def generate(self, prompts: PromptGroup) -> AsyncIterator[BatchRef]:
        if prompts.id == self.truth.trial.poison:
            self.context.tasks.create_task(self._crash(), name="crash")
        async with aclosing(cast(Any, super().generate(prompts))) as items:
            async for samples in items:
                yield samples

    async def use_weights(self, published: Published) -> Using:
        stuck_seconds, self.truth.stuck_seconds = self.truth.stuck_seconds, 0.0  # The next reader is not stuck.
        await asyncio.sleep(stuck_seconds)
        using = await super().use_weights(published)
        if using.readers:
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

    async def count(self, ticket: int) -> None:
        self.truth.counted(ticket)
        await asyncio.sleep(COUNTING_TIME)

    def seconds_for(self, samples: BatchRef) -> float:
        chance = random.Random(f"reward {self.truth.trial.seed} {[row.key for row in samples]}")
        return self.delay * chance.lognormvariate(0.0, 1.0)


class TrialReference(TrialService, FakeReference):
    """Takes as long as a reward."""

    def __init__(self, truth: GroundTruth, context: WorkerContext) -> None:
        self.truth = truth
        FakeReference.__init__(self, truth.trial.reward_time, context=context)


class TrialTraining(TrialService, FakeTraining):
    """Goes on from what its checkpoint on the slow disk says, and from nothing else."""

    def __init__(self, truth: GroundTruth, disk: MemoryStore, context: WorkerContext) -> None:
        self.truth = truth
        self._disk = disk
        trial = truth.trial
        columns = ("versions", "reference_logprobs") if trial.reference else ("versions",)
        FakeTraining.__init__(
            self,
            StepCost(trial.step_time),
            trial.enforced_limit,
            read_columns=columns,
            slot_patience=SLOT_PATIENCE,
            context=context,
        )

    async def start(self) -> None:
        if self.context.facts.checkpoint_dir is not None:
            version, chain = self._disk.open(str(self.context.facts.checkpoint_dir), STATE).read().decode().split()
            self.restore(int(version), bytes.fromhex(chain))

    def save(self, directory: str) -> dict[str, str]:
        state = f"{self.version} {self.chain.hex()}".encode()
        self._disk.put(directory, STATE, state)
        return {STATE: sha256(state).hexdigest()}

    def on_trained(self, batch: BatchRef, rows: Batch, in_loss: Sequence[Any]) -> None:
        self.truth.trained(self.version, batch, in_loss)

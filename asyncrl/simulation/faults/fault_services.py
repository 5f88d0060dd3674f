"""The fake services of a trial: they meet its faults and report to the ground truth what they really did."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from hashlib import sha256
from typing import Any, cast

from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.protocols.batch import Batch, BatchRef
from asyncrl.protocols.messages import PromptGroup, Published, Using
from asyncrl.protocols.service_contracts import Reward, endpoint
from asyncrl.protocols.transfer import ONE_OF
from asyncrl.simulation.fakes.fake_service import FakeService
from asyncrl.simulation.fakes.generation import FakeGeneration
from asyncrl.simulation.fakes.scoring import FakeReference, FakeReward
from asyncrl.simulation.fakes.training import FakeTraining, StepCost
from asyncrl.simulation.faults.ground_truth import GroundTruth
from asyncrl.simulation.faults.slow_disk import SlowDisk
from asyncrl.simulation.faults.trial_plan import TOKEN_TIME, Trial

STATE = "state.txt"
COUNTING_TIME = 1.0
CRASH_TIME = 0.3
SLOT_PATIENCE = 20.0
"""Seconds that the trainer waits for the readers of a slot: twice the controller's deadline for them."""


class TrialService(FakeService):
    """Belongs to a trial; the ground truth knows its rows while it lives. Its options are the two and the disk."""

    @property
    def trial(self) -> Trial:
        return cast(Trial, self.context.options["trial"])

    @property
    def truth(self) -> GroundTruth:
        return cast(GroundTruth, self.context.options["truth"])

    @property
    def row_slots(self) -> int:
        return self.trial.gate.row_slots

    async def start(self) -> None:
        await super().start()
        self.truth.services[self.instance] = self


class TrialGeneration(TrialService, FakeGeneration):
    """Crashes on the group that is poison, and is stuck when a fault says so."""

    def __init__(self, context: WorkerContext) -> None:
        trial: Trial = context.options["trial"]
        FakeGeneration.__init__(self, trial.slots, TOKEN_TIME, trial.lengths, trial.flip_time, context)

    async def generate(self, prompts: PromptGroup) -> AsyncIterator[BatchRef]:
        if prompts.id == self.trial.poison:
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

    def __init__(self, context: WorkerContext) -> None:
        trial: Trial = context.options["trial"]
        FakeReward.__init__(self, trial.reward_time, trial.unscorable, ("versions",), context)

    async def count(self, ticket: int) -> None:
        self.truth.counted(ticket)
        await asyncio.sleep(COUNTING_TIME)

    def seconds_for(self, samples: BatchRef) -> float:
        chance = random.Random(f"reward {self.trial.seed} {[row.key for row in samples]}")
        return self.delay * chance.lognormvariate(0.0, 1.0)


class TrialReference(TrialService, FakeReference):
    """Takes as long as a reward."""

    def __init__(self, context: WorkerContext) -> None:
        trial: Trial = context.options["trial"]
        FakeReference.__init__(self, trial.reward_time, context=context)


class TrialTraining(TrialService, FakeTraining):
    """Goes on from what its checkpoint on the slow disk says, and from nothing else."""

    def __init__(self, context: WorkerContext) -> None:
        trial: Trial = context.options["trial"]
        columns = ("versions", "reference_logprobs") if trial.reference else ("versions",)
        FakeTraining.__init__(
            self,
            StepCost(trial.step_time),
            trial.enforced_limit,
            read_columns=columns,
            slot_patience=SLOT_PATIENCE,
            context=context,
        )
        self._disk: SlowDisk = context.options["disk"]

    async def start(self) -> None:
        if self.context.checkpoint_dir is not None:
            version, chain = self._disk.open(str(self.context.checkpoint_dir), STATE).read().decode().split()
            self.restore(int(version), bytes.fromhex(chain))

    def save(self, directory: str) -> dict[str, str]:
        state = f"{self.version} {self.chain.hex()}".encode()
        self._disk.put(directory, STATE, state)
        return {STATE: sha256(state).hexdigest()}

    def on_trained(self, batch: BatchRef, rows: Batch, in_loss: Sequence[Any]) -> None:
        self.truth.trained(self.version, batch, in_loss)

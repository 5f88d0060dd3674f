"""Services that sleep where others compute, so that what is left of a step's time is the cost of the runtime.

Each service keeps its compute thread for its seconds of a step, shared out over the groups of the step; messages, rows
in shared memory, journal, gate and links are the real ones. Worker processes import this module; it imports no torch.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sized
from typing import Any

import numpy as np

from asyncrl.fleet.fleet import ServiceSpec
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.protocols.batch import Array, BatchRef, RowRef
from asyncrl.protocols.messages import PromptGroup, Score
from asyncrl.protocols.service_contracts import Generation, Reference, Reward, Training
from asyncrl.simulation.fakes.fake_service import FakeService
from asyncrl.simulation.fakes.generation import FakeGeneration, FakeSequence, Spans, constant
from asyncrl.simulation.fakes.scoring import FakeReference, FakeReward
from asyncrl.simulation.fakes.training import FakeTraining, StepCost

TOKENS = 32
TEXT = np.frombuffer(b"asleep", np.uint8)


def stages(generation: float, reward: float, reference: float, training: float) -> dict[str, ServiceSpec]:
    """Returns the specifications of the services; each argument is the seconds of a step in that service."""
    contracts = {Generation: generation, Reward: reward, Reference: reference, Training: training}
    return {
        (name := contract.__name__.lower()): ServiceSpec(
            name, contract, f"{__name__}:Sleeping{contract.__name__}", options={"seconds": seconds}
        )
        for contract, seconds in contracts.items()
    }


def prompts(size: int = 64, seed: int = 0) -> list[dict[str, Any]]:
    """Returns prompts that no service reads."""
    return [{"prompt": f"prompt {number}"} for number in range(size)]


class SleepingService(FakeService):
    """Spends time asleep on the compute thread. The counter `slept` is how long it really slept: a late timer is the
    machine's doing and not the runtime's."""

    async def start(self) -> None:
        self.counters["slept"] = 0.0
        await super().start()

    async def spend(self, seconds: float) -> None:
        def sleep() -> None:
            began = time.monotonic()
            time.sleep(seconds)
            self.counters["slept"] += time.monotonic() - began

        await self.context.compute.run(sleep)

    def seconds_for(self, samples: Sized) -> float:
        """Returns the share of these samples in the seconds of a step."""
        task = self.context.config.task
        share = len(samples) / (task.prompts_per_step * task.samples_per_prompt)
        return share * float(self.context.spec.options["seconds"])


class SleepingGeneration(SleepingService, FakeGeneration):
    """Samples one group after the other; all members of a group finish together."""

    row_bytes = 2048

    def __init__(self, context: WorkerContext) -> None:
        FakeGeneration.__init__(self, 1, 0.0, constant(TOKENS), context=context)

    async def generate(self, prompts: PromptGroup) -> AsyncIterator[BatchRef]:
        await self.wait_for_weights(prompts.not_before)
        queue = asyncio.Queue[Any]()
        members = [FakeSequence(prompts, member, TOKENS, queue) for member in prompts.members]
        await self.spend(self.seconds_for(prompts.members))
        spans = ((self.version, TOKENS),)  # Not that of the call, after which the group waits for the groups before it.
        yield BatchRef(tuple(self.row(member, spans) for member in members))

    def columns(self, sequence: FakeSequence, spans: Spans) -> dict[str, Array]:
        ids = np.full(TOKENS, sequence.member, np.int32)
        logprobs = np.zeros(TOKENS, np.float32)
        own: dict[str, Array] = {"prompt_ids": ids, "response_ids": ids, "text": TEXT, "logprobs": logprobs}
        return {**super().columns(sequence, spans), **own}


class SleepingReward(SleepingService, FakeReward):
    """Rewards members with odd numbers."""

    def __init__(self, context: WorkerContext) -> None:
        FakeReward.__init__(self, 0.0, read_columns=["text"], context=context)

    def value_of(self, sample: RowRef) -> Score:
        return Score(float(sample.member % 2), {"odd": float(sample.member % 2)})


class SleepingReference(SleepingService, FakeReference):
    """Reads the tokens of a row, and sleeps."""

    row_bytes = 512

    def __init__(self, context: WorkerContext) -> None:
        FakeReference.__init__(self, 0.0, read_columns=["prompt_ids", "response_ids"], context=context)


class SleepingTraining(SleepingService, FakeTraining):
    """Reads all columns of a batch, and sleeps; all versions of the weights are the same."""

    def __init__(self, context: WorkerContext) -> None:
        columns = ["prompt_ids", "response_ids", "logprobs", "versions", "reference_logprobs"]
        FakeTraining.__init__(
            self, StepCost(context.spec.options["seconds"]), None, read_columns=columns, context=context
        )

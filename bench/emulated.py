"""Services that sleep where others compute: what is left of a step's time is the runtime's own.

Each keeps its compute thread for the seconds a step gives it, shared out over the groups of the step; messages, rows in
shared memory, journal, gate and links are the real ones. Worker processes import this module; it imports no torch.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.fleet import ServiceSpec
from asyncrl.groups import GateConfig
from asyncrl.protocols.batch import BatchRef, Cuts, RowRef
from asyncrl.protocols.chain import GENESIS, chain
from asyncrl.protocols.contracts import Generation, Reference, Reward, Training
from asyncrl.protocols.messages import (
    Boundary,
    Checkpointed,
    PromptGroup,
    Published,
    SampleText,
    Score,
    StepReport,
    TrainedSample,
    Using,
)
from asyncrl.rows_ahead import RowsAhead
from asyncrl.service import Service, WorkerContext

TOKENS = 32
TEXT = np.frombuffer(b"emulated", np.uint8)


def stages(generation: float, reward: float, reference: float, training: float) -> dict[str, ServiceSpec]:
    """Seconds of a step in each service."""
    here = "asyncrl.bench.emulated"
    return {
        "generation": ServiceSpec("generation", Generation, f"{here}:Sampler", options={"seconds": generation}),
        "reward": ServiceSpec("reward", Reward, f"{here}:Judge", options={"seconds": reward}),
        "reference": ServiceSpec("reference", Reference, f"{here}:Scorer", options={"seconds": reference}),
        "training": ServiceSpec("training", Training, f"{here}:Trainer", options={"seconds": training}),
    }


def prompts(size: int = 64, seed: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"prompt {number}"} for number in range(size)]


class Sleeper(Service):
    """Counts in `slept` how long it really slept: a late timer is the machine's doing, not the runtime's."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.counters["slept"] = 0.0

    def open(self, slot_bytes: int) -> None:
        self.rows = self.context.open_rows(GateConfig.of(self.context.config).row_slots, slot_bytes)

    async def sleep(self, share: float = 1.0) -> None:
        await self.context.compute.run(self._sleep, share * self.context.options["seconds"])

    async def sleep_for(self, samples: int) -> None:
        """The share of so many samples in a step."""
        task = self.context.config.task
        await self.sleep(samples / (task.prompts_per_step * task.samples_per_prompt))

    def _sleep(self, seconds: float) -> None:
        began = time.monotonic()
        time.sleep(seconds)
        self.counters["slept"] += time.monotonic() - began


class Sampler(Sleeper, Generation):
    """One group after the other; all its members end together."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._version = -1
        self._flipped = asyncio.Condition()

    async def start(self) -> None:
        self.open(1024)

    async def generate(self, prompts: PromptGroup) -> AsyncIterator[BatchRef]:
        async with self._flipped:
            await self._flipped.wait_for(lambda: self._version >= prompts.not_before)
        await self.sleep_for(len(prompts.members))
        yield BatchRef(tuple(self._row(prompts, member) for member in prompts.members))

    async def use_weights(self, published: Published) -> Using:
        async with self._flipped:
            self._version = max(self._version, published.version)
            self._flipped.notify_all()
        return Using((self.context.instance,), self._version)

    async def texts(self, refs: BatchRef) -> list[SampleText]:
        return [SampleText(row.group, row.member, "", "") for row in refs]

    async def pause(self) -> Boundary:
        return Boundary("decode step", 0)

    async def resume(self) -> Boundary:
        return Boundary("decode step", 0)

    def _row(self, prompts: PromptGroup, member: int) -> RowRef:
        ids = np.full(TOKENS, member, np.int32)
        versions = np.full(TOKENS, self._version, np.int32)
        values: dict[str, NDArray[Any]] = {"prompt_ids": ids, "response_ids": ids, "versions": versions, "text": TEXT}
        name, now = (prompts.id, member, prompts.attempt), self._version
        place = self.keep(name, {**values, "logprobs": np.zeros(TOKENS, np.float32)})
        return RowRef(*name, prompts.epoch, TOKENS, TOKENS, now, now, "stop", (place,))


class Judge(Sleeper, Reward):
    """Half of the members are right."""

    async def score(self, samples: BatchRef, row: dict[str, Any]) -> list[Score]:
        await self.context.reader.read(samples, ["text"])
        await self.sleep_for(len(samples))
        return [Score(float(sample.member % 2), {"even": float(sample.member % 2)}) for sample in samples]


class Scorer(Sleeper, Reference):
    async def start(self) -> None:
        self.open(256)

    async def logprobs(self, samples: BatchRef) -> BatchRef:
        await self.context.reader.read(samples, ["prompt_ids", "response_ids"])
        await self.sleep_for(len(samples))
        columns = {"reference_logprobs": np.zeros(TOKENS, np.float32)}
        return samples.with_places([self.keep(row.name, columns) for row in samples])


class Trainer(Sleeper, Training):
    """Reads what it is given, and every version is the same."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._version, self._chain = 0, GENESIS
        columns = ["prompt_ids", "response_ids", "logprobs", "versions", "reference_logprobs"]
        self._ahead = RowsAhead(context.reader, columns)

    async def foresee(self, samples: BatchRef) -> list[bool]:
        return await self._ahead.foresee(samples)

    async def step(self, cuts: Cuts) -> StepReport:
        await self._ahead.read(cuts.batch)
        await self.sleep()
        self._version += 1
        self._chain = chain(self._chain, [(row.group, row.member, row.attempt) for row in cuts.batch])
        samples = tuple(TrainedSample(row.group, row.member, row.attempt, row.tokens, 0) for row in cuts.batch)
        epoch, metrics = self.context.epoch, {"tokens/trained": float(cuts.tokens)}
        return StepReport(epoch, self._version, 1, "", self._chain.hex(), metrics, samples, await self.published())

    async def published(self) -> Published:
        return Published(self.context.epoch, self._version, "emulated", self._version % 2, "")

    async def using(self, reader: str, version: int) -> None:
        return

    async def detached(self, reader: str) -> None:
        return

    async def checkpoint(self, directory: str, epoch: int, version: int) -> Checkpointed:
        await asyncio.to_thread(Path(directory).mkdir, parents=True, exist_ok=True)
        return Checkpointed(version, self._chain.hex(), {})

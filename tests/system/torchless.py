"""Generation and training without a model: a whole run of them takes a second, and its rewards depend on its weights.

The weights are one number, made of all that was trained so far; a token is a function of the sample's seed and of the
weights that sampled it. So a step that is lost, repeated, or trained on something else changes every later reward.
They keep the promises of the real services: rows in shared memory, two slots of weights with leases, a step that is a
compare-and-set, checkpoints whose files are fsynced. Worker processes import this module.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import numpy as np

from asyncrl.errors import LostRows, PeerLost, Refused
from asyncrl.groups import GateConfig
from asyncrl.memory import Segment
from asyncrl.protocols.batch import BatchRef, Cuts, RowRef
from asyncrl.protocols.chain import GENESIS, chain
from asyncrl.protocols.contracts import Generation, Training
from asyncrl.protocols.messages import (
    Boundary,
    Checkpointed,
    PromptGroup,
    Published,
    SampleText,
    StepReport,
    TrainedSample,
    Using,
)
from asyncrl.protocols.seeds import member_seed
from asyncrl.service import Service, WorkerContext
from asyncrl.weights.session import Leases, must_flip, slot_of

LONGEST = 12
SLOT_BYTES = 1024
WORDS = 3
"""Of a slot of weights: epoch, version, weights."""
MODEL, STATE = "model.bin", "state.bin"


def number_of(*facts: object) -> int:
    return int.from_bytes(sha256(repr(facts).encode()).digest()[:7])


class TorchlessGeneration(Service, Generation):
    """options: `token_time`: seconds a token takes."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._published: Published | None = None
        self._arena: Segment | None = None
        self._version, self._weights = -1, 0
        self._flipped = asyncio.Event()

    async def start(self) -> None:
        self.rows = self.context.open_rows(GateConfig.of(self.context.config).row_slots, SLOT_BYTES)

    async def stop(self) -> None:
        if self._arena is not None:
            self._arena.close()
        await super().stop()

    async def generate(self, prompts: PromptGroup) -> AsyncIterator[BatchRef]:
        if prompts.epoch != self.context.epoch:
            raise Refused(f"group {prompts.id} is of epoch {prompts.epoch}, this worker of {self.context.epoch}")
        while self._version < prompts.not_before:
            await self._flipped.wait()
        seeds = {member: member_seed(prompts.seed, member) for member in prompts.members}
        sampled: dict[int, list[tuple[int, int]]] = {member: [] for member in prompts.members}
        while sampled:
            await asyncio.sleep(self.context.options["token_time"])
            for member, tokens in sampled.items():
                token = number_of(seeds[member], len(tokens), self._weights) % 97
                tokens.append((token, self._version))
            done = [member for member, tokens in sampled.items() if len(tokens) == 3 + seeds[member] % (LONGEST - 3)]
            if done:
                yield BatchRef(tuple(self._row(prompts, member, sampled.pop(member)) for member in done))

    def _row(self, prompts: PromptGroup, member: int, sampled: list[tuple[int, int]]) -> RowRef:
        name = (prompts.id, member, prompts.attempt)
        tokens, versions = np.array(sampled, np.int32).T.copy()
        text = np.frombuffer(" ".join(map(str, tokens)).encode(), np.uint8)
        place = self.keep(name, {"response_ids": tokens, "versions": versions, "text": text})
        first, last = int(versions[0]), int(versions[-1])
        return RowRef(*name, prompts.epoch, 1, len(tokens), first, last, "stop", (place,))

    async def use_weights(self, published: Published) -> Using:
        if must_flip(self._published, published):
            if self._arena is None:
                try:
                    self._arena = Segment.open(published.arena)
                except FileNotFoundError as gone:
                    raise PeerLost("the weights are gone with their trainer") from gone
            epoch, version, weights = self._arena.array(8 * WORDS * published.slot, np.int64, WORDS).tolist()
            assert (epoch, version) == (published.epoch, published.version), "overwritten under our lease"
            self._published, self._version, self._weights = published, version, weights
            self._flipped.set()
            self._flipped = asyncio.Event()
        return Using((self.context.instance,), self._version)

    async def texts(self, refs: BatchRef) -> list[SampleText]:
        assert self.rows is not None
        found = []
        for row in refs:
            try:
                (text,) = self.rows.read(row.places[0], ["text"])
            except LostRows:
                continue
            found.append(SampleText(row.group, row.member, "count", bytes(text).decode()))
        return found

    async def pause(self) -> Boundary:
        raise NotImplementedError

    async def resume(self) -> Boundary:
        raise NotImplementedError


class TorchlessTraining(Service, Training):
    """options: `step_time`: seconds a step takes. `dies`: [where, version] that kills it once, while it writes this
    checkpoint; `died`: a file that says that it has."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._version, self._chain, self._weights = 0, GENESIS, 1
        self._leases, self._leases_changed = Leases(), asyncio.Event()
        self._turn = asyncio.Lock()
        self._last: tuple[Cuts, StepReport] | None = None

    async def start(self) -> None:
        if (folder := self.context.checkpoint_dir) is not None:
            version, link, weights = (folder / STATE).read_text().split()
            self._version, self._chain, self._weights = int(version), bytes.fromhex(link), int(weights)
            assert (folder / MODEL).read_text() == weights
        self._arena = Segment.create(self.context.weights_arena, 8 * WORDS * 2)
        self._published = self._publish()

    async def stop(self) -> None:
        if hasattr(self, "_arena"):
            self._arena.unlink()
            self._arena.close()
        await super().stop()

    async def step(self, cuts: Cuts) -> StepReport:
        async with self._turn:
            if self._last is not None and self._last[0] == cuts:
                return self._last[1]
            if (cuts.epoch, cuts.version) != (self.context.epoch, self._version):
                raise Refused(f"a step from version {cuts.version} of epoch {cuts.epoch}; it is at {self._version}")
            batch = await self.context.reader.read(cuts.batch, ["response_ids", "versions"])
            tokens = [column.tolist() for column in batch["response_ids"]]
            await asyncio.sleep(self.context.options["step_time"])
            report = await self._train(cuts, tokens, [column.tolist() for column in batch["versions"]])
            self._last = (cuts, report)
            return report

    async def _train(self, cuts: Cuts, tokens: list[list[int]], versions: list[list[int]]) -> StepReport:
        oldest = self._version - self.context.config.staleness.limit
        samples = [
            TrainedSample(*row.key, row.attempt, sum(v >= oldest for v in stamps), sum(v < oldest for v in stamps))
            for row, stamps in zip(cuts.batch, versions, strict=True)
        ]
        if not any(sample.trained for sample in samples):
            return self._report(samples, "stale")
        facts = [(row.key, row.advantage, said) for row, said in zip(cuts.batch, tokens, strict=True)]
        self._weights = number_of(self._weights, facts)
        self._chain = chain(self._chain, [(*row.key, row.attempt) for row in cuts.batch])
        while self._leases.holders(self._version + 1):
            self._leases_changed.clear()
            await self._leases_changed.wait()
        self._version += 1
        self._published = self._publish()
        return self._report(samples, "")

    def _publish(self) -> Published:
        version, slot = self._version, slot_of(self._version)
        self._leases.begin(version)
        self._arena.array(8 * WORDS * slot, np.int64, WORDS)[:] = (self.context.epoch, version, self._weights)
        self._leases.wrote(version)
        return Published(self.context.epoch, version, self.context.weights_arena, slot, "")

    def _report(self, samples: list[TrainedSample], skipped: str) -> StepReport:
        link, published = self._chain.hex(), None if skipped else self._published
        epoch, version = self.context.epoch, self._version
        return StepReport(epoch, version, int(not skipped), skipped, link, {}, tuple(samples), published)

    async def published(self) -> Published:
        return self._published

    async def using(self, reader: str, version: int) -> None:
        self._leases.using(reader, version)
        self._leases_changed.set()

    async def detached(self, reader: str) -> None:
        self._leases.detach(reader)
        self._leases_changed.set()

    async def checkpoint(self, directory: str, epoch: int, version: int) -> Checkpointed:
        assert (epoch, version) == (self.context.epoch, self._version)
        folder = Path(directory)
        self._fault("asked")
        digests = [_write(folder / MODEL, str(self._weights))]
        self._fault(MODEL)
        digests.append(_write(folder / STATE, f"{version} {self._chain.hex()} {self._weights}"))
        self._fault(STATE)
        return Checkpointed(version, self._chain.hex(), dict(zip((MODEL, STATE), digests, strict=True)))

    def _fault(self, where: str) -> None:
        died = Path(self.context.options["died"])
        if self.context.options["dies"] == [where, self._version] and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def _write(path: Path, text: str) -> str:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return sha256(text.encode()).hexdigest()

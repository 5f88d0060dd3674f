"""Generation and training without a model: a whole run takes a second, and its rewards depend on its weights.

The weights are one number, made of all that was trained so far. A token depends on the seed of its sample and on the
weights that sampled it, so that a step which is lost, repeated or trained on other rows changes every later reward.
Weights lie in shared memory, and the files of checkpoints are fsynced. Worker processes import this module.
"""

import os
import signal
from hashlib import sha256
from pathlib import Path

import numpy as np

from asyncrl.errors import PeerLost
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.fleet.worker.worker_spec import RunFacts
from asyncrl.lanes.shared_memory import Segment
from asyncrl.lanes.weights.leases import slot_of
from asyncrl.protocols.batch import Array, Batch, Cuts
from asyncrl.protocols.messages import Published
from asyncrl.protocols.seeds import member_seed
from asyncrl.simulation.fakes.generation import FakeGeneration, FakeSequence, Spans
from asyncrl.simulation.fakes.training import FakeTraining, StepCost, WriteCopy

LONGEST = 12
WORDS = 3
"""Words of a slot of weights: incarnation, version, weights."""
MODEL = "model.bin"
STATE = "state.bin"


def number_of(*facts: object) -> int:
    return int.from_bytes(sha256(repr(facts).encode()).digest()[:7])


class TorchlessGeneration(FakeGeneration):
    """Samples tokens that depend on the weights. options: `token_time`, the seconds of a token."""

    def __init__(self, context: WorkerContext) -> None:
        slots = context.config.generation.slots
        token_time = context.spec.options["token_time"]
        super().__init__(slots, token_time, lambda chance: chance.randrange(3, LONGEST), context=context)
        self._arena: Segment | None = None
        self._weights: dict[int, int] = {}

    async def stop(self) -> None:
        if self._arena is not None:
            self._arena.close()
        await super().stop()

    async def renew(self, facts: RunFacts) -> None:
        await super().renew(facts)
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    async def load_weights(self, published: Published) -> None:
        if self._arena is None:
            try:
                self._arena = Segment.open(published.arena)
            except FileNotFoundError as gone:
                raise PeerLost("the weights are gone with their trainer") from gone
        incarnation, version, weights = np.frombuffer(
            self._arena.buffer, np.int64, WORDS, 8 * WORDS * published.slot
        ).tolist()
        assert (incarnation, version) == (published.incarnation, published.version), "overwritten under our lease"
        self._weights[version] = weights

    def columns(self, sequence: FakeSequence, spans: Spans) -> dict[str, Array]:
        columns = super().columns(sequence, spans)
        seed = member_seed(sequence.prompts.seed, sequence.member)
        weights = [self._weights[version] for version in columns["versions"].tolist()]
        tokens = [number_of(seed, at, weight) % 97 for at, weight in enumerate(weights)]
        text = np.frombuffer(" ".join(map(str, tokens)).encode(), np.uint8)
        return {**columns, "response_ids": np.array(tokens, np.int32), "text": text}


class TorchlessTraining(FakeTraining):
    """Learns a number. options: `step_time`: seconds of a step; an hour from version `slow` on. `dies`: [where,
    version] that kills it once, while it writes this checkpoint; `died`: a file that says that it has."""

    def __init__(self, context: WorkerContext) -> None:
        cost = StepCost(context.spec.options["step_time"])
        limit = context.config.staleness.limit
        super().__init__(cost, limit, read_columns=["versions", "response_ids"], context=context)
        self.arena = context.facts.weights_arena
        self._weights = 1
        self._segment: Segment | None = None

    async def start(self) -> None:
        if (folder := self.context.facts.checkpoint_dir) is not None:
            version, link, weights = (folder / STATE).read_text().split()
            self.restore(int(version), bytes.fromhex(link))
            self._weights = int(weights)
            assert (folder / MODEL).read_text() == weights
        self._segment = Segment.create(self.arena, 8 * WORDS * 2)
        self.write_weights(self.version)

    async def stop(self) -> None:
        if self._segment is not None:
            self._segment.unlink()
            self._segment.close()
        await super().stop()

    async def spend(self, seconds: float) -> None:
        is_slow = 0 <= self.context.spec.options["slow"] <= self.version
        await super().spend(3600.0 if is_slow else seconds)

    def learn(self, cuts: Cuts, rows: Batch) -> None:
        tokens = [column.tolist() for column in rows["response_ids"]]
        facts = [(row.key, row.advantage, said) for row, said in zip(cuts.batch, tokens, strict=True)]
        self._weights = number_of(self._weights, facts)

    def write_weights(self, version: int) -> None:
        assert self._segment is not None, "created in `start`"
        slot = np.frombuffer(self._segment.buffer, np.int64, WORDS, 8 * WORDS * slot_of(version))
        slot[:] = (self.incarnation, version, self._weights)

    def state_copy(self) -> WriteCopy:
        version = self.version
        weights = str(self._weights)
        copied = f"{version} {self.chain.hex()} {weights}"

        def write(directory: str) -> dict[str, str]:
            folder = Path(directory)
            self._fault("asked", version)
            model = _write(folder / MODEL, weights.encode())
            self._fault(MODEL, version)
            state = _write(folder / STATE, copied.encode())
            self._fault(STATE, version)
            return {MODEL: model, STATE: state}

        return write

    def write_file(self, directory: str, file: str, data: bytes) -> None:
        _write(Path(directory) / file, data)

    def _fault(self, where: str, version: int) -> None:
        died = Path(self.context.spec.options["died"])
        if self.context.spec.options["dies"] == [where, version] and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def _write(path: Path, data: bytes) -> str:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return sha256(data).hexdigest()

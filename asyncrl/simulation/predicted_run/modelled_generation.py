"""A generation service whose replicas decode the slower, the more sequences they hold.

Every sequence of a replica gets a token in each decode step, so that one number tells how far all are: `sampled`, the
tokens that a sequence that never ended would have. A sequence ends when that number has grown by its length.
"""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from asyncrl.lanes.data.row_store import RowStore
from asyncrl.protocols.messages import Published, Using
from asyncrl.simulation.fakes.fake_service import now
from asyncrl.simulation.fakes.generation import FakeGeneration, Lengths, Sequence

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
    running: dict[Sequence, float] = field(default_factory=dict)
    ends: list[tuple[float, int, Sequence]] = field(default_factory=list)
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


class ModelledGeneration(FakeGeneration):
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
        self._of: dict[Sequence, DecodingReplica] = {}
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

    def tokens_at_flips(self, sequence: Sequence) -> list[float]:
        replica = self._of[sequence]
        began = replica.running[sequence] - sequence.tokens
        return [flip - began for flip in replica.flips]

    def busy_seconds(self) -> list[float]:
        """Returns the seconds in which each replica has had work."""
        for replica in self.replicas:
            replica.advance(self._step)
        return [replica.busy for replica in self.replicas]

    def _begin(self, sequence: Sequence) -> None:
        replica = self._emptiest()
        replica.advance(self._step)
        sequence.began = now()
        self._of[sequence] = replica
        replica.running[sequence] = end = replica.sampled + sequence.tokens
        heapq.heappush(replica.ends, (end, next(self._order), sequence))
        replica.set_timer(self._step, self._finish_due)

    def _leave_slot(self, sequence: Sequence) -> None:
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

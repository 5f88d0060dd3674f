"""A critic whose work is only time; it remembers which samples it has learnt from."""

import asyncio
from collections.abc import Iterable

import numpy as np

from asyncrl.errors import LostRows, Refused
from asyncrl.protocols.batch import BatchRef, Cuts, SampleName
from asyncrl.protocols.messages import Checkpointed, ValueReport
from asyncrl.protocols.service_contracts import Critic
from asyncrl.simulation.fakes.fake_service import FakeService


class FakeCritic(FakeService, Critic):
    """Values samples in `delay` seconds and learns from a batch in `cost` seconds; it never runs in a worker.

    signal: "cost" for a critic of costs. learnt: samples in its loss, with the version that the policy had then.
    """

    row_bytes = 64

    def __init__(self, delay: float, cost: float, peers: Iterable[FakeService] = (), signal: str = "") -> None:
        prefix = f"{signal}_" if signal else ""
        super().__init__(f"{prefix}critic", None, peers)
        self.delay = delay
        self.cost = cost
        self.learnt: dict[SampleName, int] = {}
        self._columns = (f"{prefix}values", f"{prefix}valued_at")
        self._version = 0

    def restore(self, version: int) -> None:
        self._version = version

    async def values(self, samples: BatchRef) -> BatchRef:
        await self.read(samples, ())
        await self.spend(self.delay)
        nothing = dict.fromkeys(self._columns, np.zeros(0, np.float32))
        return samples.with_places([self.keep(row.name, nothing) for row in samples])

    async def update(self, cuts: Cuts) -> ValueReport:
        if cuts.incarnation != self.incarnation or cuts.version < self._version:
            raise Refused(
                f"an update from version {cuts.version} was refused: the critic has learnt from {self._version}"
            )
        self._version = cuts.version
        fresh = [row for row in cuts.batch if row.name not in self.learnt]
        if not fresh:
            return self._report(cuts, 0, "learnt before")
        try:
            await self.read(BatchRef(tuple(fresh)), ())
        except LostRows:
            return self._report(cuts, 0, "rows lost")
        self.learnt |= dict.fromkeys((row.name for row in fresh), cuts.version)
        await asyncio.sleep(self.cost)
        return self._report(cuts, 1, "")

    async def undo_update(self) -> None:
        """Learns a batch at its beginning, and then only takes time."""

    async def copy_state(self, incarnation: int, version: int) -> None:
        """Copies nothing: a resumed critic begins anew."""

    async def checkpoint(self, directory: str, incarnation: int, version: int) -> Checkpointed:
        return Checkpointed(version, "", {})

    def _report(self, cuts: Cuts, updates: int, skipped: str) -> ValueReport:
        metrics = {f"{self.service}/updates": float(updates)}
        return ValueReport(cuts.incarnation, cuts.version, updates, skipped, metrics)

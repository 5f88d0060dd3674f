"""Hands new weights from the trainer over to the generators that read them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from asyncrl.concurrency import running_timeout
from asyncrl.controller.observers.events import Observe, WeightsHandedOver
from asyncrl.errors import FleetFailed, Refused, Retryable, WeightsError
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.messages import Published, Using
from asyncrl.protocols.service_contracts import Training

NO_VERSION = -1
"""Version of a reader that has taken over no weights yet."""


@dataclass(eq=False, slots=True)
class _Report:
    """One call to the trainer. readers: of one version. accepted: whether the trainer has taken it, once answered."""

    readers: dict[str, None] = field(default_factory=dict)
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    accepted: bool = False


class LeaseReports:
    """Reports to the trainer which version readers use. Readers that come while a call is under way share the next one,
    because there are as many calls as ranks of the trainer."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._waiting: dict[int, _Report] = {}
        self._changed = asyncio.Event()

    async def report(self, reader: str, version: int) -> bool:
        """Returns whether the trainer has taken the report: it does not when it died, or has overwritten the version.
        The call has a deadline of its own."""
        report = self._waiting.setdefault(version, _Report())
        report.readers[reader] = None
        self._changed.set()
        await report.answered.wait()
        return report.accepted

    def forget(self, reader: str) -> None:
        """Takes back what is not sent yet: sent after the end of a lease, it would begin another one."""
        for report in self._waiting.values():
            report.readers.pop(reader, None)

    async def run(self) -> None:
        """Sends reports until cancelled. Raises what a call raises that a death or a newer version does not explain."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._waiting:
                version = min(self._waiting)
                await self._send(version, self._waiting.pop(version))

    async def _send(self, version: int, report: _Report) -> None:
        if report.readers:
            try:
                await self._training.using(tuple(report.readers), version)
                report.accepted = True
            except (Retryable, Refused):
                pass  # The fleet handles a death; of a version that was overwritten, a newer one is announced already.
        report.answered.set()


@dataclass
class WeightPublisher:
    """Hands the newest version to every reader, each in a task of its own, and reports to the trainer what each reads.

    Readers jump to the newest version. A reader is attached to a version before it is called: else, while its answer is
    on the way, the trainer could overwrite what it reads. A reader that does not take over a version within `deadline`
    seconds, and those that its bytes may take over a network, keeps the trainer from writing, or has no weights to
    sample with, so `kill` is called with it. `run` raises FleetFailed when a reader finds that a version is damaged or
    not to be reached.
    """

    fleet: Fleet
    deadline: float
    observe: Observe
    kill: Callable[[str], None]

    def __post_init__(self) -> None:
        self._newest: Published | None = None
        self._changed = asyncio.Event()
        self._reading: dict[str, int] = {}
        self._handovers: dict[str, asyncio.Task[None]] = {}
        self._leases = LeaseReports(self.fleet.training)

    def join(self, reader: str) -> None:
        """Adds a reader that has no weights yet; a call of `announce` follows."""
        self._reading[reader] = NO_VERSION

    def announce(self, published: Published) -> None:
        """Hands this version over, also when it is the same again because a reader joined that does not have it."""
        if self._newest is None or self._newest.version <= published.version:  # An older one was overtaken on its way.
            self._newest = published
        self._changed.set()

    def forget(self, reader: str) -> None:
        self._reading.pop(reader, None)
        self._leases.forget(reader)
        if (handover := self._handovers.pop(reader, None)) is not None:
            handover.cancel()

    async def run(self) -> None:
        """Starts a handover to each reader of an older version, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._leases.run(), name="report leases")
            while True:
                await self._changed.wait()
                self._changed.clear()
                assert self._newest is not None, "set by announce"
                for reader, version in self._reading.items():
                    if version < self._newest.version and reader not in self._handovers:
                        self._handovers[reader] = tasks.create_task(self._keep_up(reader), name=f"weights to {reader}")

    async def _keep_up(self, reader: str) -> None:
        called_with = NO_VERSION
        while reader in self._reading and self._newest is not None and called_with < self._newest.version:
            called_with = self._newest.version
            await self._hand_over(reader, self._newest)
        self._handovers.pop(reader, None)

    async def _hand_over(self, reader: str, published: Published) -> None:
        began = asyncio.get_running_loop().time()
        if self._reading[reader] == NO_VERSION and not await self._attach(reader, published):
            return
        try:
            using = await self._use_weights(reader, published)
        except (Retryable, Refused):
            return  # The fleet handles a death; of a version that was overwritten, a newer one is announced already.
        except WeightsError as unusable:
            text = f"weights of version {published.version} do not reach {reader}: {unusable}"
            raise FleetFailed(text) from unusable
        if using is None:
            return self._overdue(reader)
        if reader in using.readers and await self._relay(reader, using):  # Else it keeps the version that it reads.
            seconds = asyncio.get_running_loop().time() - began
            self.observe(WeightsHandedOver(using.version, reader, seconds, using.canary))

    async def _attach(self, reader: str, published: Published) -> bool:
        return await self._leases.report(reader, published.version)

    async def _use_weights(self, reader: str, published: Published) -> Using | None:
        """Calls the replica of the reader, for another one may hang; returns None without an answer in time."""
        replica = self.fleet.generation.replica_of(reader)
        try:
            async with running_timeout(self.deadline + published.transfer):
                return await replica.use_weights(replace(published, readers=(reader,)))
        except TimeoutError:
            return None

    async def _relay(self, reader: str, using: Using) -> bool:
        self._reading[reader] = using.version
        return await self._leases.report(reader, using.version)

    def _overdue(self, reader: str) -> None:
        """Gives up on a reader; it keeps its lease until its process is gone."""
        del self._reading[reader]
        self.kill(reader)

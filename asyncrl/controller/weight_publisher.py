"""Hands new weights from the trainer over to the generators that read them."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from asyncrl.concurrency import running_timeout
from asyncrl.controller.observers.events import Observe, Warned, WeightsHandedOver
from asyncrl.errors import AsyncrlError, FleetFailed, Refused, Retryable
from asyncrl.fleet.failure_table import Ends, Raised, When, Who, is_everywhere, is_fault, what_ends
from asyncrl.fleet.fleet import Fleet, worker_name
from asyncrl.protocols.messages import Published, Using
from asyncrl.protocols.service_contracts import Training

NO_VERSION = -1
"""Version of a reader that has taken over no weights yet."""
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0
"""Seconds until weights that did not arrive are offered again, doubled each time."""
LEFT_OUT_AFTER = 2
NAMED_AFTER = 3
"""Offers that fail in a row until a reader is left out, where others have the version, or until it is said that nobody
gets it: a trainer that stands still for a moment is no matter."""


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

    Readers jump to the newest version, which is offered until a reader has it or is replaced. A reader is attached to a
    version before it is called: else, while its answer is on the way, the trainer could overwrite what it reads. A
    reader that does not take over a version within `deadline` seconds, and those that its bytes may take over a
    network, keeps the trainer from writing, or has no weights to sample with, so `kill` is called with it; so it is
    with one that raises an error of its own. One that says that the weights do not come is not to blame: while others
    get them, `leave_out` is called with it and why, and with "" once it has them. `run` raises FleetFailed when all
    readers raise the same.

    The Controller calls it; its loop is one of the Controller's.
    """

    fleet: Fleet
    deadline: float
    observe: Observe
    kill: Callable[[str], None]
    leave_out: Callable[[str, str], None] = lambda reader, why: None

    def __post_init__(self) -> None:
        self._newest: Published | None = None
        self._changed = asyncio.Event()
        self._reading: dict[str, int] = {}
        self._handovers: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, int] = {}  # Offers that failed in a row.
        self._left_out = set[str]()
        self._raised: dict[str, Raised] = {}  # By the worker's name, until its next instance has weights.
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
        self._failures.pop(reader, None)
        self._left_out.discard(reader)
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
        offered = NO_VERSION
        while reader in self._reading and self._newest is not None and offered < self._newest.version:
            published = self._newest
            try:
                await self._hand_over(reader, published)
            except FleetFailed:
                raise
            except AsyncrlError as error:
                if is_fault(error):
                    self._end_reader(reader, published, error)
                else:
                    await self._pause(reader, published, error)
            else:
                offered = published.version
                self._arrived(reader)
        self._handovers.pop(reader, None)

    async def _hand_over(self, reader: str, published: Published) -> None:
        """Raises Retryable, Refused or DeadlineExceeded when the version has to be offered again, and what the reader
        raised for itself."""
        began = asyncio.get_running_loop().time()
        if self._reading[reader] == NO_VERSION and not await self._attach(reader, published):
            raise Refused(f"the trainer did not attach {reader}")
        using = await self._use_weights(reader, published)
        if using is None:
            return self._overdue(reader)
        if reader in using.readers and await self._relay(reader, using):  # Else it keeps the version that it reads.
            seconds = asyncio.get_running_loop().time() - began
            self.observe(WeightsHandedOver(using.version, reader, seconds, using.canary))

    def unread(self, readers: Iterable[str], why: str) -> list[str]:
        """Leaves out readers of whose rows the trainer gets none, until weights come to them over the same network, but
        never the last one. Returns those that were left out."""
        before = self._left_out.copy()
        for reader in readers:
            if reader in self._reading and self._reading.keys() - self._left_out - {reader}:
                self._set_out(reader, f"rows do not come to the trainer from {reader}: {why}")
        return sorted(self._left_out - before)

    def _set_out(self, reader: str, text: str) -> None:
        if reader not in self._left_out:
            self._left_out.add(reader)
            self.observe(
                Warned(f"{text}. It gets no samples until it has new weights: look at the network between them")
            )
            self.leave_out(reader, text)

    def _arrived(self, reader: str) -> None:
        self._failures.pop(reader, None)
        self._raised.pop(worker_name(reader), None)
        if reader in self._left_out:
            self._left_out.discard(reader)
            self.leave_out(reader, "")
            self.observe(Warned(f"{reader} has the weights again, and gets samples"))

    async def _pause(self, reader: str, published: Published, error: AsyncrlError) -> None:
        """Waits until a version that did not arrive is offered again. Where only this reader does not get it for long,
        names the pair that does not meet, and leaves the reader out meanwhile."""
        failures = self._failures[reader] = self._failures.get(reader, 0) + 1
        text = f"weights of version {published.version} do not come to {reader} from {published.arena}: {error}"
        others = (each for each, version in self._reading.items() if version > self._reading[reader])
        is_alone = any(each not in self._failures for each in others)
        if failures >= LEFT_OUT_AFTER and is_alone:
            self._set_out(reader, text)
        elif failures == NAMED_AFTER and reader not in self._left_out:
            self.observe(Warned(f"{text}. They are offered again and again"))
        await asyncio.sleep(min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (failures - 1)))

    def _end_reader(self, reader: str, published: Published, error: AsyncrlError) -> None:
        """Has a reader replaced that raised an error of its own. Raises FleetFailed when all did."""
        name = worker_name(reader)
        self._raised[name] = Raised.of("use_weights", error).after(self._raised.get(name))
        names = {*map(worker_name, self._reading), *self._raised}
        when = When.EVERYWHERE if is_everywhere(map(self._raised.get, sorted(names))) else When.CALL
        text = f"weights of version {published.version} do not reach {reader}: {error}"
        if what_ends(Who.WORKER, when) is Ends.RUN:
            raise FleetFailed(text) from error
        self.observe(Warned(text))
        self._overdue(reader)

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

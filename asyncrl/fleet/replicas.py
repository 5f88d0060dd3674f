"""The workers of one service as callers see them: which are alive, which has the fewest calls, what is outstanding."""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol, Self, cast

from asyncrl.errors import DeadlineExceeded, FleetFailed, PeerLost
from asyncrl.lanes.control.wire import Wakeup
from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.layout import Layout
from asyncrl.protocols.messages import PromptGroup
from asyncrl.protocols.service_contracts import EndpointSpec, Lane

Arguments = tuple[Any, ...]

DEATH_NOTICE = 1.0
"""Seconds after a connection broke in which the death of its process becomes known, if it died. The socket breaks
before the kernel reports the death, but only the kernel knows the cause."""

MAX_FAILED_CALLS = 256
"""Failed calls that a worker remembers for a moment."""


class Channel(Protocol):
    """The part of a client that calls need. lost: set once no call can reach the worker any more."""

    lost: asyncio.Event

    async def call(self, method: str, args: Arguments, deadline: float) -> Any: ...

    def stream(self, method: str, args: Arguments, deadline: float) -> AsyncIterator[Any]: ...


@dataclass(frozen=True, slots=True)
class OutstandingCall:
    """A call that an instance of a worker has not answered yet. since: loop time."""

    method: str
    lane: Lane
    since: float
    instance: str
    args: Arguments

    @property
    def groups(self) -> Iterator[int]:
        """Yields the ids of the groups that the arguments belong to."""
        for arg in self.args:
            if isinstance(arg, PromptGroup):
                yield arg.id
            elif isinstance(arg, BatchRef):
                yield from (row.group for row in arg)


class RemoteWorker:
    """One worker, whichever instance of it is alive at the moment.

    answer_count: calls that were answered and items that came, health excluded. last_answer_at: loop time of the newest
    answer to any call. restarting: whether another instance is started after a death.
    """

    def __init__(self, service: str, replica: int, rank: int, changed: Wakeup) -> None:
        self.service = service
        self.replica = replica
        self.rank = rank
        self.instance = ""
        self.answer_count = 0
        self.last_answer_at = asyncio.get_running_loop().time()
        self.outstanding: dict[int, OutstandingCall] = {}
        self._failed: deque[tuple[float, OutstandingCall]] = deque(maxlen=MAX_FAILED_CALLS)
        self._numbers = itertools.count()
        self._channels: Mapping[Lane, Channel] = {}
        self._cause: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._cause.set_result("it is starting")
        self.restarting = True
        self._changed = changed

    @property
    def name(self) -> str:
        return f"{self.service}{self.replica}.{self.rank}"

    @property
    def alive(self) -> bool:
        """Returns whether it takes calls."""
        for channel in self._channels.values():
            if channel.lost.is_set():
                return False
        return bool(self._channels)

    @property
    def status(self) -> str:
        """One clause for errors and the watchdog."""
        cause = self._cause.result() if self._cause.done() else "its connection broke"
        return f"{self.name} is alive" if self.alive else f"{self.name} does not answer: {cause}"

    def connected(self, instance: str, channels: Mapping[Lane, Channel]) -> None:
        self.instance = instance
        self._channels = channels
        self._cause = asyncio.get_running_loop().create_future()
        self._changed.wake()

    def lost(self, cause: str, *, restarting: bool) -> None:
        """Fails calls from now on. restarting: whether another instance is being started."""
        self._channels = {}
        self.restarting = restarting
        if self._cause.done():
            self._cause = asyncio.get_running_loop().create_future()
        self._cause.set_result(cause)
        self._changed.wake()

    async def call(self, spec: EndpointSpec, args: Arguments, deadline: float) -> Any:
        """Calls this worker alone; deadline in seconds. Raises PeerLost when it is dead or dies during the call."""
        instance, cause = self.instance, self._cause
        with self._tracked(spec, args):
            try:
                answer = await self._channel(spec.lane).call(spec.name, args, deadline)
            except PeerLost as lost:
                raise (explained := await self._explain(lost, instance, cause)) from explained.__cause__
        self._note_answer(spec)
        return answer

    async def stream(self, spec: EndpointSpec, args: Arguments, deadline: float) -> AsyncIterator[Any]:
        """Yields the items of a call; closing the iterator cancels the call in the worker."""
        instance, cause = self.instance, self._cause
        with self._tracked(spec, args):
            try:
                items = self._channel(spec.lane).stream(spec.name, args, deadline)
                async with aclosing(cast(Any, items)):
                    async for item in items:
                        self._note_answer(spec)
                        yield item
            except PeerLost as lost:
                raise (explained := await self._explain(lost, instance, cause)) from explained.__cause__

    def _note_answer(self, spec: EndpointSpec) -> None:
        self.last_answer_at = asyncio.get_running_loop().time()
        self.answer_count += spec.name != "health"

    def _channel(self, lane: Lane) -> Channel:
        if not self.alive:
            raise PeerLost(self.status)
        return self._channels[lane]

    def groups_at(self, instance: str) -> list[int]:
        """Returns the groups of calls outstanding at this instance and of calls that failed there a moment ago.

        A call that reads rows of a dying worker may fail, and end calls there, before the death is known.
        """
        recent = asyncio.get_running_loop().time() - 2 * DEATH_NOTICE
        calls = [*self.outstanding.values(), *(call for failed_at, call in self._failed if failed_at >= recent)]
        return [group for call in calls if call.instance == instance for group in call.groups]

    @contextmanager
    def _tracked(self, spec: EndpointSpec, args: Arguments) -> Iterator[None]:
        number, now = next(self._numbers), asyncio.get_running_loop().time
        self.outstanding[number] = OutstandingCall(spec.name, spec.lane, now(), self.instance, args)
        answered = False
        try:
            yield
            answered = True
        finally:
            call = self.outstanding.pop(number)
            if not answered:
                self._failed.append((now(), call))

    async def _explain(self, lost: PeerLost, instance: str, cause: asyncio.Future[str]) -> PeerLost:
        """Returns the error with the cause of the death once that is known; `lost` itself when no worker died."""
        if self.alive:
            return lost
        await asyncio.wait([cause], timeout=2 * DEATH_NOTICE)
        return PeerLost(f"{instance}: {cause.result()}") if cause.done() and instance else lost


@dataclass(slots=True, eq=False)
class Replica:
    """One copy of a service, with a worker for each rank of its layout. load: calls that chose this replica."""

    workers: tuple[RemoteWorker, ...]
    load: int = 0

    @property
    def alive(self) -> bool:
        return all([worker.alive for worker in self.workers])

    def __enter__(self) -> None:
        """Counts a call in `load` as soon as it chose this replica, because others choose before it is sent."""
        self.load += 1

    def __exit__(self, *_: object) -> None:
        self.load -= 1


class Replicas:
    """All workers of one service."""

    def __init__(self, service: str, replicas: int, layout: Layout) -> None:
        self.service = service
        self.layout = layout
        self._changed = Wakeup()
        self.replicas = tuple(
            Replica(tuple(RemoteWorker(service, replica, rank, self._changed) for rank in range(layout.size)))
            for replica in range(replicas)
        )

    def __iter__(self) -> Iterator[RemoteWorker]:
        return (worker for replica in self.replicas for worker in replica.workers)

    def replica_of(self, instance: str) -> Self:
        """Returns these replicas reduced to the one of this instance. Raises PeerLost when it was replaced."""
        found = tuple(each for each in self.replicas if any(worker.instance == instance for worker in each.workers))
        if not found:
            raise PeerLost(f"{instance} is no worker of {self.service} any more")
        only = copy(self)
        only.replicas = found
        return only

    def worker(self, replica: int, rank: int) -> RemoteWorker:
        return self.replicas[replica].workers[rank]

    def groups_at(self, instance: str) -> list[int]:
        return [group for worker in self for group in worker.groups_at(instance)]

    async def wait_for_live(self, until: float) -> list[Replica]:
        """Returns the live replicas; waits for a restart when there is none.

        Args:
            until: loop time of the deadline.

        Raises:
            FleetFailed: no replica can come back. It is no PeerLost, which callers would retry until the supervisor
                ends the run.
            DeadlineExceeded: none came back in time.
        """
        if live := [replica for replica in self.replicas if replica.alive]:
            return live
        try:
            async with asyncio.timeout_at(until):
                while not (live := [replica for replica in self.replicas if replica.alive]):
                    if all(
                        any(not each.alive and not each.restarting for each in replica.workers)
                        for replica in self.replicas
                    ):
                        raise FleetFailed(self._dead_workers())
                    await self._changed.wait()
        except TimeoutError as error:
            raise DeadlineExceeded(f"no worker of {self.service} came back in time: {self._dead_workers()}") from error
        return live

    async def least_loaded(self, until: float) -> Replica:
        """Returns the first live replica that the fewest calls chose. Raises what `wait_for_live` raises."""
        live = await self.wait_for_live(until)
        return live[0] if len(live) == 1 else min(live, key=lambda replica: replica.load)

    def _dead_workers(self) -> str:
        return "; ".join(worker.status for worker in self if not worker.alive)

"""The workers of one service as their callers see them: who lives, who is freest, what is outstanding."""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol, Self, cast

from asyncrl.errors import DeadlineExceeded, FleetFailed, PeerLost
from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.contracts import EndpointSpec, Lane
from asyncrl.protocols.layout import Layout
from asyncrl.protocols.messages import PromptGroup
from asyncrl.wire.ends import Signal

Arguments = tuple[Any, ...]

DEATH_NOTICE = 1.0
"""Seconds from a broken link until the process behind it is taken for alive. A socket breaks before the kernel tells of
the death, but only the kernel knows its cause."""


GIVEN_UP = 256
"""Calls without an answer that a worker remembers for a moment."""


class Channel(Protocol):
    """The part of a link that calls need. lost: set once no call can reach the worker any more."""

    lost: asyncio.Event

    async def call(self, method: str, args: Arguments, deadline: float) -> Any: ...

    def stream(self, method: str, args: Arguments, deadline: float) -> AsyncIterator[Any]: ...


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A call that an instance of a worker has not answered yet; since: loop time."""

    method: str
    lane: Lane
    since: float
    instance: str
    args: Arguments

    @property
    def groups(self) -> Iterator[int]:
        """Those it is about."""
        for arg in self.args:
            if isinstance(arg, PromptGroup):
                yield arg.id
            elif isinstance(arg, BatchRef):
                yield from (row.group for row in arg)


class RemoteWorker:
    """One worker, whichever instance of it lives at the moment.

    answers: how many calls it answered and items it sent, but for health; heard: loop time of the last of any.
    """

    def __init__(self, service: str, replica: int, rank: int, changed: Signal | None = None) -> None:
        self.service, self.replica, self.rank = service, replica, rank
        self.instance = ""
        self.answers = 0
        self.heard = asyncio.get_running_loop().time()
        self.outstanding: dict[int, Outstanding] = {}
        self._given_up: deque[tuple[float, Outstanding]] = deque(maxlen=GIVEN_UP)
        self._numbers = itertools.count()
        self._channels: Mapping[Lane, Channel] = {}
        self._cause = _already("it is starting")
        self._returns = True
        self._changed = changed or Signal()

    @property
    def name(self) -> str:
        return f"{self.service}{self.replica}.{self.rank}"

    @property
    def lives(self) -> bool:
        for channel in self._channels.values():
            if channel.lost.is_set():
                return False
        return bool(self._channels)

    @property
    def gone(self) -> bool:
        """Dead, and nobody starts it again."""
        return not self.lives and not self._returns

    @property
    def condition(self) -> str:
        """One clause, for errors and the watchdog."""
        why = self._cause.result() if self._cause.done() else "its link broke"
        return f"{self.name} lives" if self.lives else f"{self.name} does not answer: {why}"

    def connected(self, instance: str, channels: Mapping[Lane, Channel]) -> None:
        """From now on calls go to this instance."""
        self.instance, self._channels = instance, channels
        self._cause = asyncio.get_running_loop().create_future()
        self._changed.wake()

    def lost(self, why: str, *, returns: bool) -> None:
        """Nobody answers from now on; `returns`: another instance is being started."""
        self._channels, self._returns = {}, returns
        if self._cause.done():
            self._cause = _already(why)
        else:
            self._cause.set_result(why)
        self._changed.wake()

    async def call(self, spec: EndpointSpec, args: Arguments, deadline: float) -> Any:
        """Call this worker alone; deadline in seconds. Raises PeerLost when it does not live, or dies meanwhile."""
        instance, cause = self.instance, self._cause
        with self._noted(spec, args):
            try:
                answer = await self._channel(spec.lane).call(spec.name, args, deadline)
            except PeerLost as lost:
                told = await self._explained(lost, instance, cause)
                raise told from told.__cause__
        self._heard(spec)
        return answer

    async def stream(self, spec: EndpointSpec, args: Arguments, deadline: float) -> AsyncIterator[Any]:
        """Items of a call; closing the iterator cancels it in the worker."""
        instance, cause = self.instance, self._cause
        with self._noted(spec, args):
            try:
                items = self._channel(spec.lane).stream(spec.name, args, deadline)
                async with aclosing(cast(Any, items)):
                    async for item in items:
                        self._heard(spec)
                        yield item
            except PeerLost as lost:
                told = await self._explained(lost, instance, cause)
                raise told from told.__cause__

    def _heard(self, spec: EndpointSpec) -> None:
        self.heard = asyncio.get_running_loop().time()
        self.answers += spec.name != "health"

    def _channel(self, lane: Lane) -> Channel:
        if not self.lives:
            raise PeerLost(self.condition)
        return self._channels[lane]

    def groups_at(self, instance: str) -> list[int]:
        """Groups that calls at this instance are about, those included that were just given up: who reads the rows of
        a dying worker may fail, and end its call there, before the worker is known to be dead."""
        recent = asyncio.get_running_loop().time() - 2 * DEATH_NOTICE
        calls = [*self.outstanding.values(), *(call for ended, call in self._given_up if ended >= recent)]
        return [group for call in calls if call.instance == instance for group in call.groups]

    @contextmanager
    def _noted(self, spec: EndpointSpec, args: Arguments) -> Iterator[None]:
        number, now = next(self._numbers), asyncio.get_running_loop().time
        self.outstanding[number] = Outstanding(spec.name, spec.lane, now(), self.instance, args)
        answered = False
        try:
            yield
            answered = True
        finally:
            call = self.outstanding.pop(number)
            if not answered:
                self._given_up.append((now(), call))

    async def _explained(self, lost: PeerLost, instance: str, cause: asyncio.Future[str]) -> PeerLost:
        """With the cause of the death, once that is known; `lost` itself where nobody died."""
        if self.lives:
            return lost
        await asyncio.wait([cause], timeout=2 * DEATH_NOTICE)
        return PeerLost(f"{instance}: {cause.result()}") if cause.done() and instance else lost


def _already(why: str) -> asyncio.Future[str]:
    known: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    known.set_result(why)
    return known


class Replica:
    """One copy of a service: a worker for each rank of its layout. It lives while all of them do."""

    def __init__(self, workers: Sequence[RemoteWorker]) -> None:
        self.workers = tuple(workers)
        self.load = 0

    @property
    def lives(self) -> bool:
        return all([worker.lives for worker in self.workers])

    def __enter__(self) -> None:
        """Counts in `load` a call that chose this replica, from the choice on: others choose before it is sent."""
        self.load += 1

    def __exit__(self, *_: object) -> None:
        self.load -= 1


class Workers:
    """All workers of one service."""

    def __init__(self, service: str, replicas: int, layout: Layout) -> None:
        self.service, self.layout = service, layout
        self._changed = Signal()
        self.replicas = tuple(
            Replica([RemoteWorker(service, replica, rank, self._changed) for rank in range(layout.size)])
            for replica in range(replicas)
        )

    def __iter__(self) -> Iterator[RemoteWorker]:
        return (worker for replica in self.replicas for worker in replica.workers)

    def replica_of(self, instance: str) -> Self:
        """Only the replica that this instance works in. Raises PeerLost when it was replaced."""
        found = tuple(each for each in self.replicas if any(worker.instance == instance for worker in each.workers))
        if not found:
            raise PeerLost(f"{instance} is no worker of {self.service} any more")
        only = copy(self)
        only.replicas = found
        return only

    def worker(self, replica: int, rank: int) -> RemoteWorker:
        return self.replicas[replica].workers[rank]

    def groups_at(self, instance: str) -> list[int]:
        """Groups that calls outstanding at this instance are about."""
        return [group for worker in self for group in worker.groups_at(instance)]

    async def living(self, until: float) -> list[Replica]:
        """Replicas that live; waits for one that is being restarted.

        Args:
            until: loop time of the deadline.

        Raises:
            FleetFailed: all are dead for good. Not PeerLost: whoever may try again would do so for nothing until the
                supervisor, which ends them first, gives the fleet up.
            DeadlineExceeded: none came back in time.
        """
        if living := self._living():
            return living
        try:
            async with asyncio.timeout_at(until):
                while not (living := self._living()):
                    if all(any(worker.gone for worker in replica.workers) for replica in self.replicas):
                        raise FleetFailed(self._conditions())
                    await self._changed.wait()
        except TimeoutError as error:
            raise DeadlineExceeded(f"no worker of {self.service} came back in time: {self._conditions()}") from error
        return living

    def _living(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.lives]

    async def freest(self, until: float) -> Replica:
        """The living replica that the fewest calls chose, the first of equals. Raises as `living`."""
        living = self._living() or await self.living(until)
        return living[0] if len(living) == 1 else min(living, key=lambda replica: replica.load)

    def _conditions(self) -> str:
        return "; ".join(worker.condition for worker in self if not worker.lives)

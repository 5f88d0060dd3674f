"""One worker as the controller sees it: the connection to its present instance, and the calls outstanding there."""

import asyncio
import itertools
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any, Protocol, Self, cast

from asyncrl.errors import AsyncrlError, PeerLost
from asyncrl.fleet.failure_table import Raised
from asyncrl.fleet.worker.lane_access import Introductions
from asyncrl.fleet.worker.rank_meeting import RankMeetings
from asyncrl.fleet.worker.worker_spec import WorkerSpec
from asyncrl.lanes.control.client import Client, Silence
from asyncrl.lanes.control.wire import Wire
from asyncrl.lanes.host_id import HostId
from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.messages import Hello, PromptGroup
from asyncrl.protocols.service_contracts import EndpointSpec, Lane

Arguments = tuple[Any, ...]

DEATH_NOTICE = 1.0
"""Seconds after a connection broke in which the death of its process becomes known, if it died. The socket breaks
before the kernel reports the death, but only the kernel knows the cause."""

NOWHERE = HostId("")
"""Host of a worker of which no instance was started yet."""

SHORT_CALLS = ("health", "profile")
"""Calls whose callers set a short deadline and go on without an answer."""

MAX_FAILED_CALLS = 256
"""Failed calls that a worker remembers for a moment."""


class WorkerConnection:
    """The controller's connection to one instance: a client for each lane, which are lost together.

    `async with connection:` greets the instance and waits until it takes calls, each for at most `start_deadline`
    seconds. It raises PeerLost, Refused, DeadlineExceeded, and what the worker raised while it started. Meanwhile other
    workers admit the instance, and are told when it is gone, and the ranks of a replica learn where they meet.
    lost: set when a client lost its connection, with the reason in `reason`.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        wire: Wire,
        hello: Hello,
        start_deadline: float,
        introductions: Introductions,
        meetings: RankMeetings,
    ) -> None:
        self.lost = asyncio.Event()
        self.reason = ""
        self.channels: Mapping[Lane, Client] = {
            lane: Client(
                wire.connect(spec.reached_at(lane.value)),
                hello,
                f"{spec.service}{spec.replica}[{spec.rank}]",
                instance=spec.instance,
                queued=lane is Lane.WORK,
                heartbeat=spec.facts.heartbeat,
            )
            for lane in Lane
        }
        self._spec = spec
        self._introductions = introductions
        self._meetings = meetings
        self._start_deadline = start_deadline
        self._tasks = asyncio.TaskGroup()
        self._watches: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.__aexit__)
            for client in self.channels.values():
                await client.open(self._tasks, self._start_deadline)
                self._watches.append(self._tasks.create_task(self._watch(client), name=f"watch of {client.peer}"))
            control = self.channels[Lane.CONTROL]
            await self._meetings.bring(self._spec, control, self._start_deadline)
            await control.call("started", (), self._start_deadline)
            await self._introductions.add(self._spec, control)
            undo.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._introductions.remove(self._spec.instance)
        for watch in self._watches:
            watch.cancel()
        for client in self.channels.values():
            client.close()
        await self._tasks.__aexit__(None, None, None)

    async def _watch(self, client: Client) -> None:
        await client.lost.wait()
        self.fail(client.reason)

    def fail(self, reason: str) -> None:
        """Makes every outstanding call on all lanes raise PeerLost now."""
        if not self.lost.is_set():
            self.reason = reason
            self.lost.set()
        for client in self.channels.values():
            client.fail(reason)


class Channel(Protocol):
    """The part of a client that calls need. lost: set once no call can reach the worker any more. silence: heartbeats
    that the worker has not answered."""

    lost: asyncio.Event

    @property
    def silence(self) -> Silence | None: ...

    async def call(self, method: str, args: Arguments, deadline: float, *, wants_answer: bool = True) -> Any: ...

    def stream(self, method: str, args: Arguments, deadline: float) -> AsyncIterator[Any]: ...


@dataclass(frozen=True, slots=True)
class OutstandingCall:
    """A call that an instance of a worker has not answered yet. since: loop time."""

    method: str
    since: float
    instance: str
    args: Arguments

    @property
    def groups(self) -> Iterator[int]:
        """Yields the ids of the groups that the arguments belong to."""
        for arg in self.args:
            yield from groups_of(arg)


def groups_of(argument: Any) -> Iterator[int]:
    """Yields the group of each part of an argument that belongs to a group."""
    if isinstance(argument, PromptGroup):
        yield argument.id
    elif isinstance(argument, BatchRef):
        yield from (row.group for row in argument)


class RemoteWorker:
    """One worker, whichever instance of it is alive at the moment.

    host: where its newest instance was started. on_failure: takes a call that failed, whether it is of the work lane,
    and the error; returns whether the worker ends for it, and is lost to the caller. raised: what it raised and has not
    made good. met_mistake: the instance that ended for a mistake, and the groups that met it. answer_count: calls that
    were answered and items that came, health excluded. has_worked: whether the present instance, or the last one,
    answered a call of the work lane. last_answer_at: loop time of the newest answer to any call. restarting: whether
    another instance is started after a death. changed: called whenever the worker was connected or lost.

    Callers find it dead before anybody is told of the death. The supervisor connects it and notes its loss; handles
    call it.
    """

    def __init__(self, service: str, replica: int, rank: int, changed: Callable[[], None]) -> None:
        self.service = service
        self.replica = replica
        self.rank = rank
        self.instance = ""
        self.host = NOWHERE
        self.answer_count = 0
        self.has_worked = False
        self.last_answer_at = _now()
        self.outstanding: dict[int, OutstandingCall] = {}
        self.failed: deque[tuple[float, OutstandingCall]] = deque(maxlen=MAX_FAILED_CALLS)
        self.numbers = itertools.count()
        self.channels: Mapping[Lane, Channel] = {}
        self.cause: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.cause.set_result("it is starting")
        self.restarting = True
        self._silence: Silence | None = None
        self.raised: Raised | None = None
        self.met_mistake: tuple[str, frozenset[int]] = ("", frozenset())
        self.on_failure: Callable[[OutstandingCall, bool, AsyncrlError], bool] = lambda call, is_work, error: False
        self._changed = changed

    @property
    def name(self) -> str:
        return f"{self.service}{self.replica}.{self.rank}"

    @property
    def alive(self) -> bool:
        """Returns whether it takes calls."""
        for channel in self.channels.values():  # Asked several times a call, where `any` costs twice as much.
            if channel.lost.is_set():
                return False
        return bool(self.channels)

    @property
    def status(self) -> str:
        """Returns a clause for errors and the watchdog."""
        cause = self.cause.result() if self.cause.done() else "its connection broke"
        return f"{self.name} is alive" if self.alive else f"{self.name} does not answer: {cause}"

    def connected(self, instance: str, channels: Mapping[Lane, Channel]) -> None:
        self.instance = instance
        self.channels = channels
        self.has_worked = False
        self._silence = None
        self.cause = asyncio.get_running_loop().create_future()
        self._changed()

    def lost(self, cause: str, *, restarting: bool) -> None:
        """Fails calls from now on. restarting: whether another instance is being started."""
        self._silence = _silence_of(self.channels.values())
        self.channels = {}
        self.restarting = restarting
        if self.cause.done():
            self.cause = asyncio.get_running_loop().create_future()
        self.cause.set_result(cause)
        self._changed()

    async def call(self, spec: EndpointSpec, args: Arguments, deadline: float, *, wants_answer: bool = True) -> Any:
        """Calls this worker alone; deadline in seconds, as in `Client.call`. Raises PeerLost when it is dead or dies
        during the call."""
        async with _TrackedCall(self, spec, args) as channel:
            answer = await channel.call(spec.name, args, deadline, wants_answer=wants_answer)
        self._note_answer(spec)
        return answer

    async def stream(self, spec: EndpointSpec, args: Arguments, deadline: float) -> AsyncIterator[Any]:
        """Yields the items of a call; closing the iterator cancels the call in the worker."""
        async with _TrackedCall(self, spec, args) as channel:
            items = channel.stream(spec.name, args, deadline)
            async with aclosing(cast(Any, items)):
                async for item in items:
                    self._note_answer(spec)
                    yield item

    def _note_answer(self, spec: EndpointSpec) -> None:
        self.last_answer_at = _now()
        self.answer_count += spec.name != "health"
        self.has_worked |= spec.lane is Lane.WORK
        if self.raised is not None and self.raised.call == spec.name:
            self.raised = None

    def groups_at(self, instance: str) -> list[int]:
        """Returns the groups for which an instance worked when it died: those of calls outstanding, and of calls that
        failed there since it went silent, or a moment ago. Calls that need rows of a dead worker may fail, and end
        calls there, before the death is known; calls that came after heartbeats without an answer met a dead worker. Of
        one that ended for a mistake it is known which groups met it."""
        if self.met_mistake[0] == instance:
            return [*self.met_mistake[1]]
        recent = _now() - 2 * DEATH_NOTICE
        last_call = math.inf
        if self._silence is not None:
            recent = min(recent, self._silence.since)
            if self._silence.heartbeats > 1:
                last_call = self._silence.since
        calls = [*self.outstanding.values(), *(call for failed_at, call in self.failed if failed_at >= recent)]
        present = [call for call in calls if call.instance == instance and call.since <= last_call]
        return [group for call in present for group in call.groups]

    async def explain(self, lost: PeerLost, instance: str, cause: asyncio.Future[str]) -> PeerLost:
        """Returns the error with the cause of the death once that is known; `lost` itself when no worker died."""
        if self.alive:
            return lost
        await asyncio.wait([cause], timeout=2 * DEATH_NOTICE)
        return PeerLost(f"{instance}: {cause.result()}") if cause.done() and instance else lost


class _TrackedCall:
    """Notes a call to one worker as outstanding during a block, which gets the channel, and as failed if it fails.

    Raises PeerLost with the cause of a death.
    """

    __slots__ = ("_call", "_cause", "_number", "_spec", "_worker")

    def __init__(self, worker: RemoteWorker, spec: EndpointSpec, args: Arguments) -> None:
        self._worker = worker
        self._spec = spec
        self._number = next(worker.numbers)
        self._cause = worker.cause
        self._call = worker.outstanding[self._number] = OutstandingCall(spec.name, _now(), worker.instance, args)

    async def __aenter__(self) -> Channel:
        if self._worker.alive:
            return self._worker.channels[self._spec.lane]
        lost = PeerLost(self._worker.status)
        await self.__aexit__(PeerLost, lost, None)
        raise lost

    async def __aexit__(self, kind: type[BaseException] | None, raised: BaseException | None, trace: object) -> None:
        del self._worker.outstanding[self._number]
        if raised is not None:
            self._worker.failed.append((_now(), self._call))
        if isinstance(raised, AsyncrlError) and self._worker.on_failure(
            self._call, self._spec.lane is Lane.WORK, raised
        ):
            raise PeerLost(f"{self._call.instance}: {raised}") from raised
        if isinstance(raised, PeerLost):
            explained = await self._worker.explain(raised, self._call.instance, self._cause)
            raise explained from explained.__cause__


def _silence_of(channels: Collection[Channel]) -> Silence | None:
    """Returns the shortest silence of the channels to one worker; None when it was heard on some channel."""
    silences = [channel.silence for channel in channels if channel.silence is not None]
    return max(silences) if silences and len(silences) == len(channels) else None


def _now() -> float:
    return asyncio.get_running_loop().time()

"""Typed calls on a fleet: a handle on a contract has the contract's own type.

    fleet.reference.logprobs(samples)
        Handle         distributes the rows to ranks, and joins the answers   protocols/transfer.py
        Replicas       finds the replicas that are alive, or the freest one
        RemoteWorker   sends one call on the endpoint's lane to the instance that is alive

A call goes to all live replicas; their ranks count as data-parallel copies of one layout. `ONE_OF` calls go whole to
the replica with the fewest calls. When no replica is alive a call waits for a restarted one. A call with the same
arguments for every rank leaves out a replica that dies meanwhile, because its successor starts afresh.
"""

import asyncio
import inspect
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Protocol, Self, TypeVar, cast

from asyncrl.concurrency import gather
from asyncrl.errors import DeadlineExceeded, FleetFailed, PeerLost, UnknownEndpoint
from asyncrl.lanes.control.wire import Wakeup
from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.messages import PromptGroup
from asyncrl.protocols.rank_layout import Layout
from asyncrl.protocols.service_contracts import Contract, EndpointSpec, Idempotent, Lane
from asyncrl.protocols.transfer import fan_out

Arguments = tuple[Any, ...]
C = TypeVar("C", bound=Contract)

GROUP_MARGIN = 10.0
"""Seconds after a group's own deadline, at which the engine ends its samples, for their arrival."""

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
        self.last_answer_at = _now()
        self.outstanding: dict[int, OutstandingCall] = {}
        self.failed: deque[tuple[float, OutstandingCall]] = deque(maxlen=MAX_FAILED_CALLS)
        self.numbers = itertools.count()
        self.channels: Mapping[Lane, Channel] = {}
        self.cause: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.cause.set_result("it is starting")
        self.restarting = True
        self._changed = changed

    @property
    def name(self) -> str:
        return f"{self.service}{self.replica}.{self.rank}"

    @property
    def alive(self) -> bool:
        """Returns whether it takes calls."""
        return bool(self.channels) and not any([channel.lost.is_set() for channel in self.channels.values()])

    @property
    def status(self) -> str:
        """One clause for errors and the watchdog."""
        cause = self.cause.result() if self.cause.done() else "its connection broke"
        return f"{self.name} is alive" if self.alive else f"{self.name} does not answer: {cause}"

    def connected(self, instance: str, channels: Mapping[Lane, Channel]) -> None:
        self.instance = instance
        self.channels = channels
        self.cause = asyncio.get_running_loop().create_future()
        self._changed.wake()

    def lost(self, cause: str, *, restarting: bool) -> None:
        """Fails calls from now on. restarting: whether another instance is being started."""
        self.channels = {}
        self.restarting = restarting
        if self.cause.done():
            self.cause = asyncio.get_running_loop().create_future()
        self.cause.set_result(cause)
        self._changed.wake()

    async def call(self, spec: EndpointSpec, args: Arguments, deadline: float) -> Any:
        """Calls this worker alone; deadline in seconds. Raises PeerLost when it is dead or dies during the call."""
        async with _TrackedCall(self, spec, args) as channel:
            answer = await channel.call(spec.name, args, deadline)
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

    def groups_at(self, instance: str) -> list[int]:
        """Returns the groups of calls outstanding at this instance and of calls that failed there a moment ago: a call
        that reads rows of a dying worker may fail, and end calls there, before the death is known."""
        recent = _now() - 2 * DEATH_NOTICE
        calls = [*self.outstanding.values(), *(call for failed_at, call in self.failed if failed_at >= recent)]
        return [group for call in calls if call.instance == instance for group in call.groups]

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
        if isinstance(raised, PeerLost):
            explained = await self._worker.explain(raised, self._call.instance, self._cause)
            raise explained from explained.__cause__


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
        """Returns the live replicas; waits for a restart when there is none, until this loop time.

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


def make_handle(contract: type[C], service: Replicas, call_deadline: float) -> C:
    """Returns a handle: `await handle.endpoint(...)`, or `async for item in handle.endpoint(...)` for a stream.

    call_deadline: seconds for a call; a call with a group has the group's own deadline and GROUP_MARGIN.
    Calls raise the worker's own errors, RemoteError for classes that asyncrl.errors lacks, DeadlineExceeded, and
    PeerLost when a worker died and the endpoint must not be repeated, or the repeated call died too.
    """
    return cast(C, Handle(contract, service, call_deadline))


class Handle:
    """Sends the calls of one service; `make_handle` gives it the contract's type."""

    def __init__(self, contract: type[Contract], service: Replicas, call_deadline: float) -> None:
        self._contract = contract
        self._service = service
        self._call_deadline = call_deadline

    def __repr__(self) -> str:
        return f"<handle on {self._contract.__name__}: {', '.join(worker.name for worker in self._service)}>"

    def replica_of(self, instance: str) -> "Handle":
        return Handle(self._contract, self._service.replica_of(instance), self._call_deadline)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._contract.endpoints:
            known = self._contract.endpoints
            nearest = get_close_matches(name, known, n=1, cutoff=0.5)
            meant = f"; did you mean {nearest[0]!r}?" if nearest else ";"
            listed = ", ".join(sorted(known))
            raise UnknownEndpoint(f"{self._contract.__name__} has no endpoint {name!r}{meant} It has: {listed}")
        endpoint = self._endpoint(self._contract.endpoints[name])
        setattr(self, name, endpoint)  # Later calls find the attribute: reading a signature costs as much as a call.
        return endpoint

    def _endpoint(self, spec: EndpointSpec) -> Callable[..., Any]:
        signature = inspect.signature(getattr(self._contract, spec.name))
        count = len(signature.parameters) - 1
        send = self._stream if spec.stream else self._call

        def endpoint(*args: Any, **named: Any) -> Any:
            if named or len(args) != count:
                bound = signature.bind(self, *args, **named)
                bound.apply_defaults()
                args = bound.args[1:]
            return send(spec, args)

        return endpoint

    async def _call(self, spec: EndpointSpec, args: Arguments) -> Any:
        until = self._until(args)
        try:
            return await self._try_call(spec, args, until)
        except PeerLost:
            if spec.idempotent is Idempotent.NO:
                raise
            return await self._try_call(spec, args, until)

    async def _try_call(self, spec: EndpointSpec, args: Arguments, until: float) -> Any:
        if not spec.transfer.one_of:
            return await self._call_replicas(await self._service.wait_for_live(until), spec, args, until)
        replica = await self._service.least_loaded(until)
        with replica:
            return await self._call_replicas([replica], spec, args, until)

    async def _call_replicas(self, replicas: list[Replica], spec: EndpointSpec, args: Arguments, until: float) -> Any:
        fan, calls = fan_out(spec.transfer, args, self._layout(len(replicas)))
        workers = [worker for replica in replicas for worker in replica.workers]
        if len(workers) == 1:
            return fan.join([await workers[0].call(spec, calls[0], until - _now())])
        # Every rank of a broadcast gets the same arguments.
        broadcast = not fan.gather and all(len(rows) == (fan.count or 0) for rows in fan.rows)

        async def call(worker: RemoteWorker, args: Arguments) -> Any:
            try:
                return await worker.call(spec, args, until - _now())
            except PeerLost as lost:
                if not broadcast:
                    raise
                return lost

        answers = list(await gather(*(call(*each) for each in zip(workers, calls, strict=True))))
        if any(isinstance(answer, PeerLost) for answer in answers):
            return self._join_survivors(spec, args, answers)
        return fan.join([answers[rank] for rank in fan.kept])

    def _join_survivors(self, spec: EndpointSpec, args: Arguments, answers: list[Any]) -> Any:
        """Joins the answers of the replicas that survived a broadcast call."""
        size = self._service.layout.size
        replicas = [answers[start : start + size] for start in range(0, len(answers), size)]
        survivors = [part for part in replicas if not any(isinstance(answer, PeerLost) for answer in part)]
        if not survivors:
            raise next(answer for answer in answers if isinstance(answer, PeerLost))
        fan, _ = fan_out(spec.transfer, args, self._layout(len(survivors)))
        answered = [answer for part in survivors for answer in part]
        return fan.join([answered[rank] for rank in fan.kept])

    async def _stream(self, spec: EndpointSpec, args: Arguments) -> AsyncIterator[Any]:
        until = self._until(args)
        replica = await self._service.least_loaded(until)
        lead, *_ = spec.transfer.collect(self._service.layout)
        with replica:
            items = replica.workers[lead].stream(spec, args, until - _now())
            async with aclosing(cast(Any, items)):
                async for item in items:
                    yield item

    def _layout(self, replicas: int) -> Layout:
        if replicas == 1:
            return self._service.layout
        return replace(self._service.layout, dp=self._service.layout.dp * replicas)

    def _until(self, args: Arguments) -> float:
        seconds = [arg.deadline + GROUP_MARGIN for arg in args if isinstance(arg, PromptGroup)]
        return _now() + (max(seconds) if seconds else self._call_deadline)


def _now() -> float:
    return asyncio.get_running_loop().time()

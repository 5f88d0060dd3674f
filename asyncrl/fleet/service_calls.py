"""Typed calls on a fleet: a handle on a contract has the contract's own type.

    fleet.reference.logprobs(samples)
        Handle         distributes the rows to ranks, and joins the answers   protocols/distribute_collect.py
        Replicas       finds the replicas that are alive, or the freest one
        RemoteWorker   sends one call on the endpoint's lane to the instance that is alive   remote_worker.py

A call goes to all live replicas; their ranks count as data-parallel copies of one layout. `ONE_OF` calls go whole to
the replica with the fewest calls. When no replica is alive a call waits for a restarted one. A call with the same
arguments for every rank leaves out a replica that dies meanwhile, because its successor starts afresh.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Self, TypeVar, cast

from asyncrl.concurrency import gather
from asyncrl.errors import DeadlineExceeded, FleetFailed, PeerLost, UnknownEndpoint
from asyncrl.fleet.remote_worker import Arguments, RemoteWorker
from asyncrl.lanes.control.wire import Wakeup
from asyncrl.protocols.distribute_collect import fan_out
from asyncrl.protocols.messages import PromptGroup
from asyncrl.protocols.rank_layout import Layout
from asyncrl.protocols.service_contracts import Contract, EndpointSpec, Idempotent

C = TypeVar("C", bound=Contract)

GROUP_MARGIN = 10.0
"""Seconds after a group's own deadline, at which the engine ends its samples, for their arrival."""


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

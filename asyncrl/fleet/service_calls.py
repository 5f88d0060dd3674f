"""Typed calls on a fleet: a handle on a contract has the contract's own type.

    fleet.reference.logprobs(samples)
        distribute   rows to each rank                           protocols/transfer.py
        send         one call per rank, on the endpoint's lane   replicas.py
        collect      one result, rows in the order of the call   protocols/transfer.py

A call goes to all live replicas; their ranks count as data-parallel copies of one layout. `ONE_OF` calls go whole to
the replica with the fewest calls. When no replica is alive a call waits for a restarted one. A call with the same
arguments for every rank leaves out a replica that dies meanwhile, because its successor starts afresh.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, TypeVar, cast

from asyncrl.concurrency import gather
from asyncrl.errors import PeerLost, UnknownEndpoint
from asyncrl.fleet.replicas import Arguments, RemoteWorker, Replica, Replicas
from asyncrl.protocols.layout import Layout
from asyncrl.protocols.messages import PromptGroup
from asyncrl.protocols.service_contracts import Contract, EndpointSpec, Idempotent
from asyncrl.protocols.transfer import fan_out

C = TypeVar("C", bound=Contract)

GROUP_MARGIN = 10.0
"""Seconds after a group's own deadline, at which the engine ends its samples, for their arrival."""


def make_handle(contract: type[C], service: Replicas, call_deadline: float) -> C:
    """Returns a handle: `await handle.endpoint(...)`, or `async for item in handle.endpoint(...)` for a stream.

    Args:
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
            return fan.join([await workers[0].call(spec, calls[0], _seconds_until(until))])
        # Every rank of a broadcast gets the same arguments.
        broadcast = not fan.gather and all(len(rows) == (fan.count or 0) for rows in fan.rows)

        async def call(worker: RemoteWorker, args: Arguments) -> Any:
            try:
                return await worker.call(spec, args, _seconds_until(until))
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
            items = replica.workers[lead].stream(spec, args, _seconds_until(until))
            async with aclosing(cast(Any, items)):
                async for item in items:
                    yield item

    def _layout(self, replicas: int) -> Layout:
        if replicas == 1:
            return self._service.layout
        return replace(self._service.layout, dp=self._service.layout.dp * replicas)

    def _until(self, args: Arguments) -> float:
        seconds = [arg.deadline + GROUP_MARGIN for arg in args if isinstance(arg, PromptGroup)]
        return asyncio.get_running_loop().time() + (max(seconds) if seconds else self._call_deadline)


def _seconds_until(until: float) -> float:
    return until - asyncio.get_running_loop().time()

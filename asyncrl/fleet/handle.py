"""Typed calls on a fleet: a handle on a contract has the contract's own type.

    fleet.reference.logprobs(samples)
        distribute   rows of each rank                           protocols/transfer.py
        send         one call a rank, on the endpoint's lane     workers.py
        collect      one result, rows in the order of the call   protocols/transfer.py

Calls go to replicas that live, whose ranks count as data-parallel copies of one layout. Where none lives a call waits
for a restarted one. `ONE_OF` calls go to the freest replica whole. A call to everybody leaves out a replica that dies
meanwhile: its successor starts afresh.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, TypeVar, cast

from asyncrl.errors import PeerLost, UnknownEndpoint
from asyncrl.protocols.contracts import Contract, EndpointSpec, Idempotent
from asyncrl.protocols.layout import Layout
from asyncrl.protocols.messages import PromptGroup
from asyncrl.protocols.transfer import Fan, fan_out
from asyncrl.together import together
from asyncrl.workers import Arguments, RemoteWorker, Replica, Workers

C = TypeVar("C", bound=Contract)

GROUP_MARGIN = 10.0
"""Seconds beyond a group's own deadline: at that its samples end in the engine, and then still have to arrive."""


def connect(contract: type[C], workers: Workers, call_deadline: float) -> C:
    """A handle: `await handle.endpoint(...)`, or `async for item in handle.endpoint(...)` for a stream.

    Args:
        call_deadline: seconds a call may take; a call with a group may take the group's own deadline and GROUP_MARGIN.

    Calls raise the worker's own errors, RemoteError for those that asyncrl does not know, PeerLost when a worker died
    and the endpoint may not be repeated or died again, DeadlineExceeded.
    """
    return cast(C, Handle(contract, workers, call_deadline))


class Handle:
    """What `connect` returns, behind the contract's type."""

    def __init__(self, contract: type[Contract], workers: Workers, call_deadline: float) -> None:
        self._contract, self._workers, self._call_deadline = contract, workers, call_deadline

    def __repr__(self) -> str:
        return f"<handle on {self._contract.__name__}: {', '.join(worker.name for worker in self._workers)}>"

    def replica_of(self, instance: str) -> "Handle":
        return Handle(self._contract, self._workers.replica_of(instance), self._call_deadline)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._contract.endpoints:
            raise UnknownEndpoint(_unknown(self._contract, name))
        endpoint = self._endpoint(self._contract.endpoints[name])
        setattr(self, name, endpoint)  # Asked for once: looking at a signature costs as much as sending a call.
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
            return await self._once(spec, args, until)
        except PeerLost:
            if spec.idempotent is Idempotent.NO:
                raise
            return await self._once(spec, args, until)

    async def _once(self, spec: EndpointSpec, args: Arguments, until: float) -> Any:
        if not spec.transfer.one_of:
            return await self._on(await self._workers.living(until), spec, args, until)
        replica = await self._workers.freest(until)
        with replica:
            return await self._on([replica], spec, args, until)

    async def _on(self, replicas: list[Replica], spec: EndpointSpec, args: Arguments, until: float) -> Any:
        fan, calls = fan_out(spec.transfer, args, self._layout(len(replicas)))
        workers = [worker for replica in replicas for worker in replica.workers]
        if len(workers) == 1:
            return fan.join([await workers[0].call(spec, calls[0], _left(until))])
        answers = await _answers(spec, workers, calls, until, everybody=_to_everybody(fan))
        if any(isinstance(answer, PeerLost) for answer in answers):
            return self._join_survivors(spec, args, answers)
        return fan.join([answers[rank] for rank in fan.kept])

    def _join_survivors(self, spec: EndpointSpec, args: Arguments, answers: list[Any]) -> Any:
        """Of a call to everybody: the answers of the replicas that lived through it."""
        size = self._workers.layout.size
        replicas = [answers[start : start + size] for start in range(0, len(answers), size)]
        survivors = [part for part in replicas if not any(isinstance(answer, PeerLost) for answer in part)]
        if not survivors:
            raise next(answer for answer in answers if isinstance(answer, PeerLost))
        fan, _ = fan_out(spec.transfer, args, self._layout(len(survivors)))
        answered = [answer for part in survivors for answer in part]
        return fan.join([answered[rank] for rank in fan.kept])

    async def _stream(self, spec: EndpointSpec, args: Arguments) -> AsyncIterator[Any]:
        until = self._until(args)
        replica = await self._workers.freest(until)
        lead, *_ = spec.transfer.collect(self._workers.layout)
        with replica:
            items = replica.workers[lead].stream(spec, args, _left(until))
            async with aclosing(cast(Any, items)):
                async for item in items:
                    yield item

    def _layout(self, replicas: int) -> Layout:
        if replicas == 1:
            return self._workers.layout
        return replace(self._workers.layout, dp=self._workers.layout.dp * replicas)

    def _until(self, args: Arguments) -> float:
        seconds = [arg.deadline + GROUP_MARGIN for arg in args if isinstance(arg, PromptGroup)]
        return asyncio.get_running_loop().time() + (max(seconds) if seconds else self._call_deadline)


def _unknown(contract: type[Contract], name: str) -> str:
    nearest = get_close_matches(name, contract.endpoints, n=1, cutoff=0.5)
    meant = f"; did you mean {nearest[0]!r}?" if nearest else ";"
    return f"{contract.__name__} has no endpoint {name!r}{meant} It has: {', '.join(sorted(contract.endpoints))}"


def _left(until: float) -> float:
    return until - asyncio.get_running_loop().time()


def _to_everybody(fan: Fan) -> bool:
    """Every rank gets the same: the answers of some are the answer of all of them that live."""
    return not fan.gather and all(len(rows) == (fan.count or 0) for rows in fan.rows)


async def _answers(
    spec: EndpointSpec, workers: Sequence[RemoteWorker], calls: list[Arguments], until: float, everybody: bool
) -> list[Any]:
    """Every rank's answer, in rank order; in a call to everybody the PeerLost of a worker stands for its answer."""

    async def answer(worker: RemoteWorker, args: Arguments) -> Any:
        try:
            return await worker.call(spec, args, _left(until))
        except PeerLost as lost:
            if not everybody:
                raise
            return lost

    return await together(*(answer(worker, args) for worker, args in zip(workers, calls, strict=True)))

"""Typed calls on a fleet: a handle on a contract has the contract's own type.

    fleet.reference.logprobs(samples)
        Handle         distributes the rows to ranks, and joins the answers   protocols/distribute_collect.py
        Replicas       finds the replicas that are alive, the freest one, or those that hold rows   replicas.py
        RemoteWorker   sends one call on the endpoint's lane to the instance that is alive   remote_worker.py

A call goes to all live replicas; their ranks count as data-parallel copies of one layout. Ranks whose answer the
transfer protocol does not keep answer with nothing. `ONE_OF` calls go whole to
the replica with the fewest calls, `ONE_OF_BY_GROUP` calls to the one that works for the group, `ONE_OF_HOLDER` calls to
the one that made the newest rows of their samples; where the trainer's ranks sample themselves, `THREE_D_ALL_MICRO_DP`
splits the prompts of consecutive groups over them. `TO_HOLDERS` calls go to the replicas that hold rows of these
samples. When no replica is alive a call waits for a restarted one. A call with the same arguments for every rank leaves
out a replica that dies meanwhile, because its successor starts afresh.
"""

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import aclosing
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar, cast

from asyncrl.concurrency import gather
from asyncrl.errors import AsyncrlError, PeerLost, UnknownEndpoint
from asyncrl.fleet.remote_worker import Arguments, RemoteWorker, groups_of
from asyncrl.fleet.replicas import Replica, Replicas
from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.distribute_collect import fan_out
from asyncrl.protocols.messages import PromptGroup
from asyncrl.protocols.rank_layout import Layout
from asyncrl.protocols.service_contracts import Contract, EndpointSpec, Idempotent

C = TypeVar("C", bound=Contract)

GROUP_MARGIN = 10.0
"""Seconds after the deadline of a sample, at which the engine ends it, for its arrival."""


def make_handle(contract: type[C], service: Replicas, call_deadline: float) -> C:
    """Returns a handle: `await handle.endpoint(...)`, or `async for item in handle.endpoint(...)` for a stream.

    call_deadline: seconds without an answer of the worker after which a call is given up; a call with a group has the
    deadline of a sample and GROUP_MARGIN. Waiting for a live replica has as many seconds of its own.
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
        self._alone: dict[Replicas, Handle] = {}

    def __repr__(self) -> str:
        return f"<handle on {self._contract.__name__}: {', '.join(worker.name for worker in self._service)}>"

    def replica_of(self, instance: str) -> "Handle":
        """Returns the handle on the replica of this instance: the same each time, because every generator is called so
        for every version. Raises PeerLost when the instance was replaced."""
        service = self._service.replica_of(instance)
        if service not in self._alone:
            self._alone[service] = Handle(self._contract, service, self._call_deadline)
        return self._alone[service]

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
        setattr(self, name, endpoint)  # Later calls find the attribute.
        return endpoint

    def _endpoint(self, spec: EndpointSpec) -> Callable[..., Any]:
        signature = _signature(getattr(self._contract, spec.name))
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
        seconds = self._deadline(args)
        try:
            return await self._try_call(spec, args, seconds)
        except PeerLost:
            if spec.idempotent is Idempotent.NO:
                raise
            return await self._try_call(spec, args, seconds)

    async def _try_call(self, spec: EndpointSpec, args: Arguments, seconds: float) -> Any:
        if spec.transfer.to_holders:
            return await self._call_holders(spec, args, seconds)
        if not spec.transfer.one_of:
            return await self._call_replicas(await self._service.wait_for_live(seconds), spec, args, seconds)
        if (group := self._isolated(args)) is not None:
            async with self._service.reserved(group, seconds) as replica:
                return await self._call_replicas([replica], spec, args, seconds)
        if spec.transfer.by_group:
            return await self._call_by_group(spec, args, seconds)
        replica = self._newest_holder(spec, args) or await self._service.least_loaded(seconds)
        with replica:
            return await self._call_replicas([replica], spec, args, seconds)

    def _newest_holder(self, spec: EndpointSpec, args: Arguments) -> Replica | None:
        """Returns the replica that made the newest rows of the samples that a call goes on with, if it takes calls; one
        that drains does."""
        if not spec.transfer.by_holder or (samples := _continued(args[0])) is None:
            return None
        replica = self._service.holders.newest(samples)
        return replica if replica is not None and replica.takes_what_goes_on else None

    def _of_prompt(self, args: Arguments) -> Replica | None:
        """Returns the replica that gets the prompt of this call, where the trainer's ranks sample themselves."""
        prompts = args[0]
        return self._service.of_prompt(prompts.id) if isinstance(prompts, PromptGroup) else None

    async def _call_by_group(self, spec: EndpointSpec, args: Arguments, seconds: float) -> Any:
        """Calls the replica that works for the group of these samples, or the freest one when none does."""
        service = self._service
        group = next(group for arg in args for group in groups_of(arg))
        replica = service.affinity.replica(group) or await service.least_loaded(seconds)
        replica = service.affinity.replica(group) or replica  # Another call may have chosen one during a wait.
        with replica, service.affinity.working(group, replica):
            return await self._call_replicas([replica], spec, args, seconds)

    async def _call_holders(self, spec: EndpointSpec, args: Arguments, seconds: float) -> Any:
        """Calls each live replica that may hold rows of the samples in the first argument, with its samples.

        The rows of a replica that dies are gone with it. Raises what one replica raises once all have ended.
        """
        samples, *rest = args
        holders = self._service.holders

        async def call(replica: Replica, rows: list[int]) -> Any:
            held = samples.take(rows) if isinstance(samples, BatchRef) else [samples[row] for row in rows]
            try:
                if replica.alive:
                    answer = await self._call_replicas([replica], spec, (held, *rest), seconds)
                else:
                    answer = None
            except PeerLost:
                answer = None
            except AsyncrlError as error:
                return error
            if spec.frees:
                holders.forget(replica, held)
            return answer

        parts = holders.split(samples)
        answers = await gather(*(call(replica, rows) for replica, rows in parts.items()))
        for answer in answers:
            if isinstance(answer, AsyncrlError):
                raise answer
        return None if spec.frees else [item for answer in answers for item in answer or ()]

    async def _call_replicas(self, replicas: list[Replica], spec: EndpointSpec, args: Arguments, seconds: float) -> Any:
        if spec.stores:
            self._note_holders(replicas, args)
        fan, calls = fan_out(spec.transfer, args, self._layout(len(replicas)))
        workers = [worker for replica in replicas for worker in replica.workers]
        if len(workers) == 1:
            return fan.join([await workers[0].call(spec, calls[0], seconds)])
        # Every rank of a broadcast gets the same arguments.
        broadcast = not fan.gather and all(len(rows) == (fan.count or 0) for rows in fan.rows)

        kept = frozenset(fan.kept)

        async def call(worker: RemoteWorker, args: Arguments, rank: int) -> Any:
            try:
                return await worker.call(spec, args, seconds, wants_answer=rank in kept)
            except PeerLost as lost:
                if not broadcast:
                    raise
                return lost

        numbered = zip(workers, calls, range(len(workers)), strict=True)
        answers = list(await gather(*(call(*each) for each in numbered)))
        if any(isinstance(answer, PeerLost) for answer in answers):
            return self._join_survivors(spec, args, answers, kept)
        return fan.join([answers[rank] for rank in fan.kept])

    def _join_survivors(self, spec: EndpointSpec, args: Arguments, answers: list[Any], asked: Collection[int]) -> Any:
        """Joins the answers of the replicas that survived a broadcast call. Raises PeerLost when there are none, or a
        rank that was not asked for its answer takes the place of one that is gone."""
        size = self._service.layout.size
        lost = next(answer for answer in answers if isinstance(answer, PeerLost))
        replicas = [range(start, start + size) for start in range(0, len(answers), size)]
        alive = [ranks for ranks in replicas if not any(isinstance(answers[rank], PeerLost) for rank in ranks)]
        if not alive:
            raise lost
        fan, _ = fan_out(spec.transfer, args, self._layout(len(alive)))
        survivors = [rank for ranks in alive for rank in ranks]
        kept = [survivors[rank] for rank in fan.kept]
        if not set(kept).issubset(asked):
            raise lost
        return fan.join([answers[rank] for rank in kept])

    async def _stream(self, spec: EndpointSpec, args: Arguments) -> AsyncIterator[Any]:
        seconds = self._deadline(args)
        if (group := self._isolated(args)) is not None:
            async with (
                self._service.reserved(group, seconds) as replica,
                aclosing(self._items(replica, spec, args, seconds)) as items,
            ):
                async for item in items:
                    yield item
            return
        replica = self._newest_holder(spec, args) or self._of_prompt(args) or await self._service.least_loaded(seconds)
        async with aclosing(self._items(replica, spec, args, seconds)) as items:
            with replica:
                async for item in items:
                    yield item

    async def _items(
        self, replica: Replica, spec: EndpointSpec, args: Arguments, seconds: float
    ) -> AsyncGenerator[Any, None]:
        lead, *_ = spec.transfer.collect(self._service.layout)
        if spec.stores:
            self._note_holders([replica], args)
        items = replica.workers[lead].stream(spec, args, seconds)
        async with aclosing(cast(Any, items)):
            async for item in items:
                yield item

    def _isolated(self, args: Arguments) -> int | None:
        """Returns the group of this call that runs alone, if there is one. None does in the processes of the trainer,
        whose death ends the run: a replica of its own might be one that trains."""
        isolated = self._service.isolated if self._service.trainer is None else None
        return (
            next((group for arg in args for group in groups_of(arg) if group in isolated), None) if isolated else None
        )

    def _note_holders(self, replicas: list[Replica], args: Arguments) -> None:
        """Notes before the call that these replicas make rows, because an answer can be lost after its row was made."""
        for replica in replicas:
            for arg in args:
                self._service.holders.add(replica, arg)

    def _layout(self, replicas: int) -> Layout:
        if replicas == 1:
            return self._service.layout
        return replace(self._service.layout, dp=self._service.layout.dp * replicas)

    def _deadline(self, args: Arguments) -> float:
        seconds = [arg.deadline + GROUP_MARGIN for arg in args if isinstance(arg, PromptGroup)]
        return max(seconds) if seconds else self._call_deadline


def _continued(argument: Any) -> BatchRef | None:
    """Returns the samples that a call with this first argument goes on with; None when it begins samples."""
    if isinstance(argument, PromptGroup):
        return argument.continues
    return argument if isinstance(argument, BatchRef) else None


@cache
def _signature(method: Callable[..., Any]) -> inspect.Signature:
    """Returns the signature of an endpoint; reading it takes longer than a call."""
    return inspect.signature(method)

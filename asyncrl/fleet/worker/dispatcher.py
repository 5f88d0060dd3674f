"""Turns the calls that reach a worker into method calls of its service.

    control socket ── Server ──┐
                               ├── Dispatcher ── one task per call ── Service method ── compute thread
    work socket    ── Server ──┘   (span, log ids, time booking)

Each lane has a socket and a receiving task of its own, so health and pause are answered while work is busy.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass
from typing import Any

from structlog.contextvars import bind_contextvars

from asyncrl.errors import UnknownEndpoint
from asyncrl.fleet.worker.service import Service
from asyncrl.protocols.batch import BatchRef, is_divisible
from asyncrl.protocols.messages import Call, PromptGroup
from asyncrl.protocols.service_contracts import Lane


class Dispatcher:
    """Runs the calls of one lane. Each call is a span; on the work lane its time is booked as well."""

    _UNTRACED = frozenset({"health", "started"})

    def __init__(self, service: Service, lane: Lane) -> None:
        self._service = service
        self._lane = lane
        self._booking = service.context.occupancy.serving if lane is Lane.WORK else nullcontext

    def __call__(self, call: Call) -> Awaitable[Any] | AsyncIterator[Any]:
        """Runs one call. Raises UnknownEndpoint when the contract declares no such endpoint on this lane."""
        spec = self._service.endpoints.get(call.method)
        if spec is None or spec.lane is not self._lane:
            raise UnknownEndpoint(
                f"{type(self._service).__name__} has no {call.method!r} on its {self._lane.value} lane"
            )
        return self._stream(call) if spec.stream else self._answer(call)

    async def _answer(self, call: Call) -> Any:
        if call.method in self._UNTRACED:
            return await getattr(self._service, call.method)(*call.args)
        if not self._service.ready.done():
            await self._service.started()
        with self._traced(call):
            return await getattr(self._service, call.method)(*call.args)

    async def _stream(self, call: Call) -> AsyncIterator[Any]:
        if not self._service.ready.done():
            await self._service.started()
        with self._traced(call):
            async with aclosing(getattr(self._service, call.method)(*call.args)) as items:
                async for item in items:
                    yield item

    def _traced(self, call: Call) -> "_TracedCall":
        ids = _ids_in(call.args)
        # Never unbound: these variables belong to the call's own task, which ends with it.
        bind_contextvars(call=call.method, **ids)
        shown = f" ({', '.join(f'{name} {value}' for name, value in ids.items())})" if ids else ""
        span = self._service.context.tracer.span(call.method, **ids)
        return _TracedCall(self._service.running, call.method + shown, self._booking(), span)


@dataclass(slots=True, eq=False)
class _TracedCall(AbstractContextManager[None]):
    """Surrounds a call with its span, its entry in the service's running calls, and the booking of its time."""

    running: dict[object, tuple[str, float]]
    shown: str
    booking: AbstractContextManager[None]
    span: AbstractContextManager[None]

    def __enter__(self) -> None:
        self.running[self] = (self.shown, asyncio.get_running_loop().time())
        self.booking.__enter__()
        self.span.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self.span.__exit__(*raised)
        self.booking.__exit__(*raised)
        del self.running[self]


def _ids_in(args: tuple[Any, ...]) -> dict[str, int]:
    """Returns the group and the number of rows that a call is about, for logs and traces."""
    found: dict[str, int] = {}
    for arg in args:
        if isinstance(arg, PromptGroup):
            found.setdefault("group", arg.id)
        elif is_divisible(arg):
            found.setdefault("rows", len(arg))
            if isinstance(arg, BatchRef) and len({row.group for row in arg}) == 1:
                found.setdefault("group", arg.rows[0].group)
    return found

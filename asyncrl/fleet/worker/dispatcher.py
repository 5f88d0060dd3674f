"""Turns the calls that reach a worker into method calls of its service.

    control socket ── Server ──┐
                               ├── Dispatcher ── one task per call ── Service method ── compute thread
    work socket    ── Server ──┘   (span, log ids, time booking)

Each lane has a socket and a receiving task of its own, so health and pause are answered while work is busy.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing, asynccontextmanager, nullcontext
from typing import Any

from structlog.contextvars import bind_contextvars

from asyncrl.errors import UnknownEndpoint
from asyncrl.fleet.worker.service import Service
from asyncrl.protocols.batch import is_divisible
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
        async with self._traced(call):
            return await getattr(self._service, call.method)(*call.args)

    async def _stream(self, call: Call) -> AsyncIterator[Any]:
        async with self._traced(call), aclosing(getattr(self._service, call.method)(*call.args)) as items:
            async for item in items:
                yield item

    @asynccontextmanager
    async def _traced(self, call: Call) -> AsyncIterator[None]:
        """Waits until the service has started; then surrounds a call with its span, its entry in the service's running
        calls, and the booking of its time."""
        await self._service.started()
        ids = _ids_in(call.args)
        # Never unbound: these variables belong to the call's own task, which ends with it.
        bind_contextvars(call=call.method, **ids)
        shown = f" ({', '.join(f'{name} {value}' for name, value in ids.items())})" if ids else ""
        key, running = object(), self._service.running
        running[key] = (call.method + shown, asyncio.get_running_loop().time())
        try:
            with self._booking(), self._service.context.tracer.span(call.method, **ids):
                yield
        finally:
            del running[key]


def _ids_in(args: tuple[Any, ...]) -> dict[str, int]:
    """Returns the group and the number of rows that a call is about, for logs and traces."""
    found: dict[str, int] = {}
    for arg in args:
        if isinstance(arg, PromptGroup):
            found.setdefault("group", arg.id)
        elif is_divisible(arg):
            found.setdefault("rows", len(arg))
    return found

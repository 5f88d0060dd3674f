"""Answers receivers over the encrypted control wire: who meets where, what is to be sent, and whether it was whole.

join_pair ── send_version ── (the pair moves the bytes) ── confirm_version ... leave_pair
"""

import asyncio
from collections.abc import Awaitable
from typing import Any, Protocol

from asyncrl.errors import Refused
from asyncrl.lanes.control.server import Server
from asyncrl.lanes.control.wire import Wire
from asyncrl.protocols.messages import Call, Hello

JOIN, SEND, CONFIRM, LEAVE = "join_pair", "send_version", "confirm_version", "leave_pair"

_ARGUMENTS: dict[str, tuple[type, ...]] = {
    JOIN: (str, str),
    SEND: (int, int, int, str),
    CONFIRM: (int, int),
    LEAVE: (str,),
}


class PairCalls(Protocol):
    """The calls that a sender answers to its receivers, on the event loop."""

    async def join_pair(self, plan: str, reader: str) -> str:
        """Begins a new pair with the reader in place of its former one, and returns where both meet. Raises Refused
        when the reader plans other parts."""

    async def send_version(self, incarnation: int, version: int, first: int, reader: str) -> None:
        """Begins to send the parts of a version from number `first` on. Raises Refused when the version is not here,
        or the reader has no pair."""

    async def confirm_version(self, incarnation: int, version: int) -> None:
        """Raises Refused when the version was overwritten, maybe while it was sent."""

    async def leave_pair(self, reader: str) -> None: ...


class LinkServer:
    """Serves calls at an address of its own, in a task of the group."""

    def __init__(
        self,
        calls: PairCalls,
        wire: Wire,
        address: str,
        hello: Hello,
        tasks: asyncio.TaskGroup,
        *,
        heartbeat: float | None = None,
    ) -> None:
        self._calls = calls
        listener = wire.listen(address)
        self.address = listener.address
        server = Server(listener, self._dispatch, hello, queued=False, heartbeat=heartbeat)
        self._serving = tasks.create_task(server.serve(), name="weights lane")

    def close(self) -> None:
        self._serving.cancel()

    def _dispatch(self, call: Call) -> Awaitable[Any]:
        if _ARGUMENTS.get(call.method) != tuple(map(type, call.args)):
            raise Refused(f"the weights lane answers {', '.join(_ARGUMENTS)}, not {call.method} with these values")
        answer: Awaitable[Any] = getattr(self._calls, call.method)(*call.args)
        return answer

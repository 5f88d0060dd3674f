"""The controller's end of a probe, by which `asyncrl doctor --join` looks at the connection before a host joins.

host                                  ProbePoint
probe(JoinRequest) ────────────────>  one turn every TURN seconds: what joining would be refused for, and a ticket
clock() ───────────────────────────>  seconds on the controller's clock
upload(ticket, data) ──────────────>  counted, up to PROBE_BYTES a turn
download(ticket, count) ───────────>  as many bytes, up to PROBE_BYTES a turn

The bounds hold for all hosts together: whoever has a key takes no more of the controller's network than they allow.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.errors import Refused
from asyncrl.protocols.join_messages import JoinRequest, ProbeAnswer
from asyncrl.protocols.messages import Call

TURN = 5.0
"""Seconds from the begin of a probe to that of the next one."""
PROBE_BYTES = 4 << 20
"""Bytes of a turn each way: with TURN 0.8 MB/s at most, and 3.4 s at 10 Mbit/s."""
PART_BYTES = 128 << 10
"""Bytes of one part: 0.1 s at 10 Mbit/s, for which other messages wait behind it."""


@dataclass
class ProbePoint:
    """Answers probes. objection: returns why a host may not join, "" if it may. packages_of: returns the packages whose
    versions have to agree for workers of a service. now: returns Unix time in seconds."""

    objection: Callable[[JoinRequest], str]
    packages_of: Callable[[str], Collection[str]]
    versions: Mapping[str, str]
    now: Callable[[], float] = time.time
    _ticket: str = ""
    _next_turn: float = 0.0
    _left: dict[str, int] = field(default_factory=dict)
    _payload: bytes = b""

    def dispatch(self, call: Call) -> Awaitable[Any]:
        """Runs a call of a probe. Raises Refused."""
        match call.method, call.args:
            case "probe", (JoinRequest() as request,):
                return self._begin(request)
            case "clock", ():
                return self._clock()
            case "upload", (str(ticket), bytes(data)):
                return self._take(ticket, data)
            case "download", (str(ticket), int(count)):
                return self._give(ticket, count)
        raise Refused(f"a probe has no part {call.method!r} like this")

    async def _begin(self, request: JoinRequest) -> ProbeAnswer:
        loop_time = asyncio.get_running_loop().time()
        if loop_time < self._next_turn:
            raise Refused(f"another probe runs; the next one may begin in {self._next_turn - loop_time:.1f} s")
        self._next_turn = loop_time + TURN
        self._ticket = secrets.token_hex(8)
        self._left = {"upload": PROBE_BYTES, "download": PROBE_BYTES}
        packages = list(self.packages_of(request.service))
        return ProbeAnswer(self.objection(request), dict(self.versions), packages, self._ticket)

    async def _clock(self) -> float:
        return self.now()

    async def _take(self, ticket: str, data: bytes) -> int:
        self._count("upload", ticket, len(data))
        return len(data)

    async def _give(self, ticket: str, count: int) -> bytes:
        self._count("download", ticket, count)
        self._payload = self._payload or secrets.token_bytes(PART_BYTES)  # Nothing on the way can compress it.
        return self._payload[:count]

    def _count(self, way: str, ticket: str, count: int) -> None:
        """Takes the bytes of one part from what is left of the turn."""
        if not self._ticket or ticket != self._ticket:
            raise Refused("another probe has begun since")
        if not 0 < count <= PART_BYTES:
            raise Refused(f"a part of a probe has 1 to {PART_BYTES} bytes, not {count}")
        if count > self._left[way]:
            raise Refused(f"a probe may move {PROBE_BYTES} bytes each way")
        self._left[way] -= count

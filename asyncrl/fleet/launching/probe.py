"""Both ends of a probe, by which `asyncrl doctor --join` looks at the connection before a host joins.

host                                  ProbePoint
probe(JoinRequest) ────────────────>  one turn every TURN seconds: what joining would be refused for, and a ticket
clock() ───────────────────────────>  seconds on the controller's clock
upload(ticket, data) ──────────────>  counted, up to PROBE_BYTES a turn
download(ticket, count) ───────────>  as many bytes, up to PROBE_BYTES a turn

The bounds hold for all hosts together: whoever has a key takes no more of the controller's network than they allow.
A host computes from the answers:

offset of the clocks   theirs - (sent + received) / 2 of the fastest round trip, wrong by at most half of that
bandwidth              parts in a row, WINDOW of them under way, for LONGEST seconds or PROBE_BYTES, each way
"""

import asyncio
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.errors import Refused
from asyncrl.fleet.launching.joining import HEARTBEAT, joining_hello
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.wire import Wire
from asyncrl.protocols.messages import Call, JoinRequest, ProbeAnswer

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


# ---- the host's end: measures the connection, without joining ------------------------------------------------------


CALL_DEADLINE = 10.0
"""Seconds for one answer, also of a part behind others at 1 Mbit/s."""
ROUND_TRIPS = 20
WINDOW = 4
"""Parts under way: 0.5 MiB, which fills a link of 50 MB/s with round trips of 10 ms."""
LONGEST = 3.0
"""Seconds after which no further part is sent one way."""
TURN_DEADLINE = 4 * TURN
"""Seconds to wait for a turn while others probe."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The time by which the controller's clock is ahead of this host's, give or take `uncertainty`, and the median of
    the round trips; all in seconds."""

    offset: float
    uncertainty: float
    median: float


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes a second one way. bytes: that were moved, 0 where nothing was. problem: why no more were, else ""."""

    rate: float
    bytes: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """Answer and measurements of a probe. up, down: from this host to the controller, and back."""

    answer: ProbeAnswer
    clock: Clock
    up: Bandwidth
    down: Bandwidth


async def probe(wire: Wire, address: str, request: JoinRequest) -> Probe:
    """Asks a join point whether this host could join, and measures the connection.

    Raises PeerLost and DeadlineExceeded when no join point answers, Refused when it speaks another protocol or others
    probe all the time."""
    hello = joining_hello(request.service, request.agent)
    async with Client(wire.connect(address), hello, f"the run at {address}", heartbeat=HEARTBEAT) as client:
        answer = await _turn(client, request)
        clock = await measure_clock(lambda: client.call("clock", (), CALL_DEADLINE))
        data = bytes(PART_BYTES)

        async def send() -> int:
            return int(await client.call("upload", (answer.ticket, data), CALL_DEADLINE))

        async def receive() -> int:
            return len(await client.call("download", (answer.ticket, PART_BYTES), CALL_DEADLINE))

        return Probe(answer, clock, await measure_bandwidth(send), await measure_bandwidth(receive))


async def _turn(client: Client, request: JoinRequest) -> ProbeAnswer:
    """Waits until no other host probes."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + TURN_DEADLINE
    while True:
        try:
            answer: ProbeAnswer = await client.call("probe", (request,), CALL_DEADLINE)
            return answer
        except Refused:
            if loop.time() > deadline:
                raise
        await asyncio.sleep(TURN / 10)


async def measure_clock(ask: Callable[[], Awaitable[float]], now: Callable[[], float] = time.time) -> Clock:
    """Compares clocks by round trips. ask: returns the time of the other one."""
    trips: list[tuple[float, float]] = []
    for _ in range(ROUND_TRIPS):
        sent = now()
        theirs = await ask()
        received = now()
        trips.append((received - sent, theirs - (sent + received) / 2))
    fastest, offset = min(trips)
    return Clock(offset, fastest / 2, statistics.median(took for took, _ in trips))


async def measure_bandwidth(move: Callable[[], Awaitable[int]]) -> Bandwidth:
    """Moves parts one way. move: moves one part and returns its bytes."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    moved = 0
    problem = ""
    parts = iter(range(PROBE_BYTES // PART_BYTES))

    async def mover() -> None:
        nonlocal moved, problem
        while loop.time() < began + LONGEST and next(parts, None) is not None:
            try:
                part = await move()
            except Refused as refused:
                problem = str(refused)
                return
            moved += part  # Not in one line with `await`, which other parts would overtake.

    async with asyncio.TaskGroup() as tasks:
        for number in range(WINDOW):
            tasks.create_task(mover(), name=f"part {number} of a probe")
    took = loop.time() - began
    return Bandwidth(moved / took if took > 0 else 0.0, moved, problem)

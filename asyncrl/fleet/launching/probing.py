"""A host's end of a probe: measures clock, round trips and bandwidth to a join point, without joining.

offset of the clocks   theirs - (sent + received) / 2 of the fastest round trip, wrong by at most half of that
bandwidth              parts in a row, WINDOW of them under way, for LONGEST seconds or PROBE_BYTES, each way
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from asyncrl.errors import Refused
from asyncrl.fleet.launching.joining import HEARTBEAT, joining_hello
from asyncrl.fleet.launching.probe_point import PART_BYTES, PROBE_BYTES, TURN
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.wire import Wire
from asyncrl.protocols.join_messages import JoinRequest, ProbeAnswer

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

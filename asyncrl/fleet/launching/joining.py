"""Shared by both ends of joining: their hello, their heartbeats, and the packages whose versions have to agree; and
what a host asks that has not joined: what it does in a run, and what the connection is like. Health checks ask every
few seconds, so that nothing here loads a whole fleet."""

import asyncio
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version

from asyncrl.errors import ConfigError, DeadlineExceeded, FleetFailed, PeerLost, Refused
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.wire import Wire
from asyncrl.lanes.host_id import HostId
from asyncrl.protocols.messages import PROTOCOL, Hello, JoinRequest, ProbeAnswer
from asyncrl.version import __version__

JOINING = "joining"
"""Takes the place of the run in the hello of a host, which does not know the run yet."""

HEARTBEAT = 2.0
"""Seconds between heartbeats of a host and its controller: a host that is silent for four of them is lost."""

SIGN_OF_LIFE = 1.0
"""Seconds until an order to wait follows another order: that a host died shows when something is sent there."""

ORDER_DEADLINE = 10.0
"""Seconds without any order after which a host counts its controller as lost."""

INQUIRY_DEADLINE = 5.0
"""Seconds for the answer, which takes some milliseconds once the run is reached."""

LONGEST_DRAIN = 3600.0
"""Seconds that a host may let its worker drain: far longer than a group takes."""

START_TRIES = 3
"""Starts of new workers on one offer that fail in a row before it is dropped. A host that joins again makes another."""

REQUEST_BYTES = 1 << 20
"""Largest message of a host to its controller, whoever has a key: a part of a probe has 128 kB, all others far less."""

TURN = 5.0
"""Seconds from the begin of a probe to that of the next one."""

PROBE_BYTES = 4 << 20
"""Bytes of a turn each way: with TURN 0.8 MB/s at most, and 3.4 s at 10 Mbit/s."""

PART_BYTES = 128 << 10
"""Bytes of one part: 0.1 s at 10 Mbit/s, for which other messages wait behind it."""

COMPARED = ("asyncrl", "torch", "transformers", "vllm")
"""Packages that a worker may need in the version that the controller has: they decide what is sampled."""


class HostState(StrEnum):
    """Names the steps of a host in a run, in the order in which it gets there."""

    ABSENT = "has not joined"
    STARTS = "starts a worker"
    WAITS = "waits for a free place"
    WORKS = "runs a worker"


def joining_hello(service: str, instance: str) -> Hello:
    return Hello(JOINING, 0, service, 0, instance, PROTOCOL, __version__)


def installed_versions() -> dict[str, str]:
    """Returns the versions of those packages that are installed. A build for another device ("+cpu") is the same
    version."""
    found = {"asyncrl": __version__}
    for package in COMPARED[1:]:
        try:
            found[package] = version(package).partition("+")[0]
        except PackageNotFoundError:
            continue
    return found


def version_problem(needed: Collection[str], ours: Mapping[str, str], theirs: Mapping[str, str], host: str) -> str:
    """Returns what differs between controller and host, and what to do about it; "" if nothing does."""
    differing = [name for name in needed if theirs.get(name) != ours.get(name)]
    if not differing:
        return ""
    here, there = (
        ", ".join(f"{name} {side.get(name, '(not installed)')}" for name in differing) for side in (ours, theirs)
    )
    return f"the controller has {here}, and {host} has {there}: install the same versions on both"


async def state_of_host(
    wire: Wire, address: str, service: str, proof: str, host: HostId, versions: Mapping[str, str], gpus: Sequence[str]
) -> HostState:
    """Returns the furthest state of the offers for this service that come from this host.

    Raises:
        ConfigError: the run refuses this host, for its key or its versions.
        FleetFailed: no run answers.
    """
    agent = secrets.token_hex(8)
    identity = (host.machine, host.memory, host.name)
    request = JoinRequest(service, agent, *identity, dict(versions), proof, list(gpus))
    client = Client(wire.connect(address), joining_hello(service, agent), f"the run at {address}", heartbeat=HEARTBEAT)
    try:
        async with client:
            return HostState(await client.call("state", (request,), INQUIRY_DEADLINE))
    except Refused as refused:
        raise ConfigError(f"{address} refuses this host: {refused}") from refused
    except (PeerLost, DeadlineExceeded) as lost:
        raise FleetFailed(f"no run answers at {address}: {lost}") from lost


# ---- what the connection is like, before a host joins (ProbePoint in join_point.py) --------------------------------
#
#     offset of the clocks   theirs - (sent + received) / 2 of the fastest round trip, wrong by at most half of that
#     bandwidth              parts in a row, WINDOW of them under way, for LONGEST seconds or PROBE_BYTES, each way


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

"""The state of a run for people on other hosts, over the connection by which hosts join.

asyncrl monitor tcp://HOST:PORT                  JoinPoint
watch(proof of a key of the role monitor) ────>  the newest state, the newest line of metrics.jsonl, the time
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple

from asyncrl.errors import DeadlineExceeded, PeerLost, Refused
from asyncrl.fleet.launching.joining import HEARTBEAT, joining_hello
from asyncrl.fleet.launching.key_folder import WorkerKey
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.wire import Wire
from asyncrl.telemetry.jsonl import newest_line
from asyncrl.telemetry.run_directory import RunDirectory

MONITOR = "monitor"
"""Role of keys with which a run is watched, and no worker joins."""
SHORTEST = 1.0
"""Seconds between two looks at the files: a state is written every 2 s, however many watch."""
DEADLINE = 10.0
"""Seconds for an answer."""


class SeenRun(NamedTuple):
    """One look at a run. status: the content of status.json, "" before there is one. metrics: the newest line of
    metrics.jsonl, "" before the first. now: Unix time of the controller in seconds."""

    status: str
    metrics: str
    now: float


@dataclass
class RunWatch:
    """Answers those who watch a run. role_of: returns the role of a key from its proof. now: returns Unix time
    in seconds."""

    directory: RunDirectory
    role_of: Callable[[str], str]
    now: Callable[[], float] = time.time
    _seen: SeenRun | None = None
    _seen_at: float = 0.0

    async def watch(self, proof: str) -> tuple[str, str, float]:
        """Returns the fields of SeenRun. Raises Refused for a key of another role."""
        role = self.role_of(proof)
        if role != MONITOR:
            what = f"is of {role} workers" if role else "is not admitted, or no more"
            raise Refused(f"the key {what}: watch with a key of the role {MONITOR} (`asyncrl admit FOLDER {MONITOR}`)")
        now = asyncio.get_running_loop().time()
        if self._seen is None or now - self._seen_at >= SHORTEST:
            self._seen_at = now
            self._seen = await asyncio.to_thread(self._look)
        return self._seen.status, self._seen.metrics, self._seen.now

    def _look(self) -> SeenRun:
        directory = self.directory
        status = directory.status.read_text() if directory.status.exists() else ""
        return SeenRun(status, newest_line(directory.metrics), self.now())


@asynccontextmanager
async def watched_run(wire: Wire, address: str, key: WorkerKey) -> AsyncIterator[Callable[[], Awaitable[SeenRun]]]:
    """Connects to a run; returns what looks at it. Raises PeerLost, DeadlineExceeded and Refused, as looking does."""
    hello = joining_hello(MONITOR, secrets.token_hex(8))
    lost = "it has ended, or the network broke; its run directory says which"
    try:
        async with Client(wire.connect(address), hello, f"the run at {address}", heartbeat=HEARTBEAT) as client:

            async def look() -> SeenRun:
                return SeenRun(*await client.call("watch", (key.proof,), DEADLINE))

            yield look
    except (PeerLost, DeadlineExceeded) as error:
        raise PeerLost(f"the run at {address} does not answer ({error}): {lost}") from error

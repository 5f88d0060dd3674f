"""Reaches a run that goes on: commands from its own host, and its state for people who watch from others.

asyncrl scale DIR ...             ── reads DIR/commands.json ── encrypted call ──> controller
asyncrl monitor tcp://HOST:PORT   ── a key of the role monitor ────────> JoinPoint: newest state and metrics, the time

Only who can read commands.json, which has mode 0600, can send commands. Each start of a run has fresh keys.
"""

import asyncio
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.concurrency import running_beside
from asyncrl.errors import ConfigError, DeadlineExceeded, PeerLost, Refused
from asyncrl.fleet.launching.joining import HEARTBEAT, REQUEST_BYTES, joining_hello
from asyncrl.fleet.launching.key_folder import MONITOR, WorkerKey
from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.server import Server
from asyncrl.lanes.control.wire import Wire
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.protocols.messages import Call
from asyncrl.telemetry.jsonl import newest_line
from asyncrl.telemetry.run_directory import NO_RUN, RunDirectory, missing_run

DEADLINE = 10.0
"""Seconds for an answer of a command that starts what it wants and does not wait for its end."""

Commands = Callable[[Call], Awaitable[str]]
"""Runs a command; returns what a person should read. Raises Refused for one that cannot be."""


@dataclass(frozen=True, slots=True)
class CommandAddress:
    """The content of commands.json."""

    address: str
    public: str
    secret: str


@asynccontextmanager
async def open_commands(file: Path, address: str, commands: Commands) -> AsyncIterator[None]:
    """Takes commands at an address during the block. file: where callers find it."""
    keys = CurveKeys.fresh()
    with closing(ZmqWire(keys, REQUEST_BYTES)) as wire:
        listener = wire.listen(address)
        server = Server(listener, commands, joining_hello("controller", "commands"), heartbeat=HEARTBEAT)
        async with running_beside({"commands": server.serve()}):
            _write(file, CommandAddress(listener.address, keys.public, keys.secret))
            try:
                yield
            finally:
                _remove(file)


async def send_command(file: Path, method: str, *args: Any, deadline: float = DEADLINE) -> str:
    """Sends a command to the run that wrote this file; returns its answer. Raises ConfigError when no run answers, or
    refuses."""
    found = _read(file)
    with closing(ZmqWire(CurveKeys(found.public, found.secret))) as wire:
        hello = joining_hello("command", secrets.token_hex(8))
        client = Client(wire.connect(found.address), hello, f"the run in {file.parent}", heartbeat=HEARTBEAT)
        try:
            async with client:
                answer: str = await client.call(method, args, deadline)
                return answer
        except Refused as refused:
            raise ConfigError(str(refused)) from refused
        except (PeerLost, DeadlineExceeded) as lost:
            raise ConfigError(
                f"no run in {file.parent} answers at {found.address} ({lost}): it has ended, or this is another host"
            ) from lost


def _read(file: Path) -> CommandAddress:
    try:
        return CommandAddress(**json.loads(file.read_text()))
    except FileNotFoundError:
        if not RunDirectory(file.parent).started_before:
            raise missing_run(file.parent, NO_RUN) from None
        raise ConfigError(
            f"no run goes on in {file.parent}, or its workers are no processes: {file.name} does not exist there"
        ) from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; only the user of the run may") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file} is no address of a run: {error}") from error


def _remove(file: Path) -> None:
    file.unlink(missing_ok=True)


def _write(file: Path, content: CommandAddress) -> None:
    """Writes a file that only this user reads, in place of that of an earlier start."""
    unfinished = file.with_suffix(".part")
    unfinished.unlink(missing_ok=True)
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        json.dump(asdict(content), out)
    unfinished.replace(file)


# ---- the state of a run, over the connection by which hosts join ---------------------------------------------------


SHORTEST = 1.0
"""Seconds between two looks at the files: a state is written every 2 s, however many watch."""
LOOK_DEADLINE = 10.0
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
                return SeenRun(*await client.call("watch", (key.proof,), LOOK_DEADLINE))

            yield look
    except (PeerLost, DeadlineExceeded) as error:
        raise PeerLost(f"the run at {address} does not answer ({error}): {lost}") from error

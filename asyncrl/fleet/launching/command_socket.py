"""Commands to a run that goes on: its controller listens, and leaves address and keys in the run directory.

    asyncrl scale DIR ... ── reads DIR/commands.json ── encrypted call ──> controller

Only who can read that file, which has mode 0600, can send commands. Each start of a run has fresh keys.
"""

import json
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncrl.concurrency import running_beside
from asyncrl.errors import ConfigError, DeadlineExceeded, PeerLost, Refused
from asyncrl.fleet.launching.joining import HEARTBEAT, REQUEST_BYTES, joining_hello
from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.server import Server
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.protocols.messages import Call
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

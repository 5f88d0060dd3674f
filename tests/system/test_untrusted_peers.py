"""Bytes of strangers on real sockets: nothing gets in, nothing grows, and the fleet trains on."""

import asyncio
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

import pytest

from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.server import Server
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.protocols.messages import PROTOCOL, Call, Hello

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from torchless_runs import Run  # noqa: E402
from untrusted_peers import GREETING, SPEECHES, at_every_socket, speak, unix  # noqa: E402

CONTROLLER = Hello("run1", 0, "controller", 0, "controller-0", PROTOCOL, "0.1")
MEGABYTE = 1 << 20


@asynccontextmanager
async def worker(address: str) -> AsyncIterator[tuple[Server, Client, str]]:
    """One that echoes, a link to it, and where it listens."""

    async def echo(call: Call) -> Any:
        return call.args[0]

    wire = ZmqWire(CurveKeys.fresh())
    listener = wire.listen(address)
    host = Server(listener, echo, CONTROLLER)
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(host.serve())
        async with Client(wire.connect(listener.address), CONTROLLER, "worker") as link:
            yield host, link, listener.address
        serving.cancel()
    wire.close()


def resident() -> int:
    """Bytes of memory in use by this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def tcp(address: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1])), timeout=1.0)


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
async def test_bytes_of_untrusted_peers_are_refused_and_freed(scheme: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with worker("tcp://127.0.0.1:*" if scheme == "tcp" else f"ipc://{folder}/w") as (host, link, address):
            connect = partial(tcp, address) if scheme == "tcp" else unix(Path(folder, "w"))
            before = resident()
            for number, speech in enumerate([*SPEECHES, *SPEECHES]):
                await asyncio.to_thread(speak, connect, speech)
                assert await link.call("echo", (number,), 5.0) == number
            assert host.refused == 0
            assert resident() - before < 16 * MEGABYTE


async def test_endless_message_does_not_fill_memory() -> None:
    """Seen while it is being said: afterwards it would be gone in any case."""
    grown = []
    with tempfile.TemporaryDirectory() as folder:
        async with worker(f"ipc://{folder}/w") as (_, link, _):
            before, connected = resident(), unix(Path(folder, "w"))()

            def say() -> None:
                for piece in SPEECHES[6]:
                    connected.sendall(piece)

            with connected:
                with pytest.raises(OSError, match=r"Broken pipe|reset"):
                    await asyncio.to_thread(say)
                grown.append(resident() - before)
                assert await link.call("echo", (1,), 5.0) == 1
    assert max(grown) < 2 * MEGABYTE


async def test_unfinished_handshakes_do_not_block_other_peers() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with worker(f"ipc://{folder}/w") as (_, link, _):
            waiting = [unix(Path(folder, "w"))() for _ in range(100)]
            for connected in waiting:
                connected.sendall(GREETING[: len(waiting) % 12])
            assert await link.call("echo", (1,), 5.0) == 1
            for connected in waiting:
                connected.close()


@pytest.mark.fleet
@pytest.mark.usefixtures("programs")
def test_fleet_trains_while_an_untrusted_peer_sends_to_every_socket(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", ["--steps", "40"])

    def sockets() -> list[Path]:
        mark = run.directory / "run.id"
        name = mark.read_text() if mark.exists() else "none yet"
        # Not Path.glob, which raises when a folder goes while it is looked through.
        found = glob(f"{tempfile.gettempdir()}/asyncrl-{name}*/*")
        return [path for path in map(Path, found) if path.is_socket()]

    with at_every_socket(sockets, seed=1) as spoken_to:
        assert run.to_its_end() == 0, run.shown
    assert {name.rsplit(".", 1)[1] for name in spoken_to} >= {"control", "work"}
    assert {name.split("0.0-")[0] for name in spoken_to} >= {"generation", "reward", "training"}
    assert run.version == 40
    assert "lost" not in run.shown
    run.audited()

"""Bytes of strangers on real sockets: nothing gets in, nothing grows, and the fleet trains on."""

import asyncio
import os
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import PeerLost
from asyncrl.fleet.launching.joining import REQUEST_BYTES
from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.server import Server
from asyncrl.lanes.control.wire import CALL_BYTES
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.protocols.messages import PROTOCOL, Call, Hello

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from torchless_runs import Run  # noqa: E402
from untrusted_peers import GREETING, SPEECHES, at_every_port, at_every_socket, frame, greeting, speak, unix  # noqa: E402
from watching import PATIENCE  # noqa: E402

CONTROLLER = Hello("run1", 0, "controller", 0, "controller-0", PROTOCOL, "0.1")
MEGABYTE = 1 << 20
DATA = bytes(MEGABYTE)


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
            before = resident()
            connected = unix(Path(folder, "w"))()

            def say() -> None:
                for piece in SPEECHES[6]:
                    connected.sendall(piece)

            with connected:
                with pytest.raises(OSError, match=r"Broken pipe|reset"):
                    await asyncio.to_thread(say)
                grown.append(resident() - before)
                assert await link.call("echo", (1,), 5.0) == 1
    assert max(grown) < 2 * MEGABYTE


@pytest.mark.parametrize("mechanism", [b"NULL", b"PLAIN", b"CURVE"])
async def test_a_peer_without_a_key_fills_no_memory_over_tcp(mechanism: bytes) -> None:
    """Neither by messages of many parts nor by one of 200 MB, in the place of the handshake."""
    async with worker("tcp://127.0.0.1:*") as (_, link, address):
        for part in (frame(1, DATA), frame(0, DATA, 200 * MEGABYTE), frame(4, DATA)):
            before = resident()
            connected = tcp(address)
            grown = 0

            def say(part: bytes = part, connected: socket.socket = connected) -> None:
                connected.sendall(greeting(mechanism))
                for _ in range(64):
                    connected.sendall(part)

            with connected:
                with pytest.raises(OSError, match=r"Broken pipe|reset"):
                    await asyncio.to_thread(say)
                grown = resident() - before
                assert await link.call("echo", (1,), 5.0) == 1
            assert grown < 4 * MEGABYTE


async def test_a_large_message_before_the_hello_cuts_the_peer_off_where_requests_are_small() -> None:
    keys = CurveKeys.fresh()
    small = ZmqWire(keys, REQUEST_BYTES)
    large = ZmqWire(keys)

    async def echo(call: Call) -> Any:
        return call.args[0]

    host = Server(small.listen("tcp://127.0.0.1:*"), echo, CONTROLLER)
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(host.serve())
        stranger = large.connect(host.listener.address)
        message = bytes(CALL_BYTES)
        assert stranger.offer([message])
        with pytest.raises(PeerLost, match="broke"):
            async with asyncio.timeout(60):
                await stranger.pump(lambda frames: None)
        assert host.refused == 0, "it was not even received"
        async with Client(large.connect(host.listener.address), CONTROLLER, "worker") as link:
            assert await link.call("echo", (b"x" * (REQUEST_BYTES // 2),), 5.0)
        serving.cancel()
    small.close()
    large.close()


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


@pytest.mark.fleet
@pytest.mark.usefixtures("programs")
def test_fleet_trains_while_strangers_flood_its_ports(tmp_path: Path) -> None:
    """Shows its pace before and meanwhile with `pytest -s`."""
    run = Run(tmp_path / "run", ["--steps", "140", "--fleet.wire", "tcp"])
    half = 60
    with run.running() as process:
        run.until_step(process, 10)
        quiet = Pace(run)
        run.until_step(process, half)
        shown = [quiet.shown()]
        before = {pid: memory_of(pid) for pid in run.processes()}
        with at_every_port(ports_of(run.processes()), seed=1) as said:
            flooded = Pace(run)
            run.until_step(process, 110)
            shown.append(f"{flooded.shown()} with {len(said)} speeches")
            grown = {pid: memory_of(pid) - size for pid, size in before.items() if memory_of(pid)}
        assert process.wait(PATIENCE) == 0, run.shown
    sys.stdout.write("\n".join(shown) + "\n")
    assert len({*said}) >= 6, "control and work lanes of three workers at least"
    assert len(said) > 100
    assert grown
    assert max(grown.values()) < 64 * MEGABYTE
    assert "lost" not in run.shown
    run.audited()


class Pace:
    """Steps of a run from now on, by the clock and by its own CPU time."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._began = run.version, time.monotonic(), seconds_of(run.processes())

    def shown(self) -> str:
        version, clock, cpu = self._began
        steps = self._run.version - version
        seconds = time.monotonic() - clock
        used = seconds_of(self._run.processes()) - cpu
        return f"{steps / seconds:.2f} steps a second, {steps / used:.2f} a second of its CPU time"


def seconds_of(pids: list[int]) -> float:
    """Seconds of CPU that these processes have taken."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def memory_of(pid: int) -> int:
    """Resident bytes of a process, 0 when it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0


def ports_of(pids: list[int]) -> list[int]:
    """Ports of the loopback interface at which these processes listen."""
    sockets = set()
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(os.readlink(path))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    return sorted({int(row[1].rpartition(":")[2], 16) for row in listening})

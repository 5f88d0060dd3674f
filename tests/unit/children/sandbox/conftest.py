"""Sandboxes of a test, and things outside that an attack looks for."""

import ctypes
import os
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from asyncrl.children.sandbox import Limits, SandboxPool

SECRET = "the-secret-of-the-fleet"
SYSV_KEY = 0x61737263


@pytest.fixture
async def pool(bubblewrap_works: None) -> AsyncIterator[SandboxPool]:
    async with SandboxPool(2, limits=Limits(seconds=30, disk_bytes=4 * 2**20)) as pool:
        yield pool


@dataclass
class Outside:
    """names: words of attacks with what they stand for. visits: what came in from a sandbox."""

    names: dict[str, str]
    tcp: socket.socket
    udp: socket.socket
    abstract: socket.socket
    path: socket.socket

    def of(self, source: str) -> str:
        for word, value in self.names.items():
            source = source.replace(word, value)
        return source

    def visited(self) -> bool:
        """True when somebody reached one of the sockets."""
        return any(reached(each) for each in (self.tcp, self.udp, self.abstract, self.path))


def reached(listening: socket.socket) -> bool:
    listening.setblocking(False)
    try:
        if listening.type == socket.SOCK_DGRAM:
            listening.recv(1)
        else:
            listening.accept()[0].close()
    except BlockingIOError:
        return False
    return True


def listening(family: int, address: object, kind: int = socket.SOCK_STREAM) -> socket.socket:
    found = socket.socket(family, kind)
    found.bind(address)  # type: ignore[arg-type]
    if kind == socket.SOCK_STREAM:
        found.listen()
    return found


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outside]:
    """Makes what a fleet has: open ports, sockets, shared memory, a run directory, an environment."""
    run = tmp_path / "run.key"
    run.write_text(SECRET)
    segment = Path(f"/dev/shm/sandbox-test-{os.getpid()}")
    segment.write_text(SECRET)
    monkeypatch.setenv("FLEET_SECRET", SECRET)
    abstract = f"sandbox-test-{os.getpid()}"
    sockets = (
        listening(socket.AF_INET, ("127.0.0.1", 0)),
        listening(socket.AF_INET, ("127.0.0.1", 0), socket.SOCK_DGRAM),
        listening(socket.AF_UNIX, f"\0{abstract}"),
        listening(socket.AF_UNIX, os.path.relpath(tmp_path / "fleet.sock")),
    )
    libc = ctypes.CDLL(None)
    shared = libc.shmget(SYSV_KEY, 4096, 0o1666)
    tcp, udp = (str(each.getsockname()[1]) for each in sockets[:2])
    names = {"TCP_PORT": tcp, "UDP_PORT": udp, "ABSTRACT": abstract, "SOCKET_PATH": str(tmp_path / "fleet.sock")}
    names |= {"SECRET_NAME": "FLEET_SECRET"}
    names |= {"HOME_PATH": str(Path.home()), "RUN_PATH": str(run), "SEGMENT": segment.name}
    names |= {"SYSV_KEY": str(SYSV_KEY), "FLEET_PID": str(os.getpid())}
    yield Outside(names, *sockets)
    libc.shmctl(shared, 0, None)
    segment.unlink()
    for each in sockets:
        each.close()

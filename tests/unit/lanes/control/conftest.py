"""A worker and its callers over each wire."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.server import Server
from asyncrl.lanes.control.wire import InprocWire, Wire
from asyncrl.lanes.control.zmq_wire import ZmqWire
from asyncrl.protocols.messages import PROTOCOL, Call, Hello

CONTROLLER = Hello("run1", 3, "controller", 0, "controller-3", PROTOCOL, "0.1")
WORKER = replace(CONTROLLER, service="generation", rank=1, instance="generation0.1-3-a")


@dataclass
class Worker:
    """Answers calls of its methods by name; keeps what it was asked and which calls were cancelled."""

    address: str
    calls: list[Call] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    produced: int = 0
    server: Any = None

    def dispatch(self, call: Call) -> Any:
        self.calls.append(call)
        self.started.set()
        return getattr(self, call.method)(*call.args)

    async def echo(self, *args: Any) -> Any:
        return args

    async def hang(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.append("hang")
            raise

    async def hang_after_one(self) -> AsyncIterator[int]:
        yield 1
        await asyncio.Event().wait()

    async def count(self, items: int) -> AsyncIterator[int]:
        try:
            for item in range(items):
                self.produced += 1
                yield item
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled.append("count")
            raise
        finally:
            self.cancelled.append("count closed")


@dataclass
class Site:
    """One wire with an address to listen on."""

    wire: Wire
    address: str

    @asynccontextmanager
    async def serving(self, identity: Hello = WORKER, **options: Any) -> AsyncIterator[Worker]:
        listener = self.wire.listen(self.address)
        worker = Worker(listener.address)
        worker.server = Server(listener, worker.dispatch, identity, **options)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(worker.server.serve(), name="server")
            try:
                yield worker
            finally:
                serving.cancel()
                listener.close()

    def link(self, worker: Worker, hello: Hello = CONTROLLER, **options: Any) -> Client:
        return Client(self.wire.connect(worker.address), hello, "generation0[1]", **options)


@pytest.fixture(params=["inproc", "ipc"])
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    """The address for ipc lies in a short path: a socket's name has 107 bytes at most."""
    with tempfile.TemporaryDirectory() as folder:
        addresses = {"inproc": "inproc://worker", "ipc": f"ipc://{Path(folder)}/w", "tcp": "tcp://127.0.0.1:*"}
        wire: Any = InprocWire() if request.param == "inproc" else ZmqWire(CurveKeys.fresh())
        yield Site(wire, addresses[request.param])
        left = [end for end in getattr(wire, "_endpoints", ()) if not end.closed]
        wire.close()
        assert not left, "sockets left open"


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Lets everybody else run until the condition holds, five seconds at most."""

    async def wait(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            for _ in iter(condition, True):
                await asyncio.sleep(0)

    return wait

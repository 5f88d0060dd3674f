"""Both real ends of joining over the in-process wire: a controller with its join point, and hosts, on virtual time."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.fleet.launching.join_point import JoinPoint, Places, open_join_point
from asyncrl.fleet.launching.joining_host import JoiningHost
from asyncrl.fleet.worker.worker_spec import Addresses, WorkerSpec
from asyncrl.lanes.control.wire import InprocWire, Wire
from asyncrl.lanes.data.file_cache import FileCache
from asyncrl.lanes.host_id import HostId
from tests.unit.fleet.fake_workers import FakeProcess, spec_of
from tests.virtual_time import within

ADDRESS = "inproc://joining"
DEADLINE = 100.0
TIMEOUT = 30.0
VERSIONS = {"asyncrl": "1", "torch": "2"}
ECHO = Places(needed=1, packages=("asyncrl", "torch"), command="asyncrl join echo")


@dataclass
class FakeLauncher:
    """Starts fake workers on a host; a `spawn_error` is raised in place of that, once it is `stuck` no more."""

    host: HostId
    workers: list[FakeProcess] = field(default_factory=list)
    cleaned_up: list[str] = field(default_factory=list)
    stuck: float = 0.0
    spawn_error: OSError | None = None

    async def spawn(self, spec: WorkerSpec) -> FakeProcess:
        await asyncio.sleep(self.stuck)
        if self.spawn_error is not None:
            raise self.spawn_error
        addresses = Addresses(*(f"tcp://{self.host.name}:{port}" for port in (1, 2, 3)))
        self.workers.append(FakeProcess(replace(spec, addresses=addresses)))
        self.workers[-1].labels = {"pid": 12}
        return self.workers[-1]

    def clean_up(self, spec: WorkerSpec) -> None:
        self.cleaned_up.append(spec.instance)


Host = TypeVar("Host", bound=JoiningHost)


def fake_host(
    wire: Wire,
    name: str = "h1",
    kind: type[Host] = JoiningHost,
    **changes: Any,  # type: ignore[assignment]
) -> tuple[Host, FakeLauncher]:
    """A host that sees no file of a controller, with its launcher."""
    launcher = FakeLauncher(HostId(name, name=name))
    plain = {
        "address": ADDRESS,
        "service": "echo",
        "proof": "echo",
        "launcher": launcher,
        "stop": asyncio.Event(),
        "files": FileCache(Path("/nowhere"), print),
        "timeout": TIMEOUT,
        "say": lambda text: None,
        "host": launcher.host,
        "versions": VERSIONS,
        "gpus": [],
    }
    return kind(wire, **(plain | changes)), launcher


class Site:
    """A controller with its join point, and hosts."""

    def __init__(self, wire: InprocWire, point: JoinPoint, said: list[str]) -> None:
        self.wire = wire
        self.point = point
        self.said = said
        self.cache = Path("/nowhere")
        self.hosts: dict[str, tuple[JoiningHost, FakeLauncher, asyncio.Task[None]]] = {}
        self.tasks: list[asyncio.Task[None]] = []

    def host(
        self, name: str, service: str = "echo", *, torch: str = "2", gpus: int = 0, **changes: Any
    ) -> "asyncio.Task[None]":
        machine = name.rstrip("ab")  # h1a and h1b are on one machine.
        own = {"versions": VERSIONS | {"torch": torch}, "gpus": [f"cuda:{number}" for number in range(gpus)]}
        own |= {"say": self.said.append, "files": FileCache(self.cache, self.said.append)}
        made, launcher = fake_host(self.wire, machine, service=service, **(own | changes))
        task = asyncio.get_running_loop().create_task(made.serve())
        self.hosts[name] = made, launcher, task
        self.tasks.append(task)
        return task

    def worker(self, name: str) -> FakeProcess:
        return self.hosts[name][1].workers[-1]


@asynccontextmanager
async def site(echo: Places = ECHO, **changes: Any) -> AsyncIterator[Site]:
    wire = InprocWire()
    said = list[str]()
    roles = {"echo": "echo", "other": "reward"}
    plain = {"places": {"echo": echo}, "role_of": roles.get, "deadline": DEADLINE, "report": said.append}
    point = JoinPoint(ADDRESS, **(plain | {"versions": VERSIONS} | changes))
    here = Site(wire, point, said)
    async with open_join_point(point, wire):
        yield here
    for task in here.tasks:
        task.cancel()
    await asyncio.gather(*here.tasks, return_exceptions=True)
    wire.close()


def playing(places: Places = ECHO) -> Callable[..., Any]:
    """Runs a test at a site, which is its first argument."""
    return within(partial(site, places))


def place(replica: int, instance: str = "a") -> WorkerSpec:
    return replace(spec_of(f"echo{replica}.0-0-{instance}"), replica=replica)

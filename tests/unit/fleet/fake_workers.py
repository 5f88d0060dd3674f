"""Workers and connections of which tests of supervision decide when they end."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Self

from asyncrl.config.schema import Config, ModelConfig, TaskConfig
from asyncrl.errors import PeerLost
from asyncrl.fleet.remote_worker import WorkerConnection
from asyncrl.fleet.worker.worker_spec import Addresses, RunFacts, WorkerSpec
from asyncrl.lanes.host_id import HostId
from asyncrl.protocols.rank_layout import Layout
from asyncrl.protocols.service_contracts import Lane

CONFIG = Config(model=ModelConfig(name="m"), task=TaskConfig(prompts="p"))
FACTS = RunFacts("feedbeef", Path("/run"), Path("/model"), 0, "none", CONFIG)


def spec_of(instance: str) -> WorkerSpec:
    return WorkerSpec("echo", 0, 0, Layout(), instance, "x:Y", Addresses("control", "work", "data"), FACTS)


class FakeProcess:
    """Lives until it is asked to end; `ignores` names the requests that it ignores."""

    host = HostId("here")
    labels: Mapping[str, int | str] = {}
    has_left = False

    def __init__(self, spec: WorkerSpec, ignores: tuple[str, ...] = ()) -> None:
        self.spec = spec
        self.ignores = ignores
        self.requests: list[str] = []
        self._ended = asyncio.Event()
        self._how = ""

    @property
    def dead(self) -> bool:
        return self._ended.is_set()

    def die(self, how: str = "killed by SIGKILL") -> None:
        self._how = self._how or how
        self._ended.set()

    async def wait(self) -> str:
        await self._ended.wait()
        return self._how

    def _ask(self, request: str) -> None:
        if not self._ended.is_set():
            self.requests.append(request)
            if request not in self.ignores:
                self.die("ended")

    def stop(self) -> None:
        self._ask("stop")

    def terminate(self) -> None:
        self._ask("terminate")

    def kill(self) -> None:
        self._ask("kill")


class FakeConnection(WorkerConnection):
    """Greets at once, and takes calls when `start` is over."""

    silence = None

    def __init__(self, start: Callable[[], Awaitable[None]], greets: bool) -> None:
        self.lost = asyncio.Event()
        self.reason = ""
        self.channels: Mapping[Lane, Any] = dict.fromkeys(Lane, self)
        self._start = start
        self._greets = greets

    async def call(self, method: str, args: tuple[Any, ...], deadline: float, *, wants_answer: bool = True) -> None:
        await self.lost.wait()
        raise PeerLost(self.reason)

    async def __aenter__(self) -> Self:
        if not self._greets:
            raise PeerLost("it hung up")
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.fail("closed")

    def fail(self, reason: str) -> None:
        if not self.lost.is_set():
            self.reason = reason
            self.lost.set()

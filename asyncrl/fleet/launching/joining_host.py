"""The end of joining on a host: offers to run a worker of one service, and does what the controller orders.

join ──> check paths ──> ready ──> start a worker ──> its end ──> ready for another one
                                      └── connection broken: the worker is killed, and the host joins again
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, cast

from asyncrl.concurrency import one_error
from asyncrl.errors import ConfigError, DeadlineExceeded, FleetFailed, PeerLost, Refused, WireError
from asyncrl.fleet.launching.joining import HEARTBEAT, ORDER_DEADLINE, installed_versions, joining_hello
from asyncrl.fleet.launching.launcher import LaunchedWorker, Launcher, end_worker
from asyncrl.fleet.worker.worker_spec import WorkerSpec
from asyncrl.lanes.control.auth import KEY_REFUSED
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.wire import Wakeup, Wire
from asyncrl.lanes.host_id import HostId
from asyncrl.protocols.messages import JoinOrder, JoinRequest

CALL_DEADLINE = 10.0
"""Seconds for the controller to take a report, which it does between two messages."""

REFUSALS = 3
"""Handshakes that fail before the key counts as wrong: one fails, too, when the controller just ends."""

RETRY = 0.5
"""Seconds between two tries to reach the controller."""

DRAIN_MARGIN = 2.0
"""Seconds after the time in which a worker drains that its controller may take to end it."""


class _Left(Exception):
    """Leaves the connection, because this host was asked to."""


@dataclass(eq=False)
class JoiningHost:
    """Offers one worker at a time.

    address: where the run listens. service: whose worker it runs. proof: of its key. launcher: starts workers here.
    stop: set when this host is to leave. timeout: seconds without a controller after which it gives up. say: takes
    what a person should read. drain: seconds in which its worker may finish what it has when this host is to leave.
    """

    wire: Wire
    address: str
    service: str
    proof: str
    launcher: Launcher
    stop: asyncio.Event
    _: KW_ONLY
    timeout: float
    say: Callable[[str], None]
    drain: float = 0.0
    host: HostId = field(default_factory=HostId.here)
    versions: dict[str, str] = field(default_factory=installed_versions)

    async def serve(self) -> None:
        """Runs workers until the run ends or `stop` is set; joins again when the connection broke.

        Raises:
            ConfigError: the controller refuses this host, or a path is missing here.
            FleetFailed: no controller was reached for `timeout` seconds.
        """
        loop = asyncio.get_running_loop()
        reached, why, refusals = loop.time(), "", 0
        while not self.stop.is_set():
            try:
                async with self._connection() as client:
                    reached = loop.time()
                    await self._follow_orders(client)
                    return
            except Refused as refused:
                advice = ". Install the same asyncrl on both hosts" if "another protocol" in str(refused) else ""
                raise ConfigError(f"{self.address} refuses this host: {refused}{advice}") from refused
            except (PeerLost, DeadlineExceeded) as lost:
                if why != str(lost):
                    self.say(f"cannot reach the run at {self.address}: {lost}; trying for {self.timeout:g} s")
                why = str(lost)
                refusals += KEY_REFUSED in why
            if refusals == REFUSALS:
                raise ConfigError(
                    f"{self.address} does not accept the key of this host: name the key that the run under its "
                    f"join_keys, or `asyncrl admit DIR {self.service}`, wrote for this controller"
                )
            if loop.time() - reached > self.timeout:
                raise FleetFailed(
                    f"no run was reached at {self.address} for {self.timeout:g} s ({why}). Start one with "
                    f"`asyncrl run NAME --listen {self.address}`, look whether a firewall is between, or whether "
                    "the key is of that run"
                )
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY):
                    await self.stop.wait()

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Client]:
        hello = joining_hello(self.service, secrets.token_hex(8))
        client = Client(self.wire.connect(self.address), hello, f"the run at {self.address}", heartbeat=HEARTBEAT)
        async with client:
            yield client

    async def _follow_orders(self, client: Client) -> None:
        with suppress(_Left), one_error():
            async with asyncio.TaskGroup() as tasks:
                joined = _JoinedHost(self, client, tasks)
                leaving = tasks.create_task(joined.leave_when_asked(), name="wish to leave")
                try:
                    await joined.follow_orders()
                finally:
                    leaving.cancel()
                    await joined.end_worker()


@dataclass(eq=False)
class _JoinedHost:
    """One connection of a host to the controller, and the worker that runs meanwhile."""

    settings: JoiningHost
    client: Client
    tasks: asyncio.TaskGroup
    worker: LaunchedWorker | None = None
    worker_ended: Wakeup = field(default_factory=Wakeup)

    @property
    def agent(self) -> str:
        return self.client.hello.instance

    async def follow_orders(self) -> None:
        """Returns when the controller has this host leave."""
        settings, host = self.settings, self.settings.host
        request = JoinRequest(
            settings.service, self.agent, host.machine, host.memory, host.name, settings.versions, settings.proof
        )
        orders = self.client.stream("join", (request,), ORDER_DEADLINE)
        async with aclosing(cast(Any, orders)):
            async for order in orders:
                await self._obey(order)

    async def _obey(self, order: JoinOrder) -> None:
        match order.kind:
            case "check":
                await self._check([Path(path) for path in json.loads(order.text)])
            case "start":
                await self._start(WorkerSpec.from_json(order.text))
            case "stop" | "terminate" | "kill" as way:
                if self.worker is not None and self.worker.spec.instance == order.instance:
                    getattr(self.worker, way)()
            case "leave":
                self.settings.say(f"the run at {self.settings.address} has ended")
            case "wait":
                pass
            case _:
                raise WireError(f"an order to {order.kind!r}")

    async def _check(self, paths: list[Path]) -> None:
        name = self.settings.host.name
        if missing := [str(path) for path in paths if not path.exists()]:
            text = (
                f"host {name} does not see {', '.join(missing)}, which {self.settings.service} workers read: share the "
                f"folder with {name} under the same path"
            )
            await self._report("missing", text)
            raise ConfigError(text)
        self.settings.say(f"joined the run at {self.settings.address}; waiting for a worker to start")
        await self._report("ready")

    async def _start(self, spec: WorkerSpec) -> None:
        self.worker = worker = await self.settings.launcher.spawn(spec)
        addresses = worker.spec.addresses
        self.tasks.create_task(self._await_end(worker), name=f"end of {spec.instance}")
        self.settings.say(f"runs {spec.instance}")
        await self._report("started", addresses.control, addresses.work, addresses.data, dict(worker.labels))

    async def _await_end(self, worker: LaunchedWorker) -> None:
        reason = await worker.wait()
        self.settings.launcher.clean_up(worker.spec)
        self.worker = None
        self.settings.say(f"{worker.spec.instance} {reason}")
        with suppress(PeerLost, DeadlineExceeded, Refused):  # Whoever reads the orders finds out.
            await self._report("ended", worker.spec.instance, reason)
        self.worker_ended.wake()

    async def leave_when_asked(self) -> None:
        """Ends the worker once this host is to leave: the controller does, when the worker has finished what it has."""
        await self.settings.stop.wait()
        seconds = self.settings.drain
        if self.worker is not None:
            what = f"{self.worker.spec.instance} finishes what it has, within {seconds:g} s"
            self.settings.say(f"leaving: {what}; a second signal does not wait")
        with suppress(PeerLost, DeadlineExceeded, Refused, TimeoutError):
            async with asyncio.timeout(seconds + DRAIN_MARGIN):
                await self._report("leaving", seconds)
                while self.worker is not None:
                    await self.worker_ended.wait()
        await self.end_worker()
        raise _Left

    async def end_worker(self) -> None:
        """Ends the worker that still runs; its end is waited for."""
        if self.worker is not None:
            await end_worker(self.worker)

    async def _report(self, what: str, *args: Any) -> None:
        await self.client.call(what, (self.agent, *args), CALL_DEADLINE)

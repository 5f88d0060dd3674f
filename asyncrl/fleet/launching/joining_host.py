"""The end of joining on a host: offers to run a worker of one service, and does what the controller orders.

join ──> copy missing files ──> ready ──> start a worker ──> its end ──> ready for another one
                                             └── connection broken: the worker is killed, and the host joins again
"""

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, cast

from asyncrl.concurrency import one_error
from asyncrl.errors import ConfigError, DeadlineExceeded, FleetFailed, PeerLost, Refused, WireError
from asyncrl.fleet.launching.joining import HEARTBEAT, ORDER_DEADLINE, installed_versions, joining_hello
from asyncrl.fleet.launching.launcher import LaunchedWorker, Launcher, end_worker
from asyncrl.fleet.worker.worker_spec import WorkerSpec
from asyncrl.lanes.control.auth import KEY_REFUSED
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.wire import Wakeup, Wire
from asyncrl.lanes.data.files.file_cache import FileCache, relocated
from asyncrl.lanes.host_id import HostId, gpus_of_host
from asyncrl.protocols.join_messages import JoinOrder, JoinRequest

CALL_DEADLINE = 10.0
"""Seconds for the controller to take a report, which it does between two messages."""

REFUSALS = 3
"""Handshakes that fail before the key counts as wrong: one fails, too, when the controller just ends."""

LIST_DEADLINE = 600.0
"""Seconds for the controller to compute the digests of a model, at a few hundred MB/s."""

PART_DEADLINE = 60.0
"""Seconds for one part of a file, of which a few are under way: over a link of 1 Mbit/s."""

LISTS = 3
"""Times that a host asks which files there are, because one changed while it was copied."""

RETRY = 0.5
"""Seconds between two tries to reach the controller."""

DRAIN_MARGIN = 2.0
"""Seconds after the time in which a worker drains that its controller may take to end it."""


class _Left(Exception):
    """Leaves the connection, because this host was asked to."""


async def _as_it_is(address: str) -> str:
    return address


@dataclass(eq=False)
class JoiningHost:
    """Offers one worker at a time.

    address: where the run listens. service: whose worker it runs. proof: of its key. launcher: starts workers here.
    stop: set when this host is to leave. files: of controllers, on this host. timeout: seconds without a controller
    after which it gives up. say: takes what a person should read. resolve: returns the address with the number of its
    host, which may be another one at each try; raises ConfigError while there is none. drain: seconds in which its
    worker may finish what it has when this host is to leave. secret_paths: of this host, such as that of its key, which
    no code of the user sees.
    """

    wire: Wire
    address: str
    service: str
    proof: str
    launcher: Launcher
    stop: asyncio.Event
    files: FileCache
    _: KW_ONLY
    timeout: float
    say: Callable[[str], None]
    resolve: Callable[[str], Awaitable[str]] = field(default=_as_it_is)
    drain: float = 0.0
    secret_paths: tuple[str, ...] = ()
    host: HostId = field(default_factory=HostId.here)
    versions: dict[str, str] = field(default_factory=installed_versions)
    gpus: Sequence[str] = field(default_factory=lambda: gpus_of_host(os.environ))

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
                async with self.connection() as client:
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
    async def connection(self) -> AsyncIterator[Client]:
        """Connects to the controller, under a name of its own."""
        try:
            address = await self.resolve(self.address)
        except ConfigError as error:
            raise PeerLost(str(error)) from error
        hello = joining_hello(self.service, secrets.token_hex(8))
        client = Client(self.wire.connect(address), hello, f"the run at {self.address}", heartbeat=HEARTBEAT)
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
    places: dict[str, str] = field(default_factory=dict)

    @property
    def agent(self) -> str:
        return self.client.hello.instance

    async def follow_orders(self) -> None:
        """Returns when the controller has this host leave."""
        settings, host = self.settings, self.settings.host
        identity = (host.machine, host.memory, host.name)
        request = JoinRequest(
            *(settings.service, self.agent, *identity, settings.versions, settings.proof), list(settings.gpus)
        )
        orders = self.client.stream("join", (request,), ORDER_DEADLINE)
        async with aclosing(cast(Any, orders)):
            async for order in orders:
                await self._obey(order)

    async def _obey(self, order: JoinOrder) -> None:
        match order.kind:
            case "fetch":
                self.tasks.create_task(self._fetch(), name="files of the controller")
            case "start":
                await self._start(WorkerSpec.from_json(json.dumps(relocated(json.loads(order.text), self.places))))
            case "stop" | "terminate" | "kill" as way:
                if self.worker is not None and self.worker.spec.instance == order.instance:
                    getattr(self.worker, way)()
            case "leave":
                self.settings.say(f"the run at {self.settings.address} has ended")
            case "wait":
                pass
            case _:
                raise WireError(f"an order to {order.kind!r}")

    async def _fetch(self) -> None:
        """Finds or copies the files that the worker reads, beside the orders, which go on."""
        settings, name = self.settings, self.settings.host.name
        try:
            async with settings.connection() as client:
                self.places = await self._bring(client)
        except (ConfigError, WireError) as problem:
            await self._report("missing", f"host {name} cannot run {settings.service} workers: {problem}")
            raise
        settings.say(f"joined the run at {settings.address}; waiting for a worker to start")
        await self._report("ready")

    async def _bring(self, client: Client) -> dict[str, str]:
        for _ in range(LISTS):
            trees = await client.call("trees", (self.agent,), LIST_DEADLINE)
            try:
                return await self.settings.files.bring(
                    trees, lambda digest, at: client.call("part", (self.agent, digest, at), PART_DEADLINE)
                )
            except Refused as changed:
                self.settings.say(f"{changed}; asking for the list again")
        raise ConfigError(f"files changed at the controller while they were copied, {LISTS} times")

    async def _start(self, spec: WorkerSpec) -> None:
        spec = replace(spec, facts=replace(spec.facts, secret_paths=self.settings.secret_paths))
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

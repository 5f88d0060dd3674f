"""The end of joining on a host: offers to run a worker of one service, and does what the controller orders.

join ──> copy missing files ──> ready ──> start a worker ──> its end ──> ready for another one
                                             └── connection broken: the worker goes on, and the host joins again
join with a worker ──> "keep", from the controller that has it: it goes on
                   └── "fetch", from another one: it is ended, and the host is as new
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
from asyncrl.config.placement import ONE_REPLICA
from asyncrl.errors import ConfigError, DeadlineExceeded, FleetFailed, PeerLost, Refused, WireError
from asyncrl.fleet.launching.joining import (
    HEARTBEAT,
    LONGEST_DRAIN,
    ORDER_DEADLINE,
    installed_versions,
    joining_hello,
)
from asyncrl.fleet.launching.launcher import LaunchedWorker, Launcher, end_worker
from asyncrl.fleet.worker.worker_spec import WorkerSpec
from asyncrl.lanes.control.auth import KEY_REFUSED
from asyncrl.lanes.control.client import Client
from asyncrl.lanes.control.wire import Wakeup, Wire
from asyncrl.lanes.data.file_cache import FileCache, NoRoom, relocated
from asyncrl.lanes.host_id import HostId, gpus_of_host
from asyncrl.protocols.messages import JoinOrder, JoinRequest

CALL_DEADLINE = 10.0
"""Seconds for the controller to take a report, which it does between two messages."""

REFUSALS = 3
"""Handshakes that fail before the key counts as wrong: one fails, too, when the controller just ends."""

LIST_DEADLINE = 600.0
"""Seconds for the controller to compute the digests of a model, at a few hundred MB/s."""

PART_DEADLINE = 60.0
"""Seconds for one part of a file, of which a few are under way: over a link of 1 Mbit/s."""

BUSY = 5.0
"""Seconds between two reports that files are read or copied."""

LISTS = 3
"""Times that a host asks which files there are, because one changed while it was copied."""

ROOM = 1.0
"""Seconds between two looks whether a full disk has room again."""

RETRY = 0.5
"""Seconds between two tries to reach the controller."""

LONGEST_TRY = 60.0
"""Seconds that one try to reach the controller counts at most: a longer one means that this host stood still itself."""

DRAIN_MARGIN = 2.0
"""Seconds after the time in which a worker drains that its controller may take to end it."""


class _Left(Exception):
    """Leaves the connection, because this host was asked to."""


async def _as_it_is(address: str) -> str:
    return address


@dataclass(eq=False)
class JoiningHost:
    """Offers one worker at a time, which outlives a lost connection: until the controller that is reached next does not
    have it, or none is for `timeout` seconds.

    address: where the run listens. service: whose worker it runs. proof: of its key. launcher: starts workers here.
    stop: set when this host is to leave. files: of controllers, on this host. timeout: seconds without a controller,
    from the loss of the last one, after which it gives up. last_order: to leave. given_up_for: why the controller ends
    the worker. say: takes what a person should read. resolve: returns the
    address with the number of its host, which may be another one at each try; raises ConfigError while there is none.
    drain: seconds in which its worker may finish what it has when this host is to leave. secret_paths: of this host,
    such as that of its key, which no code of the user sees.
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
    worker: LaunchedWorker | None = field(default=None, init=False)
    worker_ended: Wakeup = field(default_factory=Wakeup, init=False)
    places: dict[str, str] = field(default_factory=dict, init=False)
    last_order: JoinOrder | None = field(default=None, init=False)
    given_up_for: str = field(default="", init=False)
    _joined: "_JoinedHost | None" = field(default=None, init=False)
    _watch: asyncio.Task[None] | None = field(default=None, init=False)

    async def serve(self) -> None:
        """Runs workers until the run ends or `stop` is set; joins again when the connection broke.

        Raises:
            ConfigError: the controller refuses this host, or a path is missing here.
            FleetFailed: no controller was reached for `timeout` seconds.
        """
        try:
            await self._join_again_and_again()
        finally:
            await self.end_worker()

    async def _join_again_and_again(self) -> None:
        loop = asyncio.get_running_loop()
        lost_at = loop.time()
        why = ""
        refusals = 0
        while not self.stop.is_set():
            tried = loop.time()
            reached = False
            try:
                async with self.connection() as client:
                    reached = True
                    await self._follow_orders(client)
                    return self._take_leave()
            except Refused as refused:
                advice = ". Install the same asyncrl on both hosts" if "another protocol" in str(refused) else ""
                raise ConfigError(f"{self.address} refuses this host: {refused}{advice}") from refused
            except (PeerLost, DeadlineExceeded) as lost:
                if self.last_order is not None:
                    return self._take_leave()
                now = loop.time()
                lost_at = now if reached else lost_at + max(0.0, now - tried - LONGEST_TRY)
                if reached or why != str(lost):
                    goes_on = f", and {self.worker.spec.instance} goes on meanwhile" if self.worker else ""
                    self.say(f"cannot reach the run at {self.address}: {lost}; trying for {self.timeout:g} s{goes_on}")
                why = str(lost)
                # In a row: one of a controller that just ends says nothing about the next one.
                refusals = refusals + 1 if KEY_REFUSED in why and not reached else 0
            if refusals == REFUSALS:
                raise ConfigError(
                    f"{self.address} does not accept the key of this host: name the key that the run under its "
                    f"join_keys, or `asyncrl admit DIR {self.service}`, wrote for this controller"
                )
            if loop.time() - lost_at > self.timeout:
                raise FleetFailed(
                    f"no run was reached at {self.address} for {self.timeout:g} s ({why}). Start one with "
                    f"`asyncrl run NAME --listen {self.address}`, look whether a firewall is between, or whether "
                    "the key is of that run"
                )
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY):
                    await self.stop.wait()

    def _take_leave(self) -> None:
        """Ends with the last order of the controller, if it gave one. Raises ConfigError for what is to be mended."""
        if self.last_order is not None and self.last_order.text:
            raise ConfigError(self.last_order.text)
        if self.last_order is not None:
            self.say(f"the run at {self.address} has ended")

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
                joined = self._joined = _JoinedHost(self, client, tasks)
                leaving = tasks.create_task(joined.leave_when_asked(), name="wish to leave")
                try:
                    await joined.follow_orders()
                finally:
                    leaving.cancel()
                    if self.stop.is_set():
                        await self.end_worker()
                    self._joined = None

    async def start(self, spec: WorkerSpec) -> None:
        """Starts a worker here, and watches it, whether the controller is reached or not."""
        spec = replace(spec, facts=replace(spec.facts, secret_paths=self.secret_paths))
        self.worker = await self.launcher.spawn(spec)
        self._watch = asyncio.create_task(self._await_end(self.worker), name=f"end of {spec.instance}")
        self.say(f"runs {spec.instance}")

    async def _await_end(self, worker: LaunchedWorker) -> None:
        reason = await worker.wait()
        self.launcher.clean_up(worker.spec)
        self.worker = None
        why = f", because the controller gave it up: {self.given_up_for}" if self.given_up_for else ""
        self.given_up_for = ""
        self.say(f"{worker.spec.instance} {reason}{why}")
        if self._joined is not None:
            with suppress(PeerLost, DeadlineExceeded, Refused):  # Whoever reads the orders finds out.
                await self._joined.report("ended", worker.spec.instance, reason)
        self.worker_ended.wake()

    async def end_worker(self) -> None:
        """Ends the worker that still runs; its end is waited for."""
        if self.worker is not None:
            await end_worker(self.worker)
        if self._watch is not None:
            if self.worker is not None:  # It survived even SIGKILL.
                self._watch.cancel()
            await asyncio.wait([self._watch])


@dataclass(eq=False)
class _JoinedHost:
    """One connection of a host to the controller."""

    settings: JoiningHost
    client: Client
    tasks: asyncio.TaskGroup

    @property
    def agent(self) -> str:
        return self.client.hello.instance

    async def follow_orders(self) -> None:
        """Carries out orders until the controller has this host leave."""
        settings = self.settings
        host = self.settings.host
        identity = (host.machine, host.memory, host.name)
        request = JoinRequest(
            *(settings.service, self.agent, *identity, settings.versions, settings.proof),
            list(settings.gpus),
            runs=settings.worker.spec.instance if settings.worker is not None else "",
        )
        todo: asyncio.Queue[JoinOrder] = asyncio.Queue()  # What a connection has delivered when it breaks is lost.
        self.tasks.create_task(self._read(request, todo), name="orders of the controller")
        while True:
            await self._obey(await todo.get())

    async def _read(self, request: JoinRequest, todo: "asyncio.Queue[JoinOrder]") -> None:
        """Takes orders at once, while earlier ones are carried out; one to leave ends whatever goes on."""
        orders = self.client.stream("join", (request,), ORDER_DEADLINE)
        async with aclosing(cast(Any, orders)):
            async for order in orders:
                if order.kind == "leave":
                    self.settings.last_order = order
                    raise _Left
                if order.kind != "wait":
                    todo.put_nowait(order)

    async def _obey(self, order: JoinOrder) -> None:
        match order.kind:
            case "fetch":
                self.tasks.create_task(self._fetch(), name="files of the controller")
            case "keep":
                self.settings.say(f"joined the run at {self.settings.address} again, with {order.instance}")
                await self._report_start()
            case "start":
                spec = WorkerSpec.from_json(json.dumps(relocated(json.loads(order.text), self.settings.places)))
                await self.settings.start(spec)
                await self._report_start()
            case "stop" | "terminate" | "kill" as way:
                worker = self.settings.worker
                if worker is not None and worker.spec.instance == order.instance:
                    self.settings.given_up_for = order.text
                    getattr(worker, way)()
            case _:
                raise WireError(f"an order to {order.kind!r}")

    async def _fetch(self) -> None:
        """Finds or copies the files that the worker reads, beside the orders, which go on. The worker of a run that is
        over has to make room."""
        settings = self.settings
        name = self.settings.host.name
        await settings.end_worker()
        telling = asyncio.create_task(self._tell_of_progress(), name="progress with files")
        try:
            async with settings.connection() as client:
                settings.places = await self._bring_when_there_is_room(client)
        except (ConfigError, WireError) as problem:
            await self.report("missing", f"host {name} cannot run {settings.service} workers: {problem}")
            raise
        finally:
            telling.cancel()
        settings.say(f"joined the run at {settings.address}; waiting for a worker to start")
        await self.report("ready")

    async def _tell_of_progress(self) -> None:
        """Lets the controller, whose wait for this host has a deadline, know that files are read or copied."""
        told = self.settings.files.progress
        while True:
            await asyncio.sleep(BUSY)
            if (progress := self.settings.files.progress) != told:
                told = progress
                with suppress(PeerLost, DeadlineExceeded, Refused):
                    await self.report("busy")

    async def _bring_when_there_is_room(self, client: Client) -> dict[str, str]:
        """Tries again while the disk is full, which others may fill for a while, as long as it would for a run. Raises
        NoRoom after that."""
        loop = asyncio.get_running_loop()
        seconds = self.settings.timeout
        told = ""
        began = loop.time()
        while True:
            try:
                return await self._bring(client)
            except NoRoom as full:
                if loop.time() - began > seconds:
                    raise
                if not told:
                    self.settings.say(told := f"{full}; trying for {seconds:g} s")
            await asyncio.sleep(ROOM)

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

    async def _report_start(self) -> None:
        if (worker := self.settings.worker) is not None:
            addresses = worker.spec.addresses
            await self.report("started", addresses.control, addresses.work, addresses.data, dict(worker.labels))

    async def leave_when_asked(self) -> None:
        """Ends the worker once this host is to leave: the controller does, when the worker has finished what it has."""
        settings = self.settings
        await settings.stop.wait()
        limit = settings.drain + DRAIN_MARGIN
        if settings.worker is not None:
            what = f"{settings.worker.spec.instance} finishes what it has, within {settings.drain:g} s"
            if settings.worker.spec.service in ONE_REPLICA:
                limit = LONGEST_DRAIN
                what = f"the run ends, with a checkpoint of {settings.worker.spec.instance}"
            settings.say(f"leaving: {what}; a second signal does not wait")
        with suppress(PeerLost, DeadlineExceeded, Refused, TimeoutError):
            async with asyncio.timeout(limit):
                await self.report("leaving", settings.drain)
                while settings.worker is not None:
                    await settings.worker_ended.wait()
        await settings.end_worker()
        raise _Left

    async def report(self, what: str, *args: Any) -> None:
        await self.client.call(what, (self.agent, *args), CALL_DEADLINE)

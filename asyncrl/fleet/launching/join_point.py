"""The controller's end of joining: hosts offer to run workers, which the supervisor starts and ends like any others.

    host                                        JoinPoint                          Supervisor
    join(JoinRequest) ───────────────────────>  role, key, versions fit
    order "fetch" <───────────────────────────
    trees, part, part, ... ──────────────────>  files that the host does not see, on a connection of their own
    busy, busy, ... ─────────────────────────>  the host still reads or copies them
    ready, or missing(text) ─────────────────>  the offer waits ────────────────>  spawn(spec) takes it
    orders "start", "stop", "kill" <──────────  JoinedWorker  <─────────────────   stop, kill
    started(addresses) ──────────────────────>  JoinedWorker.spec ──────────────>  connects to the worker itself
    leaving(seconds) ────────────────────────>  retire ─────────────────────────>  drains the worker, then stop
    ended(reason), or silence ───────────────>  JoinedWorker.wait returns
    join(JoinRequest with a worker) ─────────>  the worker of the offer that was lost
    orders "keep", or "fetch" of a new run <──
    watch ───────────────────────────────────>  RunWatch, for people who look on
    probe, clock, upload, download ──────────>  ProbePoint, for hosts that have not joined

A host whose worker ended offers to run another one. A host that comes while all places are taken waits as a spare.
"""

import asyncio
import re
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import KW_ONLY, astuple, dataclass, field, replace
from math import inf
from typing import Any

import zmq

from asyncrl.concurrency import STANDSTILL, running_beside, running_timeout
from asyncrl.config.install_hints import program
from asyncrl.config.sections.device_pools import CPU, Device, DevicePool, Host
from asyncrl.errors import ConfigError, FleetFailed, PeerLost, Refused
from asyncrl.fleet.launching.joining import (
    HEARTBEAT,
    LONGEST_DRAIN,
    PART_BYTES,
    PROBE_BYTES,
    SIGN_OF_LIFE,
    START_TRIES,
    TURN,
    HostState,
    installed_versions,
    joining_hello,
    version_problem,
)
from asyncrl.fleet.worker.worker_spec import Addresses, WorkerSpec
from asyncrl.lanes.control.server import Server
from asyncrl.lanes.control.wire import Listener, Wakeup, Wire
from asyncrl.lanes.data.file_cache import FileServer
from asyncrl.lanes.host_id import FaultDomain, HostId
from asyncrl.protocols.messages import Call, FilePart, FileTree, JoinOrder, JoinRequest, ProbeAnswer
from asyncrl.protocols.rank_layout import crossings, hosts_of_ranks

# ---- a host that joined, and the worker that runs there ------------------------------------------------------------


MAX_ORDERS = 64
"""Orders that wait for a host: one start and three ways to end it for each worker, so sixteen workers of a host that
does not read, which its heartbeats find out long before."""


Site = tuple[str, str]
"""A host among those of a run: its machine, so that hosts of one machine are neighbours, and its name."""


class JoinedWorker:
    """A worker on a host that joined. offer: the newest one of its host. asked: the last order to end it, which a host
    that comes back gets again. why: the controller gave it up."""

    def __init__(self, spec: WorkerSpec, offer: "Offer") -> None:
        self.spec = spec
        self.host = offer.host
        self.labels: Mapping[str, int | str] = {}
        self.offer = offer
        self.asked = ""
        self.why = ""
        self.host_is_gone = False
        self.started = asyncio.Event()
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def has_left(self) -> bool:
        return self.offer.is_leaving or self.offer.is_revoked

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    def give_up(self, why: str, *, has_run: bool) -> None:
        """Takes why the controller gives it up, which its host is told. has_run: whether it had taken calls; else its
        host may be unable to run one."""
        self.why = why
        self.offer.failed_starts = 0 if has_run else self.offer.failed_starts + 1

    def end(self, reason: str, *, host_is_gone: bool = False) -> None:
        """Takes how the worker ended, once: its host reports it, and may be lost after that."""
        if not self._ended.done():
            self.host_is_gone = host_is_gone
            self._ended.set_result(reason)
            self.started.set()

    async def wait(self) -> str:
        return await asyncio.shield(self._ended)

    def stop(self) -> None:
        self._order("stop")

    def terminate(self) -> None:
        self._order("terminate")

    def kill(self) -> None:
        self._order("kill")

    def _order(self, kind: str) -> None:
        self.asked = kind
        if self.offer.is_away:
            # No order reaches it.
            self.end(f"its host {self.host.name} is gone: its connection broke", host_is_gone=True)
        elif not self._ended.done():
            self.offer.order(JoinOrder(kind, self.spec.instance, self.why))


class Offer:
    """A host that offers to run one worker of a service at a time. is_ready: it has all that such a worker reads.
    is_leaving: it was asked to leave, and takes no other worker. is_revoked: its key is admitted no more. is_away: its
    connection is lost. ended: its workers that ended. failed_starts: of workers that took no call, in a row. copied:
    bytes of files. lists_files: their digests are computed for it. devices: of its worker, in a pool of GPUs."""

    def __init__(self, request: JoinRequest) -> None:
        self.service = request.service
        self.proof = request.proof
        self.host = HostId(request.machine, request.memory, request.host)
        self.devices: tuple[str, ...] = ()
        self.worker: JoinedWorker | None = None
        self.is_ready = False
        self.is_leaving = False
        self.is_revoked = False
        self.is_away = False
        self.ended = 0
        self.failed_starts = 0
        self.copied = 0
        self.lists_files = False
        self.orders: asyncio.Queue[JoinOrder] = asyncio.Queue(MAX_ORDERS)

    @property
    def site(self) -> Site:
        return self.host.machine, self.host.name

    @property
    def is_free(self) -> bool:
        return self.is_ready and not self.is_leaving and self.worker is None

    def runs_rank_of(self, spec: WorkerSpec) -> bool:
        """Returns whether it runs another rank of the replica that a worker belongs to."""
        mine = self.worker.spec if self.worker is not None else None
        return mine is not None and (mine.service, mine.replica) == (spec.service, spec.replica)

    @property
    def state(self) -> HostState:
        if self.worker is not None and self.worker.started.is_set():
            return HostState.WORKS
        return HostState.WAITS if self.is_free else HostState.STARTS

    def order(self, order: JoinOrder) -> None:
        with suppress(asyncio.QueueFull):  # The host does not read, and is lost soon.
            self.orders.put_nowait(order)

    def may_follow(self, former: "Offer", instance: str) -> bool:
        """Returns whether this is the host of an earlier offer, which comes back with the worker that runs there."""
        worker = former.worker
        same = (former.service, former.proof, former.host) == (self.service, self.proof, self.host)
        return same and worker is not None and not worker.has_ended and worker.spec.instance == instance

    def take_over(self, former: "Offer") -> None:
        """Goes on with the worker of an earlier offer of this host."""
        assert former.worker is not None, "`may_follow` was asked"
        self.worker = former.worker
        self.worker.offer = self
        former.worker = None
        self.devices = former.devices
        self.is_ready = True
        if self.worker.asked:
            self.order(JoinOrder(self.worker.asked, self.worker.spec.instance, self.worker.why))

    def start(self, spec: WorkerSpec, devices: tuple[str, ...]) -> JoinedWorker:
        self.devices = devices
        spec = replace(spec, devices=devices)
        self.worker = JoinedWorker(spec, self)
        self.order(JoinOrder("start", spec.instance, spec.to_json()))
        return self.worker


# ---- places for workers, and why a host may not take one -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Places:
    """The workers of one service that join. needed: places that have to be taken before the run begins, and of which
    one has to be taken again when all are lost. packages: whose versions have to agree. command: starts one. pool:
    whose hosts may join, with its devices; None: any host may that has the device. planned: the host of each replica,
    where the pool names some."""

    needed: int
    packages: Collection[str]
    command: str
    pool: DevicePool | None = None
    device: Device = CPU
    planned: Sequence[str] = ()

    def planned_host(self, replica: int) -> str:
        return self.planned[replica] if replica < len(self.planned) else ""

    def order(self, site: tuple[str, str]) -> tuple[int, tuple[str, str]]:
        """Returns by what hosts are ordered before ranks lie on them: as their pool names them, whoever came first.
        site: machine and name."""
        hosts = self.pool.hosts if self.pool is not None else ()
        return hosts.index(site[1]) if site[1] in hosts else len(hosts), site

    def objection(self, service: str, host: Host) -> str:
        """Returns why a host may not run these workers, and what to do; "" if it may."""
        if (pool := self.pool) is None:
            return self._missing_device(service, host)
        if pool.hosts and host.name not in pool.hosts:
            listed = ", ".join(pool.hosts)
            return (
                f"{service} workers run in pool {pool.name!r}, whose hosts are {listed}, and this is {host.name}: add "
                f"it to the hosts of pools.{pool.name}, or join from one of them"
            )
        if lacking := host.lacks(pool.devices):
            found = ", ".join(host.gpus) or "no GPU"
            return (
                f"{service} workers run in pool {pool.name!r}, whose hosts have {', '.join(pool.devices)}; host "
                f"{host.name} has {found}, and lacks {', '.join(lacking)}: take a host that has them, or change "
                f"pools.{pool.name}"
            )
        return ""

    def _missing_device(self, service: str, host: Host) -> str:
        number = Device("cuda:0") if self.device == "cuda" else self.device
        if not host.lacks([number]):
            return ""
        found = ", ".join(host.gpus) or "no GPU"
        return (
            f"{service} workers compute on {self.device}, and host {host.name} has {found}: take a host that has it, "
            "or change their device in the experiment file"
        )


# ---- probes, by which `asyncrl doctor --join` looks at the connection before a host joins --------------------------
#
#     host                                  ProbePoint
#     probe(JoinRequest) ────────────────>  one turn every TURN seconds: what joining would be refused for, and a ticket
#     clock() ───────────────────────────>  seconds on the controller's clock
#     upload(ticket, data) ──────────────>  counted, up to PROBE_BYTES a turn
#     download(ticket, count) ───────────>  as many bytes, up to PROBE_BYTES a turn
#
# The bounds hold for all hosts together: whoever has a key takes no more of the controller's network than they allow.


@dataclass
class ProbePoint:
    """Answers probes. objection: returns why a host may not join, "" if it may. packages_of: returns the packages whose
    versions have to agree for workers of a service. now: returns Unix time in seconds."""

    objection: Callable[[JoinRequest], str]
    packages_of: Callable[[str], Collection[str]]
    versions: Mapping[str, str]
    now: Callable[[], float] = time.time
    _ticket: str = ""
    _next_turn: float = 0.0
    _left: dict[str, int] = field(default_factory=dict)
    _payload: bytes = b""

    def dispatch(self, call: Call) -> Awaitable[Any]:
        """Runs a call of a probe. Raises Refused."""
        match call.method, call.args:
            case "probe", (JoinRequest() as request,):
                return self._begin(request)
            case "clock", ():
                return self._clock()
            case "upload", (str(ticket), bytes(data)):
                return self._take(ticket, data)
            case "download", (str(ticket), int(count)):
                return self._give(ticket, count)
        raise Refused(f"a probe has no part {call.method!r} like this")

    async def _begin(self, request: JoinRequest) -> ProbeAnswer:
        loop_time = asyncio.get_running_loop().time()
        if loop_time < self._next_turn:
            raise Refused(f"another probe runs; the next one may begin in {self._next_turn - loop_time:.1f} s")
        self._next_turn = loop_time + TURN
        self._ticket = secrets.token_hex(8)
        self._left = {"upload": PROBE_BYTES, "download": PROBE_BYTES}
        packages = list(self.packages_of(request.service))
        return ProbeAnswer(self.objection(request), dict(self.versions), packages, self._ticket)

    async def _clock(self) -> float:
        return self.now()

    async def _take(self, ticket: str, data: bytes) -> int:
        self._count("upload", ticket, len(data))
        return len(data)

    async def _give(self, ticket: str, count: int) -> bytes:
        self._count("download", ticket, count)
        self._payload = self._payload or secrets.token_bytes(PART_BYTES)  # Nothing on the way can compress it.
        return self._payload[:count]

    def _count(self, way: str, ticket: str, count: int) -> None:
        """Takes the bytes of one part from what is left of the turn."""
        if not self._ticket or ticket != self._ticket:
            raise Refused("another probe has begun since")
        if not 0 < count <= PART_BYTES:
            raise Refused(f"a part of a probe has 1 to {PART_BYTES} bytes, not {count}")
        if count > self._left[way]:
            raise Refused(f"a probe may move {PROBE_BYTES} bytes each way")
        self._left[way] -= count


# ---- the point where hosts join ------------------------------------------------------------------------------------


START_DEADLINE = 60.0
"""Seconds until a host has started the process of a worker; loading a model comes later."""

WORKER_ADDRESS = re.compile(r"tcp://(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):\d{1,5}|inproc://[\w.-]+")
"""Addresses to which the controller connects; a host may name none of another kind."""

ABSENCE = 4.0
"""Seconds in which a host whose connection was lost may come back with its worker: it tries again every half second.
A controller that stood still itself finds all its hosts in this state."""

FAREWELL = 2.0
"""Seconds for the order to leave to reach all hosts at the end of a run."""

LONGEST_NAME = 64
"""Characters of the name of a host, at most, on Linux."""


@dataclass(eq=False)
class JoinPoint:
    """Launches workers on hosts that join. Use `open_join_point`.

    address: where hosts join. places: by service. role_of: returns the role of a key from its proof, "" for one that is
    not admitted. deadline: seconds until the needed places of a service are taken. report: takes what a person should
    read. files: which hosts may read. watch: returns the state of the run for a proof. retire: drains an instance for
    so many seconds, and returns whether it runs.

    An offer runs at most one worker. Hosts reach it through `dispatch`, the supervisor through `spawn` and `clean_up`.
    """

    address: str
    places: Mapping[str, Places]
    role_of: Callable[[str], str]
    _: KW_ONLY
    deadline: float
    report: Callable[[str], None]
    versions: Mapping[str, str] = field(default_factory=installed_versions)
    files: FileServer = field(default_factory=lambda: FileServer({}))
    watch: Callable[[str], Awaitable[Any]] | None = None
    retire: Callable[[str, float], bool] = lambda instance, seconds: False

    def __post_init__(self) -> None:
        self._offers: dict[str, Offer] = {}
        self._away: list[Offer] = []
        self._waiting: dict[str, WorkerSpec] = {}
        self._complete: set[str] = set()
        self._progress: dict[FaultDomain, float] = {}
        self._copied: dict[tuple[FaultDomain, str], int] = {}
        self._hosts_of_ranks: dict[tuple[str, int], list[Site]] = {}
        self._changed = Wakeup()
        self._probes = ProbePoint(self._objection, self._packages_of, self.versions)

    # ---- for the supervisor

    async def spawn(self, spec: WorkerSpec) -> JoinedWorker:
        """Starts the worker on a host that offers it; waits for one. Raises FleetFailed when a needed place of the
        service was not taken in time, and PeerLost when the host did not start it: it may do so later, so that no other
        host may start this instance."""
        offer = await self._free_offer(spec)
        worker = offer.start(spec, self._free_devices(offer)[:1])
        self._say_what_crosses(spec)
        try:
            with suppress(TimeoutError):
                async with running_timeout(START_DEADLINE):
                    await worker.started.wait()
        except asyncio.CancelledError:
            worker.kill()
            raise
        if worker.started.is_set() and not worker.has_ended:
            self._note_complete(spec.service)
            return worker
        why = (await worker.wait()) if worker.has_ended else f"nothing came within {START_DEADLINE:g} s"
        self._dismiss(worker.offer, problem := f"{worker.host.name} did not start {spec.instance}: {why}")
        raise PeerLost(problem)

    def _dismiss(self, offer: Offer, why: str) -> None:
        """Has a host leave that cannot run a worker; it may join again, once a person has mended that."""
        offer.is_leaving = True
        offer.order(JoinOrder("leave", text=why))
        self.report(why)

    def clean_up(self, spec: WorkerSpec) -> None:
        """The host that ran the worker removes what it left, or is gone with it."""

    @property
    def _known(self) -> list[Offer]:
        """Returns all offers, those among them whose host may come back at any moment."""
        return [*self._offers.values(), *self._away]

    async def _free_offer(self, spec: WorkerSpec) -> Offer:
        loop = asyncio.get_running_loop()
        self._waiting[spec.instance] = spec
        since = loop.time()
        try:
            while (offer := self._offer_for(spec)) is None:
                since = max(since, self._progressed_at(spec.service))
                if (late := loop.time() - since - self.deadline) > STANDSTILL:
                    since += late  # This process stood still itself.
                elif late >= 0:
                    self._refuse_to_wait(spec)
                    since = loop.time()
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(since + self.deadline):
                        await self._changed.wait()
            return offer
        finally:
            del self._waiting[spec.instance]
            self._changed.wake()

    def _progressed_at(self, service: str) -> float:
        """Returns the time of the last sign of progress on a host that offers these workers: one of another service may
        copy files for them there."""
        hosts = {each.host.fault_domain for each in self._offers.values() if each.service == service}
        if any(each.lists_files and each.host.fault_domain in hosts for each in self._offers.values()):
            return asyncio.get_running_loop().time()
        return max((self._progress[host] for host in hosts), default=-inf)

    def _note_progress(self, offer: Offer) -> None:
        self._progress[offer.host.fault_domain] = asyncio.get_running_loop().time()

    def _offer_for(self, spec: WorkerSpec) -> Offer | None:
        """Returns a free offer, unless a place with a smaller number waits for one: the first ones are needed. Ranks of
        a replica start together, because they wait for each other; consecutive ones share a host."""
        rivals = (other for other in self._waiting.values() if other.service == spec.service)
        if any(other.replica < spec.replica for other in rivals):
            return None
        place = self.places[spec.service]
        fitting = self._fitting(spec.service)
        running = self._ranks_of(spec)
        if not fitting or len(fitting) + len(running) < spec.layout.size:
            return None
        if spec.layout.size == 1:
            # A host at which a worker ended may be unable to run one: a spare comes before it.
            return min(fitting, key=lambda each: (each.ended, each.host.name != place.planned_host(spec.replica)))
        hosts = self._hosts_of_ranks.get((spec.service, spec.replica), [])
        is_as_chosen = bool(running) and all(hosts[rank] == site for rank, site in running.items())
        if not is_as_chosen or hosts[spec.rank] not in {each.site for each in fitting}:
            room = Counter(each.site for each in sorted(fitting, key=lambda each: place.order(each.site)))
            hosts = hosts_of_ranks(spec.layout, room, running)
            self._hosts_of_ranks[spec.service, spec.replica] = hosts
        return next(each for each in fitting if each.site == hosts[spec.rank])

    def _fitting(self, service: str) -> list[Offer]:
        """Returns the free offers that workers of the service can take together: in a pool of GPUs, as many of a
        machine as it has GPUs that none of them has."""
        offers = [each for each in self._offers.values() if each.service == service and each.is_free]
        pool = self.places[service].pool
        taken = Counter[str]()
        if pool is None or not pool.has_gpus:
            return offers
        found = []
        for each in offers:
            if taken[each.host.fault_domain] < len(self._free_devices(each)):
                taken[each.host.fault_domain] += 1
                found.append(each)
        return found

    def _ranks_of(self, spec: WorkerSpec) -> dict[int, Site]:
        """Returns where the other ranks of the replica of a worker are, as far as they have a host."""
        there = (each for each in self._known if each.runs_rank_of(spec))
        return {each.worker.spec.rank: each.site for each in there if each.worker is not None}

    def _say_what_crosses(self, spec: WorkerSpec) -> None:
        """Reports, once all ranks of a replica have a host, which of their groups lie on several ones."""
        if len(ranks := self._ranks_of(spec)) == spec.layout.size > 1:
            for line in crossings(spec.service, spec.layout, [ranks[rank][1] for rank in sorted(ranks)]):
                self.report(line)

    def _free_devices(self, offer: Offer) -> tuple[str, ...]:
        """Returns the GPUs of the host that no other worker of the service has, those with the fewest workers first."""
        pool = self.places[offer.service].pool
        if pool is None or not pool.has_gpus:
            return ()
        here = offer.host.fault_domain
        same = [each for each in self._known if each.worker and each.host.fault_domain == here]
        taken = {device for each in same if each.service == offer.service for device in each.devices}
        users = Counter(device for each in same for device in each.devices)
        return tuple(sorted((each for each in pool.devices if each not in taken), key=users.__getitem__))

    def _running(self, service: str) -> int:
        return sum(each.service == service and each.worker is not None for each in self._known)

    def _note_complete(self, service: str) -> None:
        if self._running(service) >= self.places[service].needed:
            self._complete.add(service)

    def _refuse_to_wait(self, spec: WorkerSpec) -> None:
        """Raises FleetFailed if the run cannot begin, or go on, without this worker."""
        place = self.places[spec.service]
        running = self._running(spec.service)
        if spec.replica >= place.needed or (running and spec.service in self._complete):
            return
        copying = [each for each in self._offers.values() if each.service == spec.service and not each.is_ready]
        stuck = ", ".join(f"{each.host.name} ({each.copied / 1e6:,.1f} MB copied)" for each in copying)
        raise FleetFailed(
            f"{place.needed - running} of {place.needed} {spec.service} workers have not joined at {self.address} "
            f"within {self.deadline:g} s. Start each with: {place.command}"
            + (f". Hosts that have joined, and whose files make no progress: {stuck}" if stuck else "")
        )

    # ---- for hosts

    def dispatch(self, call: Call) -> Awaitable[Any] | AsyncIterator[Any]:
        """Runs a call of a host."""
        match call.method, call.args:
            case "join", (JoinRequest() as request,):
                return self._orders(request)
            case "state", (JoinRequest() as request,):
                return self._state(request)
            case "ready", (str(agent),):
                return self._ready(self._offer(agent))
            case "trees", (str(agent),):
                return self._trees(self._offer(agent))
            case "part", (str(agent), str(digest), int(offset)):
                return self._part(self._offer(agent), digest, offset)
            case "busy", (str(agent),):
                return self._busy(self._offer(agent))
            case "missing", (str(agent), str(text)):
                return self._missing(self._offer(agent), text)
            case "started", (str(agent), str(control), str(work), str(data), dict(labels)):
                return self._started(self._offer(agent), Addresses(control, work, data), labels)
            case "ended", (str(agent), str(instance), str(reason)):
                return self._ended(self._offer(agent), instance, reason)
            case "leaving", (str(agent), float(seconds)):
                return self._leaving(self._offer(agent), seconds)
            case "watch", (str(proof),) if self.watch is not None:
                return self.watch(proof)
            case "probe" | "clock" | "upload" | "download", _:
                return self._probes.dispatch(call)
        raise Refused(f"{self.address} is where hosts join a run; it answers no {call.method!r} like this")

    def _offer(self, agent: str) -> Offer:
        if agent not in self._offers:  # It fell silent, and was given up: it joins again.
            raise PeerLost(f"{agent} is no host that joined, or no more")
        return self._offers[agent]

    async def _orders(self, request: JoinRequest) -> AsyncIterator[JoinOrder]:
        """Yields orders as long as the host is there."""
        versions = {name: _one_word(version) for name, version in request.versions.items()}
        host = _one_word(request.host)
        service = _one_word(request.service)
        request = replace(request, host=host, service=service, versions=versions)
        if problem := self._objection(request):
            self.report(f"{request.host} may not join as {request.service}: {problem}")
            raise Refused(problem)
        offer = self._offers[request.agent] = Offer(request)
        if offer.host.fault_domain not in self._progress:  # One that joins again and again makes none.
            self._note_progress(offer)
        try:
            yield JoinOrder("keep", request.runs) if self._take_over(request.runs, offer) else JoinOrder("fetch")
            order = JoinOrder("wait")
            while order.kind != "leave":
                order = JoinOrder("wait")
                with suppress(TimeoutError):
                    async with asyncio.timeout(SIGN_OF_LIFE):
                        order = await offer.orders.get()
                self._check_key(request, offer)
                yield order
        finally:
            self._lose(request.agent, offer)

    def _take_over(self, instance: str, offer: Offer) -> bool:
        """Lets a host that comes back go on with its worker; returns False if the worker is none of this run any more.
        The connection that it lost may still seem to live here."""
        for former in (*self._away, *self._offers.values()):
            if offer.may_follow(former, instance):
                offer.take_over(former)
                self.report(f"{offer.host.name} is back, with {instance}")
                return True
        return False

    def _check_key(self, request: JoinRequest, offer: Offer) -> None:
        """Raises Refused, which ends the host's worker, when its key was revoked after it joined."""
        if self.role_of(request.proof) != offer.service:
            offer.is_revoked = True
            self.report(f"the key of {offer.host.name} was revoked; its {offer.service} worker ends")
            raise Refused(f"the key of {offer.host.name} was revoked: make another one with `asyncrl admit`")

    async def _state(self, request: JoinRequest) -> str:
        """Returns the state of the host that asks, which need not have joined."""
        if problem := self._objection(request):
            raise Refused(problem)
        host = HostId(request.machine, request.memory)
        states = [each.state for each in self._offers.values() if each.service == request.service and each.host == host]
        return max(states, key=list(HostState).index, default=HostState.ABSENT).value

    def _objection(self, request: JoinRequest) -> str:
        """Returns why this host may not run workers of this service, and what to do; "" if it may."""
        if request.service not in self.places:
            joined = " and ".join(self.places)
            return f"no {request.service} workers join this run, and {joined} workers do (fleet.joined)"
        role = self.role_of(request.proof)
        if role != request.service:
            what = f"is of {role} workers" if role else "is not admitted, or no more"
            return f"the key of {request.host} {what}: give it a key of {request.service} workers (`asyncrl admit`)"
        if request.agent in self._offers:
            return f"{request.agent} has joined already"
        host = Host(request.host, tuple(map(Device, request.gpus)))
        if problem := self.places[request.service].objection(request.service, host):
            return problem
        return version_problem(
            self._packages_of(request.service), self.versions, request.versions, f"host {request.host}"
        )

    def _packages_of(self, service: str) -> Collection[str]:
        return self.places[service].packages if service in self.places else ()

    async def _trees(self, offer: Offer) -> list[FileTree]:
        offer.lists_files = True
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            return await self.files.trees(offer.service)
        finally:
            offer.lists_files = False
            if loop.time() > began + SIGN_OF_LIFE:  # Else they were known.
                self._note_progress(offer)

    async def _part(self, offer: Offer, digest: str, offset: int) -> FilePart:
        part = await self.files.part(offer.service, digest, offset)
        offer.copied += len(part.data)
        farthest = self._copied.get(file := (offer.host.fault_domain, digest), -1)
        if offset > farthest:  # One that asks for the same parts again and again makes no progress.
            self._copied[file] = offset
            self._note_progress(offer)
        return part

    async def _busy(self, offer: Offer) -> None:
        self._note_progress(offer)

    async def _ready(self, offer: Offer) -> None:
        offer.is_ready = True
        self._note_progress(offer)
        self.report(f"{offer.host.name} joined, for a {offer.service} worker")
        if not any(spec.service == offer.service for spec in self._waiting.values()):
            self.report(f"all {offer.service} workers are there: {offer.host.name} waits as a spare")
        self._changed.wake()

    async def _missing(self, offer: Offer, text: str) -> None:
        offer.is_leaving = True
        self.report(text)

    async def _started(self, offer: Offer, addresses: Addresses, labels: dict[str, Any]) -> None:
        if wrong := [each for each in astuple(addresses) if not WORKER_ADDRESS.fullmatch(each)]:
            raise Refused(f"{offer.host.name} names {wrong[0]!r:.100}, which is no address of a worker")
        if offer.worker is not None:
            offer.worker.spec = replace(offer.worker.spec, addresses=addresses)
            offer.worker.labels = {str(name): value for name, value in labels.items() if isinstance(value, int | str)}
            offer.worker.started.set()

    async def _ended(self, offer: Offer, instance: str, reason: str) -> None:
        if offer.worker is not None and offer.worker.spec.instance == instance:
            worker = offer.worker
            offer.worker = None
            worker.end(f"{reason} (on {offer.host.name})")
            offer.ended += 1
            if offer.failed_starts >= START_TRIES and not offer.is_leaving:
                self._dismiss(
                    offer,
                    f"{offer.host.name} gets no {offer.service} worker any more, because {START_TRIES} in a row could "
                    f"not start there: {worker.why}. Mend that on {offer.host.name}, and start `{program()} join "
                    f"{offer.service}` there again",
                )
            self._changed.wake()

    async def _leaving(self, offer: Offer, seconds: float) -> None:
        offer.is_leaving = True
        if not 0 <= seconds <= LONGEST_DRAIN:
            raise Refused(f"a worker drains for 0 to {LONGEST_DRAIN:g} s, not {seconds}")
        if (worker := offer.worker) is None:
            self.report(f"{offer.host.name} leaves; no worker runs there")
        elif self.retire(worker.spec.instance, seconds):
            self.report(f"{offer.host.name} leaves; {worker.spec.instance} finishes what it has, within {seconds:g} s")
        else:
            self.report(f"{offer.host.name} leaves before {worker.spec.instance} takes calls")
            worker.kill()  # It has nothing yet, and one that ignores a request to stop would be given work.

    def _lose(self, agent: str, offer: Offer) -> None:
        """Takes the loss of a connection. A worker that runs is given up a moment later, unless its host is back."""
        del self._offers[agent]
        offer.is_away = True
        if (worker := offer.worker) is not None and worker.started.is_set() and not worker.has_left:
            self._away.append(offer)
            asyncio.get_running_loop().call_later(ABSENCE, self._give_up, offer)
        else:
            self._give_up(offer)

    def _give_up(self, offer: Offer) -> None:
        if offer in self._away:
            self._away.remove(offer)
        if offer.worker is not None:
            how = "it left" if offer.is_leaving else "no sign of life comes from it any more"
            why = f"its host {offer.host.name} is gone: {'its key was revoked' if offer.is_revoked else how}"
            offer.worker.end(why, host_is_gone=True)
            offer.worker = None
        self._changed.wake()

    async def dismiss(self) -> None:
        """Has all hosts leave, because the run has ended."""
        for offer in self._offers.values():
            offer.order(JoinOrder("leave"))
        with suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL):
                while self._offers:
                    await self._changed.wait()


@asynccontextmanager
async def open_join_point(point: JoinPoint, wire: Wire) -> AsyncIterator[JoinPoint]:
    """Listens at the address of `point` until the block ends, and then has all hosts leave; after an error hosts wait
    for the run to be resumed. Raises ConfigError when it cannot listen there."""
    hello = joining_hello("controller", "join-point")
    server = Server(_listener(wire, point.address), point.dispatch, hello, heartbeat=HEARTBEAT)
    async with running_beside({"join point": server.serve()}):
        for service, place in point.places.items():
            point.report(f"{place.needed} {service} workers are to join at {point.address}; each by: {place.command}")
        yield point
        await point.dismiss()


def _listener(wire: Wire, address: str) -> Listener:
    try:
        return wire.listen(address)
    except (OSError, zmq.ZMQError) as error:
        advice = "another program listens there, or it is no address of this host; write another one in fleet.listen"
        raise ConfigError(f"cannot listen at {address} for workers that join: {error}. Perhaps {advice}") from error


def _one_word(name: str) -> str:
    """Returns what a stranger calls itself as it fits into a line: of one word, and no longer than names of hosts."""
    return "".join(each if each.isprintable() and not each.isspace() else "?" for each in name[:LONGEST_NAME])

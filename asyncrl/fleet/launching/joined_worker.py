"""A host that joined, from the controller's side: what it offers, and the worker that runs there."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from asyncrl.fleet.launching.joining import HostState
from asyncrl.fleet.worker.worker_spec import WorkerSpec
from asyncrl.lanes.host_id import HostId
from asyncrl.protocols.messages import JoinOrder, JoinRequest

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


def on_one_machine(one: Offer, other: Offer) -> bool:
    return one.host.fault_domain == other.host.fault_domain

"""The replicas of one service: which are alive, which has the fewest calls, and which hold rows of which samples.

No lookup takes longer with more replicas, except those that name all of them.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Hashable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Self, TypeVar

from asyncrl.errors import DeadlineExceeded, FleetFailed, PeerLost
from asyncrl.fleet.remote_worker import RemoteWorker
from asyncrl.lanes.control.wire import Wakeup
from asyncrl.lanes.host_id import FaultDomain
from asyncrl.protocols.batch import BatchRef, SampleName
from asyncrl.protocols.distribute_collect import THREE_D_ALL_MICRO_DP
from asyncrl.protocols.messages import PromptGroup
from asyncrl.protocols.rank_layout import Layout

# ---- holders of rows -----------------------------------------------------------------------------------------------


R = TypeVar("R", bound=Hashable)


@dataclass(slots=True)
class _Held(Generic[R]):
    """Members of one attempt at a group that a replica may hold. members: bit member + 1 of a number, for the greedy
    answer is member -1. newest: those of them that no other replica was called for later."""

    replica: R
    attempt: int
    members: int
    newest: int


class RowHolders(Generic[R]):
    """Holders by group; an entry lives until its samples are released, so samples in flight bound their number.

    The handle of the service (service_calls.py) notes calls here and asks where a release goes.
    """

    def __init__(self) -> None:
        self._held: dict[int, list[_Held[R]]] = {}

    def add(self, replica: R, argument: Any) -> None:
        """Notes that a call with this argument makes rows at a replica."""
        if isinstance(argument, PromptGroup):
            members = sum(_bit(member) for member in argument.members)
            self._add(replica, argument.id, argument.attempt, members)
        elif isinstance(argument, BatchRef):
            for row in argument:
                self._add(replica, row.group, row.attempt, _bit(row.member))

    def _add(self, replica: R, group: int, attempt: int, members: int) -> None:
        own = None
        for held in self._held.setdefault(group, []):
            if held.attempt == attempt:
                held.newest &= ~members
                if held.replica is replica:
                    own = held
        if own is None:
            own = _Held(replica, attempt, 0, 0)
            self._held[group].append(own)
        own.members |= members
        own.newest |= members

    def newest(self, samples: BatchRef | Iterable[SampleName]) -> R | None:
        """Returns the replica that was called last for the most of these samples; None when no replica was."""
        found: dict[R, int] = {}
        for group, member, attempt in _names(samples):
            for held in self._held.get(group, ()):
                if held.attempt == attempt and held.newest & _bit(member):
                    found[held.replica] = found.get(held.replica, 0) + 1
        return max(found, key=found.__getitem__, default=None)

    def holds(self, replica: R) -> bool:
        """Returns whether a replica may hold rows of any sample."""
        return any(held.replica is replica for group in self._held.values() for held in group)

    def split(self, samples: BatchRef | Iterable[SampleName]) -> dict[R, list[int]]:
        """Returns the indices of the samples of which each replica may hold a row of this or an earlier attempt."""
        found: dict[R, list[int]] = {}
        for index, (group, member, attempt) in enumerate(_names(samples)):
            for held in self._held.get(group, ()):
                if held.attempt <= attempt and held.members & _bit(member):
                    rows = found.setdefault(held.replica, [])
                    if not rows or rows[-1] != index:  # Two attempts may have run at one replica.
                        rows.append(index)
        return found

    def forget(self, replica: R, samples: BatchRef | Iterable[SampleName]) -> None:
        """Notes that a replica holds no row of these samples any more, in these attempts and earlier ones."""
        for group, member, attempt in _names(samples):
            left = []
            for held in self._held.get(group, ()):
                if held.replica is replica and held.attempt <= attempt:
                    held.members &= ~_bit(member)
                    held.newest &= held.members
                if held.members:
                    left.append(held)
            if left:
                self._held[group] = left
            else:
                self._held.pop(group, None)

    def clear(self) -> None:
        self._held.clear()

    def __len__(self) -> int:
        """Returns the number of groups of which some replica may hold rows."""
        return len(self._held)


def _names(samples: BatchRef | Iterable[SampleName]) -> Iterable[SampleName]:
    return (row.name for row in samples) if isinstance(samples, BatchRef) else samples


def _bit(member: int) -> int:
    return 1 << (member + 1)


KNOWN_INSTANCES = 2
"""Instances of a worker that are remembered: the last calls of a dead one end after its successor came."""


class Replica:
    """One copy of a service, with a worker for each rank of its layout. load: calls that chose this replica.
    is_draining: it takes no new work until its next instance comes, and is to end once it holds nothing. is_left_out:
    it takes no new work until it can get the weights, or its next instance comes. is_parked: no instance of it is to
    run. reserved_for: the isolated group that has it for itself, or will have. reservations, own_calls: calls of this
    group that want the replica, and those of them that run.
    """

    def __init__(self, workers: tuple[RemoteWorker, ...], ranking: "LoadRanking", changed: Wakeup) -> None:
        self.workers = workers
        self.load = 0
        self.is_draining = False
        self.is_left_out = False
        self.is_parked = False
        self.reserved_for: int | None = None
        self.reservations = 0
        self.own_calls = 0
        self._ranking = ranking
        self._changed = changed

    @property
    def free(self) -> bool:
        """Returns whether any call may choose it."""
        return self.reserved_for is None and not (self.is_draining or self.is_left_out) and self.alive

    @property
    def takes_what_goes_on(self) -> bool:
        """Returns whether it takes the next call about samples that it holds."""
        return self.reserved_for is None and not self.is_left_out and self.alive

    @property
    def fault_domains(self) -> set[FaultDomain]:
        return {worker.host.fault_domain for worker in self.workers}

    @property
    def alive(self) -> bool:
        return all([worker.alive for worker in self.workers])

    @property
    def has_raised(self) -> bool:
        """Returns whether an earlier instance raised what this one has not made good."""
        return any(worker.raised is not None for worker in self.workers)

    def __enter__(self) -> None:
        """Counts a call in `load` as soon as it chose this replica, because others choose before it is sent."""
        self._ranking.change_load(self, +1)

    def __exit__(self, *_: object) -> None:
        self._ranking.change_load(self, -1)
        if self.reserved_for is not None:
            self._changed.wake()


class LoadRanking:
    """Replicas by their load. One that is found dead or reserved is left out until it is added again."""

    def __init__(self) -> None:
        self._by_load: dict[int, OrderedDict[Replica, None]] = {}
        self._least = 0

    def add(self, replica: Replica) -> None:
        """Adds a replica, or leaves it where it is."""
        ranked = self._by_load.setdefault(replica.load, OrderedDict())
        ranked.setdefault(replica)
        self._least = min(self._least, replica.load)

    def change_load(self, replica: Replica, calls: int) -> None:
        was_ranked = self._remove(replica)
        replica.load += calls
        if was_ranked:
            self.add(replica)
            if self._least not in self._by_load:  # This replica left its load last, for the next higher one.
                self._least = replica.load

    def first(self) -> Replica | None:
        """Returns the live replica with the least load, of several the one whose load changed first; None without."""
        while self._by_load:
            if self._least not in self._by_load:
                self._least = min(self._by_load)
            replica = next(iter(self._by_load[self._least]))
            if replica.free:
                return replica
            self._remove(replica)
        return None

    def _remove(self, replica: Replica) -> bool:
        ranked = self._by_load.get(replica.load, OrderedDict())
        if replica not in ranked:
            return False
        del ranked[replica]
        if not ranked:
            del self._by_load[replica.load]
        return True


@dataclass(slots=True)
class _GroupCalls:
    """The running calls of one group at one replica."""

    replica: Replica
    calls: int = 0


class GroupAffinity:
    """The replica that works for each group that has a running call: further calls of the group join it there."""

    def __init__(self) -> None:
        self._working: dict[int, _GroupCalls] = {}  # Bounded by the groups with a running call.

    def replica(self, group: int) -> Replica | None:
        """Returns the live replica that works for this group, if there is one."""
        working = self._working.get(group)
        return working.replica if working is not None and working.replica.alive else None

    @contextmanager
    def working(self, group: int, replica: Replica) -> Iterator[None]:
        """Counts a running call of a group. When its replica died, the calls that follow gather at another one."""
        here = self._working.get(group)
        if here is None or here.replica is not replica:
            here = self._working[group] = _GroupCalls(replica)
        here.calls += 1
        try:
            yield
        finally:
            here.calls -= 1
            if not here.calls and self._working.get(group) is here:
                del self._working[group]


class Replicas:
    """All workers of one service.

    isolated: groups whose calls run alone, and the fault domains that they avoid. holders: which replicas may hold rows
    of which samples. trainer: layout of the trainer whose ranks have these replicas in their processes; None: replicas
    have processes of their own.

    Its workers tell it who came and who is lost, the supervisor who drains or is parked; the handle of the service asks
    it at each call.
    """

    def __init__(self, service: str, replicas: int, layout: Layout) -> None:
        self.service = service
        self.layout = layout
        self.isolated: Mapping[int, frozenset[FaultDomain]] = {}
        self.holders = RowHolders[Replica]()
        self.trainer: Layout | None = None
        self.affinity = GroupAffinity()
        self._changed = Wakeup()
        self._ranking = LoadRanking()
        self._instances: dict[RemoteWorker, deque[str]] = {}
        self._by_instance: dict[str, tuple[Replica, RemoteWorker]] = {}
        self.replicas = tuple(self._replica(number) for number in range(replicas))
        self._alone: dict[Replica, Self] = {}

    def _replica(self, number: int) -> Replica:
        ranks = range(self.layout.size)
        workers = tuple(RemoteWorker(self.service, number, rank, partial(self._note, number, rank)) for rank in ranks)
        return Replica(workers, self._ranking, self._changed)

    def _note(self, number: int, rank: int) -> None:
        """Takes in that a worker was connected or lost."""
        replica = self.replicas[number]
        worker = replica.workers[rank]
        if worker.alive:
            known = self._instances.setdefault(worker, deque())
            known.append(worker.instance)
            self._by_instance[worker.instance] = replica, worker
            if len(known) > KNOWN_INSTANCES:
                self._by_instance.pop(known.popleft(), None)
            replica.is_draining = False
            replica.is_left_out = False
            self._ranking.add(replica)
        self._changed.wake()

    def __iter__(self) -> Iterator[RemoteWorker]:
        return (worker for replica in self.replicas if not replica.is_parked for worker in replica.workers)

    def grow(self) -> tuple[RemoteWorker, ...]:
        """Adds a replica; returns its workers."""
        self.replicas += (self._replica(len(self.replicas)),)
        return self.replicas[-1].workers

    def set_parked(self, number: int, *, parked: bool) -> None:
        self.replicas[number].is_parked = parked
        self._changed.wake()

    def replica_of(self, instance: str) -> Self:
        """Returns these replicas reduced to the one of this instance. Raises PeerLost when it was replaced."""
        replica, worker = self._by_instance.get(instance, (None, None))
        if replica is None or worker is None or worker.instance != instance:
            raise PeerLost(f"{instance} is no worker of {self.service} any more")
        if replica not in self._alone:
            self._alone[replica] = only = copy(self)
            only.replicas = (replica,)
            only.trainer = None
        return self._alone[replica]

    def worker(self, replica: int, rank: int) -> RemoteWorker:
        return self.replicas[replica].workers[rank]

    def drain(self, number: int) -> None:
        """Keeps new work from a replica; what it works on goes on there."""
        self.replicas[number].is_draining = True

    def leave_out(self, instance: str, *, out: bool) -> None:
        """Keeps new work, and what goes on, from the replica of an instance, or gives it work again."""
        replica, worker = self._by_instance.get(instance, (None, None))
        if replica is not None and worker is not None and worker.instance == instance:
            replica.is_left_out = out
            self._ranking.add(replica)
            self._changed.wake()

    def is_idle(self, number: int) -> bool:
        """Returns whether no group would lose anything if the replica ended now: it works for none, and holds no rows
        that are not released."""
        replica = self.replicas[number]
        calls = (call for worker in replica.workers for call in worker.outstanding.values())
        works = replica.load or any(True for call in calls for _ in call.groups)
        return not replica.alive or not (works or self.holders.holds(replica))

    def groups_at(self, instance: str) -> list[int]:
        """Returns the groups that an instance worked for, also when its successor has come already."""
        _, worker = self._by_instance.get(instance, (None, None))
        return [] if worker is None else worker.groups_at(instance)

    def of_prompt(self, group: int) -> Replica | None:
        """Returns the replica in ranks of the trainer that gets the prompt of a group, when the prompts of consecutive
        groups are split over the replicas, one each. None when the replica takes no new calls, or there is no such."""
        if self.trainer is None:
            return None
        count = len(self.replicas)
        shares = THREE_D_ALL_MICRO_DP.distribute([1] * count, Layout(dp=count))
        own = next(each for each, share in zip(self.replicas, shares, strict=True) if group % count in share)
        return own if own.free else None

    async def wait_for_live(self, seconds: float) -> list[Replica]:
        """Returns the live replicas; waits for a restart when there is none, for at most so many seconds.

        Raises:
            FleetFailed: no replica can come back. It is no PeerLost, which callers would retry until the supervisor
                ends the run.
            DeadlineExceeded: none came back in time.
        """
        if live := [replica for replica in self.replicas if replica.alive]:
            return live
        async with self._waiting_at_most(seconds):
            while not (live := [replica for replica in self.replicas if replica.alive]):
                await self._wait_for_restart()
        return live

    async def least_loaded(self, seconds: float) -> Replica:
        """Returns a live replica that the fewest calls chose and that is not reserved. Raises what `wait_for_live`
        raises."""
        while not (replica := self._first()):
            if any(replica.alive for replica in self.replicas):
                # Until a reservation ends, which a call with a deadline holds, or a draining replica does.
                await self._changed.wait()
            else:
                await self.wait_for_live(seconds)
        return replica

    def _first(self) -> Replica | None:
        if len(self.replicas) > 1:
            return self._ranking.first()
        return self.replicas[0] if self.replicas[0].free else None

    @asynccontextmanager
    async def reserved(self, group: int, seconds: float) -> AsyncIterator[Replica]:
        """Yields a replica that works for this group alone meanwhile. All calls of a group share its replica.

        Half of the replicas are reserved at most, so that the others go on. Waits until the calls that run there have
        ended; each has a deadline of its own. Raises what `wait_for_live` raises.
        """
        replica = await self._reserve(group, seconds)
        try:
            while replica.load > replica.own_calls and replica.alive:
                await self._changed.wait()
            replica.own_calls += 1
            try:
                with replica:
                    yield replica
            finally:
                replica.own_calls -= 1
        finally:
            self._end_reservation(replica)

    async def _reserve(self, group: int, seconds: float) -> Replica:
        while True:
            live = await self.wait_for_live(seconds)
            own = next((each for each in live if each.reserved_for == group), None)
            staying = [each for each in live if not (each.is_draining or each.is_left_out)]
            free = [each for each in staying if each.free]
            if own is None and free and len(staying) - len(free) < max(1, len(staying) // 2):
                avoided: frozenset[FaultDomain] = self.isolated.get(group, frozenset())
                own = min(
                    free, key=lambda each: (each.has_raised, not avoided.isdisjoint(each.fault_domains), each.load)
                )
            if own is not None:
                own.reserved_for = group
                own.reservations += 1
                return own
            await self._changed.wait()

    def _end_reservation(self, replica: Replica) -> None:
        replica.reservations -= 1
        if not replica.reservations:
            replica.reserved_for = None
            self._ranking.add(replica)
        self._changed.wake()

    @asynccontextmanager
    async def _waiting_at_most(self, seconds: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            raise DeadlineExceeded(f"no worker of {self.service} came back in time: {self._dead_workers()}") from error

    async def _wait_for_restart(self) -> None:
        """Waits until a worker was connected or lost. Raises FleetFailed when no replica can come back."""
        wanted = (replica.workers for replica in self.replicas if not replica.is_parked)
        if all(any(not each.alive and not each.restarting for each in workers) for workers in wanted):
            raise FleetFailed(self._dead_workers())
        await self._changed.wait()

    def _dead_workers(self) -> str:
        return "; ".join(worker.status for worker in self if not worker.alive)

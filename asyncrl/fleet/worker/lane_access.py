"""Decides who may call which lanes of which workers: keys of the processes of a run, and roles of their holders.

On TCP each instance has a pair of keys of its own, made by the controller; on ipc, which no other user can read, all
processes share one pair as a password.

    controller ──> control and work lanes of every worker, which accept no other key
    worker ──> rows and weights of those workers of whose role it reads

Introductions: a worker that takes calls, or is gone ──> "admit" with what has changed ──> every other worker
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from asyncrl.concurrency import gather
from asyncrl.errors import AsyncrlError
from asyncrl.fleet.worker.worker_spec import RunFacts, WorkerSpec
from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.lanes.control.zmq_wire import ZmqWire

# ---- keys ----------------------------------------------------------------------------------------------------------


Admit = Callable[[Mapping[str, Sequence[Sequence[str]]]], None]
"""Takes the public keys that may call each lane of a worker from now on, and those that may no more."""


def controller_keys(facts: RunFacts) -> tuple[CurveKeys | None, RunFacts]:
    """Returns the keys with which the controller calls workers, and the facts for workers: on TCP with its public key
    and without the pair that processes share on ipc."""
    if facts.curve is None:
        return None, facts
    if facts.config.fleet.wire != "tcp":  # On ipc whoever is called learns the password of the caller.
        return CurveKeys(*facts.curve), facts
    own = CurveKeys.fresh()
    return own, replace(facts, curve=None, caller=own.public)


def pair_of_instance(facts: RunFacts) -> tuple[str, str] | None:
    """Makes the pair of an instance; None where all processes share one."""
    if not facts.caller:
        return None
    fresh = CurveKeys.fresh()
    return fresh.public, fresh.secret


def worker_keys(spec: WorkerSpec) -> CurveKeys | None:
    """Returns the keys of a worker, with those that it accepts at each of its addresses until it is told of others."""
    facts = spec.facts
    if spec.curve is None:
        return None if facts.curve is None else CurveKeys(*facts.curve)
    here = spec.addresses
    callers = {each: (facts.caller,) for each in (here.control, here.work, here.data, weights_address(spec))}
    return CurveKeys(*spec.curve, admitted=(facts.caller,), admitted_at=callers, in_addresses=True)


def weights_address(spec: WorkerSpec) -> str:
    """Returns where a worker on TCP listens for readers of weights, on a port that the system chooses."""
    return f"{spec.addresses.data.rpartition(':')[0]}:*"


def admit_on(wire: ZmqWire, spec: WorkerSpec) -> Admit:
    """Returns what has the listeners of a worker accept other callers."""
    addresses = {"data": spec.addresses.data, "weights": weights_address(spec)}

    known: dict[str, set[str]] = {lane: set() for lane in addresses}

    def admit(changes: Mapping[str, Sequence[Sequence[str]]]) -> None:
        for lane, (came, gone) in changes.items():
            if lane in known:
                known[lane] = known[lane].union(came).difference(gone)
                wire.admit((spec.facts.caller, *known[lane]), addresses[lane])

    return admit


ADMIT = "admit"
"""Call of the controller on the control lane, which takes the callers of each other lane that came, and those that are
gone."""

AT_ONCE = 64
"""Workers that are told at one time, which bounds the memory of their calls."""

PROMPT = 2.0
"""Seconds that all wait for a worker to take changes of its callers: it may be stopped, or cut off. One that is late is
refused by no other and refuses new ones, until it takes the changes or counts as dead. Nobody waits for it again."""

ADMIT_DEADLINE = 10.0
"""Seconds for a newcomer to take its first callers, and for each further try to tell one that is late."""

RETRY = 1.0
"""Seconds between two tries to tell a worker that is late."""

SAMPLED = ("generation", "evaluation", "environment")
"""Services that make the rows of samples."""
LEARNERS = ("training", "critic", "cost_critic")
"""Services that read whatever others store about a sample."""
SCORED = ("reward", "cost", "reference", "critic", "cost_critic")
"""Services that store rows about samples: rewards of tokens, log-probs, values."""

ROWS_READ: Mapping[str, frozenset[str]] = {
    **{role: frozenset(SAMPLED) for role in (*SAMPLED, "reward", "cost", "reference")},
    **{role: frozenset((*SAMPLED, *SCORED)) for role in LEARNERS},
}
"""Role of a reader -> roles of the owners of rows that it reads. A role without an entry reads none."""

WEIGHTS_READ: Mapping[str, frozenset[str]] = {
    role: frozenset(("training", "generation", "evaluation")) for role in ("generation", "evaluation")
}
"""Role of a reader -> roles that send it weights: the trainer, and readers above it in the tree."""

LANES: Mapping[str, Mapping[str, frozenset[str]]] = {"data": ROWS_READ, "weights": WEIGHTS_READ}


def admitted_roles(owner: str, lane: str) -> frozenset[str]:
    """Returns the roles whose workers may open this lane of a worker of the role `owner`."""
    return frozenset(reader for reader, owners in LANES[lane].items() if owner in owners)


class ControlLane(Protocol):
    """The controller's connection to the control lane of a worker."""

    async def call(self, method: str, args: tuple[Any, ...], deadline: float) -> Any: ...


@dataclass(slots=True)
class _Member:
    """seen: how many changes of the fleet it was told of; None: it is new, and knows nobody. is_late: it did not take
    the newest ones. is_told_alone: a task tells it what it lacks, which others need not do."""

    role: str
    public: str
    control: ControlLane
    seen: int | None = None
    is_late: bool = False
    is_told_alone: bool = False


@dataclass(frozen=True, slots=True)
class _Change:
    """A worker that came, or is gone."""

    role: str
    public: str
    came: bool


@dataclass(slots=True)
class Introductions:
    """Keeps the list of callers of each worker current, by instance. Each worker is told what has changed since it was
    told last: of many that come at one time at once, so that a start costs each of them a few calls.

    A worker and its callers know each other before it takes calls, or one is late. Connections add workers and
    remove them.
    """

    _members: dict[str, _Member] = field(default_factory=dict)
    _changes: list[_Change] = field(default_factory=list)
    _forgotten: int = 0
    _telling: asyncio.Lock = field(default_factory=asyncio.Lock)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def add(self, spec: WorkerSpec, control: ControlLane) -> None:
        """Returns when every worker that this one may call, or that may call it, knows of it or is late."""
        if spec.curve is None:
            return
        member = self._members[spec.instance] = _Member(spec.service, spec.curve[0], control, is_told_alone=True)
        self._changes.append(_Change(spec.service, spec.curve[0], came=True))
        await self.tell()
        if member.is_late:
            await self._tell_alone(member)
        member.is_told_alone = False

    def remove(self, instance: str) -> None:
        """Forgets a worker; `keep_current` tells the others."""
        if (member := self._members.pop(instance, None)) is not None:
            self._changes.append(_Change(member.role, member.public, came=False))
            self._changed.set()

    async def keep_current(self) -> None:
        """Has workers refuse those that are gone, and tells those that are late, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._changed.wait()
                self._changed.clear()
                await self.tell()
                for instance, member in self._members.items():
                    if member.is_late and not member.is_told_alone:
                        member.is_told_alone = True
                        tasks.create_task(self._catch_up(member, instance), name=f"callers of {instance}")

    async def _catch_up(self, member: _Member, instance: str) -> None:
        """Tells a worker until it has taken all changes, or is gone."""
        await self._tell_alone(member)
        while member.is_late and instance in self._members:
            await asyncio.sleep(RETRY)
            await self._tell_alone(member)
        member.is_told_alone = False
        self._changed.set()  # What has changed since.

    async def tell(self) -> None:
        """Tells each worker that is not late which callers came and went since it was told last."""
        async with self._telling:
            now = self._forgotten + len(self._changes)
            behind = [each for each in self._members.values() if each.seen != now and not each.is_late]
            news = {(each.role, each.seen): self._news(each.role, each.seen) for each in behind}
            for first in range(0, len(behind), AT_ONCE):
                some = behind[first : first + AT_ONCE]
                await gather(*(self._tell(each, news[each.role, each.seen], now, PROMPT) for each in some))
            oldest = min((each.seen or 0 for each in self._members.values()), default=now)
            del self._changes[: max(0, oldest - self._forgotten)]
            self._forgotten = max(self._forgotten, oldest)

    async def _tell_alone(self, member: _Member) -> None:
        now = self._forgotten + len(self._changes)
        await self._tell(member, self._news(member.role, member.seen), now, ADMIT_DEADLINE)

    async def _tell(self, member: _Member, news: Mapping[str, Sequence[Sequence[str]]], now: int, most: float) -> None:
        try:
            if any(came or gone for came, gone in news.values()):
                await member.control.call(ADMIT, (news,), most)
            member.seen = now
            member.is_late = False
        except AsyncrlError:  # Whoever does not answer is found by its supervisor.
            member.is_late = True
            self._changed.set()

    def _news(self, owner: str, seen: int | None) -> dict[str, tuple[list[str], list[str]]]:
        """Returns the keys that came and went, by lane, since an owner of this role was told."""
        if seen is None:
            changes = [_Change(each.role, each.public, came=True) for each in self._members.values()]
        else:
            changes = self._changes[seen - self._forgotten :]
        found = {}
        for lane in LANES:
            roles = admitted_roles(owner, lane)
            last = {each.public: each.came for each in changes if each.role in roles}
            found[lane] = ([key for key in last if last[key]], [key for key in last if not last[key]])
        return found

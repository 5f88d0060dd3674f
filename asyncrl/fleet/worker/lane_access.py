"""Decides which workers may reach which lanes of which others: by role, where each has its own key pair (on TCP).

controller ──> control and work lanes of every worker, which accept no other key
worker ──> rows and weights of those workers of whose role it reads

Introductions: a worker that takes calls, or is gone ──> "admit" with the present callers ──> every other worker
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncrl.concurrency import gather
from asyncrl.errors import AsyncrlError
from asyncrl.fleet.worker.worker_spec import WorkerSpec

ADMIT = "admit"
"""Call of the controller on the control lane, which takes the callers of each other lane."""

ADMIT_DEADLINE = 10.0
"""Seconds for a worker to take a list of callers. One that does not is refused by no other and refuses new ones, until
it takes a later list or counts as dead."""

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
    role: str
    public: str
    control: ControlLane
    known: frozenset[str] = frozenset()


@dataclass(slots=True)
class Introductions:
    """Keeps the list of callers of each worker current, by instance."""

    _members: dict[str, _Member] = field(default_factory=dict)
    _telling: asyncio.Lock = field(default_factory=asyncio.Lock)
    _removed: asyncio.Event = field(default_factory=asyncio.Event)

    async def add(self, spec: WorkerSpec, control: ControlLane) -> None:
        """Returns when every worker that this one may call, or that may call it, knows of it."""
        if spec.curve is None:
            return
        self._members[spec.instance] = _Member(spec.service, spec.curve[0], control)
        await self.tell()

    def remove(self, instance: str) -> None:
        """Forgets a worker; `keep_current` tells the others."""
        if self._members.pop(instance, None) is not None:
            self._removed.set()

    async def keep_current(self) -> None:
        """Has workers refuse those that are gone, until cancelled."""
        while True:
            await self._removed.wait()
            self._removed.clear()
            await self.tell()

    async def tell(self) -> None:
        """Sends each worker its list of callers, if that has changed since the last one."""
        async with self._telling:
            await gather(*(self._tell(instance, member) for instance, member in list(self._members.items())))

    async def _tell(self, instance: str, member: _Member) -> None:
        callers = {lane: self._callers(member.role, lane) for lane in LANES}
        known = frozenset(f"{lane} {public}" for lane, each in callers.items() for public in each)
        if known == member.known:
            return
        with suppress(AsyncrlError):  # Whoever does not answer is found by its supervisor.
            await member.control.call(ADMIT, (callers,), ADMIT_DEADLINE)
            member.known = known

    def _callers(self, owner: str, lane: str) -> list[str]:
        roles = admitted_roles(owner, lane)
        return sorted(each.public for each in self._members.values() if each.role in roles)

"""Attributes deaths of workers, and failed attempts, to the group whose samples cause them, if there is such a group.

    deaths with a group ──> ISOLATED_AFTER: it runs alone ──> ATTRIBUTED_AFTER deaths of a worker that it had alone
          └── its host was lost: the deaths there are no group's                       └── poison

Everybody who was at a dead worker is under suspicion, and only a group that failed while it ran alone is blamed: an
isolated group has replicas for itself (`Replicas.reserved`), so that nobody else can be the cause. Groups are
isolated side by side, each at its own replicas.
"""

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from asyncrl.lanes.host_id import FaultDomain

ISOLATED_AFTER = 2
"""Deaths and failures in the presence of a group after which it runs alone: with one, every neighbour would."""

ATTRIBUTED_AFTER = 3
"""Deaths of workers that a group had for itself after which they are attributed to it: five deaths in all."""

FAILURES = 3
"""Failed attempts, without a death, after which a group is given up if it ran alone in the last one."""

MOST_FORGIVEN = 3
"""Further deaths that a group may have while workers die without it: then something else kills workers, too."""

REMEMBERED = 256
"""Deaths that are remembered: more than a fleet of 64 hosts has while a group runs five times."""


@dataclass(eq=False, slots=True)
class Death:
    """The death of a worker. worker: its name, which its successor has, too. domain: where it ran. present: the groups
    that it worked for. alone: the isolated group that had it for itself. why: the worker died.
    lost_host: set when the whole host was lost; then it stands for the one event that the deaths there are, which is
    nobody's."""

    worker: str
    domain: FaultDomain
    at: float
    present: frozenset[int]
    alone: int | None
    why: str
    lost_host: "LostHost | None" = None

    @property
    def service(self) -> str:
        return self.worker.rstrip("0123456789.")


@dataclass(frozen=True, eq=False, slots=True)
class LostHost:
    """One loss of a host. again: its workers had come back from another one a moment before, as those of a lost host do
    not: a group may have killed all of them."""

    again: bool


@dataclass(slots=True)
class CrashAttribution:
    """Remembers deaths and failed attempts of the groups in flight.

    notice_seconds: time in which the deaths of all workers of one host become known. count: deaths so far, and workers
    whose host left.

    A group is blamed only for what happened while it ran alone. Rollouts alone calls it.
    """

    notice_seconds: float
    count: int = 0
    _deaths: deque[Death] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _failures: Counter[int] = field(default_factory=Counter)
    _failed_alone: set[int] = field(default_factory=set)
    _given_up: set[int] = field(default_factory=set)

    def record_death(self, death: Death, alive: Collection[str]) -> None:
        """Takes the death of a worker. alive: names of the workers that live on its host."""
        self.count += 1
        self._deaths.append(death)
        recent = [
            each for each in self._deaths if each.domain == death.domain and each.at >= death.at - self.notice_seconds
        ]
        # A loss of a host takes each worker with it once, and explains no death of one that came back.
        noticed = {each.worker: each.lost_host for each in recent if each.lost_host is not None}
        lost = {each.worker: each for each in recent if each.lost_host is None}
        if len(lost) > 1 and lost.keys() >= set(alive) and not _died_of_groups(lost.values()):
            event = LostHost(again=lost.keys() <= noticed.keys())
            for each in lost.values():
                each.lost_host = event
        elif noticed and death.worker not in noticed:
            death.lost_host = list(noticed.values())[-1]

    def record_lost_host(self, worker: str) -> None:
        """Takes that a worker whose death was recorded was lost with its host, also where it was alone there."""
        deaths = [each for each in self._deaths if each.worker == worker]
        if deaths and deaths[-1].lost_host is None:
            recent = (each for each in deaths if each.at >= deaths[-1].at - self.notice_seconds)
            deaths[-1].lost_host = LostHost(again=any(each.lost_host for each in recent))

    def record_leave(self) -> None:
        """Takes that a worker was given up because its host left: attempts that end with it did not fail."""
        self.count += 1

    def record_failure(self, group: int, *, alone: bool) -> None:
        """Takes an attempt that failed while no worker died. alone: the group was isolated."""
        self._failures[group] += 1
        if alone:
            self._failed_alone.add(group)

    def is_suspect(self, group: int) -> bool:
        """Returns whether the group has to run alone."""
        present = [death for death in self._deaths if group in death.present]
        events = {death.lost_host or death for death in present if death.lost_host is None or death.lost_host.again}
        return len(events) + self._failures[group] >= ISOLATED_AFTER

    def fails_alone(self, group: int) -> bool:
        """Returns whether attempts at the group fail without a death, also when it runs alone."""
        return self._failures[group] >= FAILURES and group in self._failed_alone

    def kills_workers(self, group: int) -> bool:
        """Returns whether deaths are attributed to the group. For `notice_seconds` after the last one, its whole
        host may still prove to be lost."""
        own = [death for death in self._deaths if death.alone == group and death.lost_host is None]
        return bool(own) and len(own) >= ATTRIBUTED_AFTER + self._killed_by_others(group, since=own[0].at)

    def domains_of_deaths(self, group: int) -> frozenset[FaultDomain]:
        """Returns where workers died in its presence, which an isolated group should avoid."""
        return frozenset(death.domain for death in self._deaths if group in death.present)

    def last_death(self, group: int) -> str:
        return next((death.why for death in reversed(self._deaths) if group in death.present), "")

    def give_up(self, group: int) -> None:
        """Notes that the group was given up; the deaths in its presence have a cause."""
        self._given_up.add(group)

    def forget(self, group: int) -> None:
        """Clears a group whose attempt went well, or which is no more in flight."""
        self._failures.pop(group, None)
        self._failed_alone.discard(group)
        if group not in self._given_up:
            for death in self._deaths:
                death.present -= {group}

    def _killed_by_others(self, group: int, since: float) -> int:
        """Counts deaths that neither this group nor another suspect explains, up to MOST_FORGIVEN."""
        deaths = [death for death in self._deaths if death.at >= since and death.lost_host is None]
        unexplained = sum(
            not any(each == group or each in self._given_up or self.is_suspect(each) for each in death.present)
            for death in deaths
        )
        return min(unexplained, MOST_FORGIVEN)


def _died_of_groups(deaths: Collection[Death]) -> bool:
    """Returns whether each worker may have died of the isolated group that it ran alone. A host takes workers with it
    that ran none, and workers of several services that one group had; a group crashes those of one service."""
    groups = {death.alone for death in deaths}
    return None not in groups and len({(death.alone, death.service) for death in deaths}) == len(groups)

"""The groups in flight: each is rolled out in a task of its own until no member of it runs any more.

A group is the unit of retry. When a worker dies, the rows that it owned are lost: the members of a group that are not
trained yet are sampled again in a new attempt, with the same seeds; an episode goes on after the last turn that its
environment answered. A group that fails again and again, also where it
runs alone, is dropped as poison (crash_attribution.py). An attempt that the death of a worker ended is no failure of
the group, nor is one that ended because a worker cannot reach another one: the network between them is at fault.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.concurrency import root_cause
from asyncrl.config.schema import Config
from asyncrl.controller.crash_attribution import CrashAttribution, Death
from asyncrl.controller.gate.group_state import DROPPABLE, OPEN, Stage
from asyncrl.controller.observers.events import GroupPoisoned, Prompt, Warned
from asyncrl.controller.sample_tracker import POISON, SampleTracker, stored_by
from asyncrl.errors import ALL_SLOTS, AsyncrlError, DeadlineExceeded, LostRows, Retryable
from asyncrl.fleet.failure_table import MISTAKES
from asyncrl.fleet.fleet import FaultDomains
from asyncrl.fleet.health import where_task_waits
from asyncrl.lanes.host_id import FaultDomain
from asyncrl.protocols.batch import GREEDY, BatchRef, Cuts
from asyncrl.protocols.messages import PromptGroup
from asyncrl.protocols.seeds import group_seed
from asyncrl.protocols.staleness import live
from asyncrl.tasks.chat_messages import TOOLS
from asyncrl.tasks.pictures import with_pictures_read

REMEMBERED_DEAD = 64
"""Dead instances whose rows may still be in a batch that is being trained: far more than die during one step."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a group, as an algorithm gets it.

    row: all columns of the prompt's row. compared: whether the reward of the greedy answer is known, or not needed.
    """

    prompts: PromptGroup
    row: dict[str, Any]
    compared: bool = False

    @property
    def greedy(self) -> PromptGroup:
        """Returns the request for the greedy answer, which has no member once an earlier attempt was compared."""
        return replace(self.prompts, members=() if self.compared else (GREEDY,), temperature=0.0)


PromptSource = Callable[[int], tuple[Prompt, dict[str, Any]]]
"""Gives the prompt and the row of a group: a pure function of the group's id (and of the run's seed)."""


@dataclass
class Rollouts:
    """Keeps one task, owned by `tasks`, for each group with a member that is not scored yet.

    fault_domains: through which the calls of a suspect group run alone. tasks: set when the run begins. running: the
    task of each group that is rolled out, in the order of beginnings.

    A group has at most one attempt that runs; a newer one overtakes it. The Controller alone calls it.
    """

    tracker: SampleTracker
    prompts: PromptSource
    config: Config
    roll_out: Callable[[Attempt], Awaitable[None]]
    fault_domains: FaultDomains

    def __post_init__(self) -> None:
        self._gate = self.tracker.gate
        self._crashes = CrashAttribution(self.fault_domains.notice_seconds)
        self.tasks: asyncio.TaskGroup
        self.running: dict[int, asyncio.Task[None]] = {}
        self._scopes: dict[int, asyncio.Timeout] = {}
        self._overtaken = set[int]()
        self._excused = set[int]()  # Their attempt ended for a reason that is not theirs.
        self._mistakes: dict[int, AsyncrlError] = {}  # What a worker raised about the group in its last attempt.
        self._reported_owners: deque[str] = deque(maxlen=REMEMBERED_DEAD)
        self._again: dict[int, None] = {}
        self._stopped = False
        self._dead: deque[str] = deque(maxlen=REMEMBERED_DEAD)

    def start(self, group: int) -> None:
        self.running[group] = self.tasks.create_task(self._run_group(group), name=f"group {group}")

    def stop(self) -> None:
        """Ends all groups where they are. A cancellation alone would not: before Python 3.13 a task group that fails at
        the same moment forgets it, and its own failure looks like one in `Task.cancelling`."""
        self._stopped = True
        for task in self.running.values():
            task.cancel()

    def worker_lost(
        self, instance: str, why: str, running: Iterable[int], domain: FaultDomain, alive: Collection[str]
    ) -> None:
        """Takes the death of a worker that worked for the groups `running`. alive: workers that live in its domain."""
        present = [group for group in running if not self._gate.finished(group)]
        alone = present[0] if len(set(present)) == 1 and present[0] in self.fault_domains.isolated else None
        name = instance.partition("-")[0]
        now = asyncio.get_running_loop().time()
        death = Death(name, domain, now, frozenset(present), alone, f"{instance}: {why}")
        self._crashes.record_death(death, alive)
        self._begin_again(instance, why)

    def host_lost(self, instance: str) -> None:
        """Takes that a dead worker was lost with its host."""
        self._crashes.record_lost_host(instance.partition("-")[0])

    def worker_left(self, instance: str, why: str) -> None:
        """Takes the end of a worker whose host left: what fails with it is no failure of a group."""
        self._crashes.record_leave()
        self._begin_again(instance, why)

    def _begin_again(self, instance: str, why: str) -> None:
        self._dead.append(instance)
        for group in self.tracker.groups_at(instance):
            self.lost(group, f"{instance}: {why}")

    def rows_lost(self, cuts: Cuts, error: LostRows) -> None:
        """Restarts the groups of the cuts whose rows the error names, and those with rows at a dead worker; all of them
        when none is known to have lost any."""
        named = {*error.places}
        concerned = [
            row.group
            for row in cuts.batch
            if any(not named.isdisjoint(((place.owner, place.slot), (place.owner, ALL_SLOTS))) for place in row.places)
            or any(stored_by(row, instance) for instance in self._dead)
        ]
        for group in dict.fromkeys(concerned or [row.group for row in cuts.batch]):
            self.lost(group, str(error))

    def living_owners(self, error: LostRows) -> list[str]:
        """Returns the instances that could not be reached for their rows, and are not known to have died."""
        instances = {owner.rpartition("#")[2] for owner in _unreached(error)}
        return sorted(instances.difference(self._dead))

    def describe_waits(self) -> Iterator[str]:
        for group, task in list(self.running.items())[:1]:
            members = self._gate.members(group, *OPEN)
            yield f"  roll_out of group {group} has not ended for members {members}; {wait_of(task)}"

    def lost(self, group: int, reason: str) -> None:
        """Begins a new attempt at a group whose rows are gone, and ends the running one where it is."""
        if self._open(group):
            self.tracker.restart(group, reason)
        if group not in self._scopes:
            self._again[group] = None
        self._end_attempt(group)

    def start_again(self) -> None:
        """Rolls out the groups that lost rows after their attempt had ended, when `lost` could not start tasks."""
        again = self._again
        self._again = {}
        for group in again:
            if group not in self.running and self._gate.members(group, Stage.RUNNING):
                self.start(group)

    async def _run_group(self, group: int) -> None:
        crashes = self._crashes
        failure = ""
        try:
            while self.unfinished(group) and not self._stopped:
                if crashes.kills_workers(group):
                    await asyncio.sleep(self.fault_domains.notice_seconds)  # Its host may still prove to be lost.
                if crashes.kills_workers(group) or crashes.fails_alone(group):
                    self._poison(group, failure)
                elif failure and self._open(group):
                    self.tracker.restart(group, failure)
                failure = await self._try_isolated(group) if self.unfinished(group) else ""
        finally:
            crashes.forget(group)
            self._mistakes.pop(group, None)
        del self.running[group]

    async def _try_isolated(self, group: int) -> str:
        """Makes one attempt, alone when the group is a suspect; returns why it failed."""
        crashes = self._crashes
        deaths = crashes.count
        alone = crashes.is_suspect(group)
        if alone:
            self.fault_domains.isolated[group] = crashes.domains_of_deaths(group)
        try:
            failure = await self._try(group)
        finally:
            self.fault_domains.isolated.pop(group, None)
        if failure and crashes.count == deaths and group not in self._excused:
            crashes.record_failure(group, alone=alone)
        self._excused.discard(group)
        return failure

    def unfinished(self, group: int) -> bool:
        """Returns whether the group needs an attempt: for a member without a score, or for its greedy answer."""
        return bool(self._gate.members(group, *OPEN)) or self._gate.awaits(group)

    def _end_attempt(self, group: int) -> None:
        """Ends the running attempt, if there is one: a newer one overtakes it, or the group is dropped."""
        if group in self._scopes and group not in self._overtaken:
            self._overtaken.add(group)
            self._scopes[group].reschedule(asyncio.get_running_loop().time())

    async def _try(self, group: int) -> str:
        """Makes one attempt; returns why it failed, "" when it succeeded or was overtaken."""
        failure = ""
        self._mistakes.pop(group, None)
        try:
            async with asyncio.timeout(None) as self._scopes[group]:
                await self.roll_out(self._attempt(group))
        except* (Retryable, DeadlineExceeded, TimeoutError) as failures:
            failure = str(cause := root_cause(failures))
            if isinstance(mistake := cause.__cause__, MISTAKES):
                self._mistakes[group] = mistake
            if self._is_excused(group, cause):
                self._excused.add(group)
        finally:
            del self._scopes[group]
        if group in self._overtaken:
            self._overtaken.remove(group)
            return ""
        missing = self._gate.members(group, *OPEN)
        if not failure and missing:
            return f"the attempt ended without samples {missing}"
        if not failure and self._gate.awaits(group):
            return "the attempt ended without the reward of a greedy answer"
        return failure

    def _is_excused(self, group: int, cause: BaseException) -> bool:
        """Returns whether an attempt ended for a reason that is not the group's: its worker made no progress, so that
        it is killed and its death counts, or a worker cannot reach the owner of a row."""
        if not isinstance(cause, LostRows):
            return isinstance(cause, DeadlineExceeded)
        owners = _unreached(cause)
        again = not self._gate.finished(group) and self._gate.group(group).attempt > 0
        for owner in owners.difference(self._reported_owners) if again else ():
            if owner.rpartition("#")[2] not in self._dead:
                self._reported_owners.append(owner)
                text = f"group {group} begins again, not by its own fault: a worker cannot reach another one: {cause}"
                self.tracker.observe(Warned(f"{text}. Look at the network between their hosts, if this goes on"))
        return bool(owners)

    def _attempt(self, group: int) -> Attempt:
        prompt, row = self.prompts(group)
        request = PromptGroup(
            id=group,
            attempt=self._gate.group(group).attempt,
            incarnation=self.tracker.journal.ledger.incarnation,
            prompt=with_pictures_read(prompt),
            members=self._gate.members(group, Stage.RUNNING),
            seed=group_seed(self.config.seed, group),
            not_before=self._gate.not_before(group),
            temperature=self.config.generation.temperature,
            max_new_tokens=self.config.generation.max_new_tokens,
            deadline=self.config.generation.deadline,
            continues=self._continued(group),
            tools=tuple(row.get(TOOLS) or ()),
        )
        return Attempt(request, row, compared=not self._gate.awaits(group))

    def _continued(self, group: int) -> BatchRef | None:
        """Returns the rows that the attempt goes on from; None where all members begin anew. A row is tried once: what
        fails before its next turn may fail because of it."""
        limit = self.config.staleness.limit
        version = self._gate.version
        rows = tuple(
            row
            for row in self.tracker.take_answered(group)
            if live(row.first, version, limit) and not any(stored_by(row, instance) for instance in self._dead)
        )
        return BatchRef(rows) if rows else None

    def _open(self, group: int) -> tuple[int, ...]:
        return self._gate.members(group, *DROPPABLE)

    def _poison(self, group: int, failure: str) -> None:
        """Gives up a group that is proven to be at fault. Raises the mistake of the user that is, if one is."""
        if group in self._mistakes:
            raise self._mistakes[group]
        if members := self._open(group):
            prompt, _ = self.prompts(group)
            self._crashes.give_up(group)
            self.tracker.observe(GroupPoisoned(group, prompt, failure or self._crashes.last_death(group)))
            self.tracker.drop(group, members, POISON)


def _unreached(error: LostRows) -> set[str]:
    return {owner for owner, slot in error.places if slot == ALL_SLOTS}


def wait_of(task: "asyncio.Task[None] | None") -> str:
    where = where_task_waits(task) if task is not None else ""
    return f"waits in {where}" if where else "waits for asyncrl"

"""The groups in flight: each is rolled out in a task of its own until no member of it runs any more.

A group is the unit of retry. When a worker dies, the rows that it owned are lost: the members of a group that are not
trained yet are sampled again in a new attempt, with the same seeds. A group that fails three attempts by itself is
dropped as poison, and so is a group that the deaths of workers are attributed to (crash_attribution.py). An attempt
that the death of a worker ended is no failure of the group.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from asyncrl.controller.alarms.crash_attribution import CrashAttribution
from asyncrl.controller.gate.group_state import DROPPABLE, OPEN, Stage
from asyncrl.controller.observers.events import AttemptBegan, GroupPoisoned, Prompt
from asyncrl.controller.sample_tracker import POISON, SampleTracker, stored_by
from asyncrl.errors import Retryable, root_cause
from asyncrl.fleet.health import where_task_waits
from asyncrl.protocols.batch import GREEDY, Cuts
from asyncrl.protocols.messages import PromptGroup
from asyncrl.protocols.seeds import group_seed

REMEMBERED_DEAD = 64
"""Dead instances whose rows may still be in a batch that is being trained: far more than die during one step."""

ATTEMPTS = 3
"""Failed attempts after which a group is dropped: one may be chance, two bad luck, a third one is its prompt."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a group, as an algorithm gets it.

    row: all columns of the prompt's row, for the reward functions. compared: whether the reward of the greedy answer is
    known, or not needed.
    """

    prompts: PromptGroup
    row: dict[str, Any]
    compared: bool = False

    @property
    def greedy(self) -> PromptGroup:
        """The prompt once more, to be answered with the likeliest tokens; the answer goes to `control.compared`.

        It asks for no member once the group has been compared: a later attempt keeps the reward of an earlier one.
        """
        return replace(self.prompts, members=() if self.compared else (GREEDY,), temperature=0.0)


class PromptSource(Protocol):
    """Gives the prompt and the row of a group: a pure function of the group's id (and of the run's seed)."""

    def __call__(self, group: int) -> tuple[Prompt, dict[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """How every group is sampled. deadline: seconds a group may take; seed: the run's; incarnation: of this resume."""

    temperature: float
    max_new_tokens: int
    deadline: float
    seed: int
    incarnation: int

    def attempt(
        self, prompts: PromptSource, group: int, attempt: int, members: tuple[int, ...], not_before: int
    ) -> Attempt:
        """Returns an attempt. members: samples to draw; not_before: oldest version that a sample may start with."""
        prompt, row = prompts(group)
        return Attempt(
            PromptGroup(
                id=group,
                attempt=attempt,
                incarnation=self.incarnation,
                prompt=prompt,
                members=members,
                seed=group_seed(self.seed, group),
                not_before=not_before,
                temperature=self.temperature,
                max_new_tokens=self.max_new_tokens,
                deadline=self.deadline,
            ),
            row,
        )


class Rollouts:
    """Keeps one task, owned by `tasks`, for each group with a member that is not scored yet.

    roll_out: rolls out one attempt, and returns when every sample of it was handed to `ready`. tasks: set when the run
    begins.
    """

    def __init__(
        self,
        tracker: SampleTracker,
        prompts: PromptSource,
        sampling: Sampling,
        crashes: CrashAttribution,
        roll_out: Callable[[Attempt], Awaitable[None]],
    ) -> None:
        self._tracker = tracker
        self._gate = tracker.gate
        self._prompts = prompts
        self._sampling = sampling
        self._crashes = crashes
        self._roll_out = roll_out
        self.tasks: asyncio.TaskGroup
        self._running: dict[int, asyncio.Task[None]] = {}
        self._scopes: dict[int, asyncio.Timeout] = {}
        self._overtaken: dict[int, None] = {}
        self._failures: dict[int, int] = {}
        self._again: dict[int, None] = {}
        self._dead: deque[str] = deque(maxlen=REMEMBERED_DEAD)

    def start(self, group: int) -> None:
        """Rolls out this group in a task of its own."""
        self._running[group] = self.tasks.create_task(self._run_group(group), name=f"group {group}")

    @property
    def running(self) -> "Mapping[int, asyncio.Task[None]]":
        """The task of each group that is rolled out, in the order of their beginnings."""
        return self._running

    def stop(self) -> None:
        """Abandons all groups; they stay in flight."""
        for task in self._running.values():
            task.cancel()

    def worker_lost(self, instance: str, why: str, running: Iterable[int]) -> None:
        """Restarts the groups that had rows at a worker that died. running: the groups that it worked for."""
        self._dead.append(instance)
        if (poison := self._crashes.record_death(running, self._gate.groups())) is not None:
            self.poison(poison, f"{instance}: {why}")
        for group in self._tracker.groups_at(instance):
            self.lost(group, f"{instance}: {why}")

    def rows_lost(self, cuts: Cuts, why: str) -> None:
        """Restarts the groups of the cuts with rows at a dead worker, or all of them when none is known to have any."""
        at_dead = [row.group for row in cuts.batch if any(stored_by(row, instance) for instance in self._dead)]
        for group in dict.fromkeys(at_dead or [row.group for row in cuts.batch]):
            self.lost(group, why)

    def describe_waits(self) -> Iterator[str]:
        """Describes where the group that was begun first waits."""
        for group, task in list(self._running.items())[:1]:
            members = self._gate.members(group, *OPEN)
            yield f"  roll_out of group {group} has not ended for members {members}; {wait_of(task)}"

    def lost(self, group: int, reason: str) -> None:
        """Begins a new attempt at a group whose rows are gone, and ends the running one where it is."""
        if self._open(group):
            self._restart(group, reason)
        if group in self._scopes:
            self._end_attempt(group)
        else:
            self._again[group] = None

    def poison(self, group: int, reason: str) -> None:
        """Drops the open members of this group as poison."""
        prompt, _ = self._prompts(group)
        self._tracker.observe(GroupPoisoned(group, prompt, reason))
        self._tracker.drop(group, self._open(group), POISON)
        if group in self._scopes:
            self._end_attempt(group)

    def start_again(self) -> None:
        """Rolls out the groups that lost rows after their attempt had ended.

        `lost` does not start them itself: it may be called when the run ends and takes no more tasks.
        """
        again = self._again
        self._again = {}
        for group in again:
            if group not in self._running and self._gate.members(group, Stage.RUNNING):
                self.start(group)

    async def _run_group(self, group: int) -> None:
        while self._unfinished(group):
            async with self._crashes.isolation(group):
                deaths = self._crashes.deaths
                # The group may have finished while it waited for the isolation.
                failure = await self._try(group) if self._unfinished(group) else ""
            if failure and self._crashes.deaths > deaths and self._open(group):
                self._restart(group, failure)
            elif failure:
                self._failed(group, failure)
        del self._running[group]

    def _unfinished(self, group: int) -> bool:
        return bool(self._gate.members(group, *OPEN)) or self._gate.awaits(group)

    def _end_attempt(self, group: int) -> None:
        """Ends the running attempt, because a newer one overtakes it or the group is dropped."""
        if group not in self._overtaken:
            self._overtaken[group] = None
            self._scopes[group].reschedule(asyncio.get_running_loop().time())

    async def _try(self, group: int) -> str:
        """Makes one attempt; returns why it failed, "" when it succeeded or was overtaken."""
        failure = ""
        try:
            async with asyncio.timeout(None) as self._scopes[group]:
                await self._roll_out(self._attempt(group))
        except* (Retryable, TimeoutError) as failures:
            failure = str(root_cause(failures))
        finally:
            del self._scopes[group]
            overtaken = self._overtaken.pop(group, "no") is None
        if overtaken:
            return ""
        missing = self._gate.members(group, *OPEN)
        if not failure and missing:
            return f"the attempt ended without samples {missing}"
        if not failure and self._gate.awaits(group):
            return "the attempt ended without the reward of a greedy answer"
        return failure

    def _attempt(self, group: int) -> Attempt:
        members, not_before = self._gate.members(group, Stage.RUNNING), self._gate.not_before(group)
        attempt = self._sampling.attempt(self._prompts, group, self._gate.group(group).attempt, members, not_before)
        attempt = replace(attempt, compared=not self._gate.awaits(group))
        self._tracker.observe(AttemptBegan(attempt.prompts))
        return attempt

    def _open(self, group: int) -> tuple[int, ...]:
        """Returns the members that are neither trained nor dropped nor being trained."""
        return self._gate.members(group, *DROPPABLE)

    def _restart(self, group: int, reason: str) -> None:
        self._tracker.restart(group, reason, self._failures.get(group, 0))

    def _failed(self, group: int, reason: str) -> None:
        if not self._open(group):
            return
        self._failures = {known: count for known, count in self._failures.items() if not self._gate.finished(known)}
        self._failures[group] = failures = self._failures.get(group, 0) + 1
        if failures < ATTEMPTS:
            self._restart(group, reason)
        else:
            self.poison(group, reason)


def wait_of(task: "asyncio.Task[None] | None") -> str:
    """Describes where a task of the algorithm waits."""
    where = where_task_waits(task) if task is not None else ""
    return f"waits in {where}" if where else "waits for asyncrl"

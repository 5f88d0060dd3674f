"""The groups in flight: each is rolled out in a task of its own until no member of it runs any more.

A group is the unit of retry. When a worker dies, the rows that it owned are lost: the members of a group that are not
trained yet are sampled again in a new attempt, with the same seeds. A group that fails three attempts by itself is
dropped as poison, and so is a group that the deaths of workers are attributed to. An attempt that the death of a worker
ended is no failure of the group.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.controller.gate.group_state import DROPPABLE, OPEN, Stage
from asyncrl.controller.observers.events import GroupPoisoned, Prompt
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

ISOLATED_AFTER, ATTRIBUTED_AFTER = 2, 5
"""Deaths in the presence of a group after which it runs isolated from other such groups, and after which the deaths are
attributed to it. Where every twentieth second one of three workers is killed from outside, a healthy group that takes
25 s is dropped once in a thousand times; attribution after 3 deaths dropped it once in fifty."""


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


class CrashAttribution:
    """Finds the group whose samples crash the workers that run them: counts the deaths at which each was present.

    A group that was present at two deaths runs beside no other such group, and three further deaths in its presence are
    attributed to it. When a worker dies with no group that was present at an earlier death, something else kills
    workers, and all counts start again.
    """

    def __init__(self) -> None:
        self.deaths = 0
        self._deaths_with: dict[int, int] = {}
        self._isolation = asyncio.Lock()

    def record_death(self, running: Iterable[int], in_flight: Collection[int]) -> int | None:
        """Counts the death of a worker that was running these groups; returns the group that it is attributed to."""
        self.deaths += 1
        present = [group for group in dict.fromkeys(running) if group in in_flight]
        self._deaths_with = {group: count for group, count in self._deaths_with.items() if group in in_flight}
        if not any(group in self._deaths_with for group in present):
            self._deaths_with.clear()
        for group in present:
            self._deaths_with[group] = self._deaths_with.get(group, 0) + 1
        return next((group for group in present if self._deaths_with[group] == ATTRIBUTED_AFTER), None)

    def isolation(self, group: int) -> AbstractAsyncContextManager[object]:
        """Returns the scope in which this group runs: entered at once, unless another isolated group is running."""
        return self._isolation if self._deaths_with.get(group, 0) >= ISOLATED_AFTER else nullcontext()


@dataclass
class Rollouts:
    """Keeps one task, owned by `tasks`, for each group with a member that is not scored yet.

    tasks: set when the run begins. running: the task of each group that is rolled out, in the order of beginnings.
    """

    tracker: SampleTracker
    prompts: PromptSource
    config: Config
    roll_out: Callable[[Attempt], Awaitable[None]]

    def __post_init__(self) -> None:
        self._gate = self.tracker.gate
        self._crashes = CrashAttribution()
        self.tasks: asyncio.TaskGroup
        self.running: dict[int, asyncio.Task[None]] = {}
        self._scopes: dict[int, asyncio.Timeout] = {}
        self._overtaken = set[int]()
        self._failures: dict[int, int] = {}
        self._again: dict[int, None] = {}
        self._dead: deque[str] = deque(maxlen=REMEMBERED_DEAD)

    def start(self, group: int) -> None:
        self.running[group] = self.tasks.create_task(self._run_group(group), name=f"group {group}")

    def stop(self) -> None:
        for task in self.running.values():
            task.cancel()

    def worker_lost(self, instance: str, why: str, running: Iterable[int]) -> None:
        self._dead.append(instance)
        if (poison := self._crashes.record_death(running, self._gate.groups())) is not None:
            self.poison(poison, f"{instance}: {why}")
        for group in self.tracker.groups_at(instance):
            self.lost(group, f"{instance}: {why}")

    def rows_lost(self, cuts: Cuts, why: str) -> None:
        """Restarts the groups of the cuts with rows at a dead worker, or all of them when none is known to have any."""
        at_dead = [row.group for row in cuts.batch if any(stored_by(row, instance) for instance in self._dead)]
        for group in dict.fromkeys(at_dead or [row.group for row in cuts.batch]):
            self.lost(group, why)

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

    def poison(self, group: int, reason: str) -> None:
        prompt, _ = self.prompts(group)
        self.tracker.observe(GroupPoisoned(group, prompt, reason))
        self.tracker.drop(group, self._open(group), POISON)
        self._end_attempt(group)

    def start_again(self) -> None:
        """Rolls out the groups that lost rows after their attempt had ended, when `lost` could not start tasks."""
        again = self._again
        self._again = {}
        for group in again:
            if group not in self.running and self._gate.members(group, Stage.RUNNING):
                self.start(group)

    async def _run_group(self, group: int) -> None:
        while self._unfinished(group):
            async with self._crashes.isolation(group):
                deaths = self._crashes.deaths
                # The group may have finished while it waited for the isolation.
                failure = await self._try(group) if self._unfinished(group) else ""
            if failure and self._crashes.deaths > deaths and self._open(group):
                self.tracker.restart(group, failure)
            elif failure:
                self._failed(group, failure)
        del self.running[group]

    def _unfinished(self, group: int) -> bool:
        return bool(self._gate.members(group, *OPEN)) or self._gate.awaits(group)

    def _end_attempt(self, group: int) -> None:
        """Ends the running attempt, if there is one: a newer one overtakes it, or the group is dropped."""
        if group in self._scopes and group not in self._overtaken:
            self._overtaken.add(group)
            self._scopes[group].reschedule(asyncio.get_running_loop().time())

    async def _try(self, group: int) -> str:
        """Makes one attempt; returns why it failed, "" when it succeeded or was overtaken."""
        failure = ""
        try:
            async with asyncio.timeout(None) as self._scopes[group]:
                await self.roll_out(self._attempt(group))
        except* (Retryable, TimeoutError) as failures:
            failure = str(root_cause(failures))
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

    def _attempt(self, group: int) -> Attempt:
        prompt, row = self.prompts(group)
        request = PromptGroup(
            id=group,
            attempt=self._gate.group(group).attempt,
            incarnation=self.tracker.journal.ledger.incarnation,
            prompt=prompt,
            members=self._gate.members(group, Stage.RUNNING),
            seed=group_seed(self.config.seed, group),
            not_before=self._gate.not_before(group),
            temperature=self.config.generation.temperature,
            max_new_tokens=self.config.generation.max_new_tokens,
            deadline=self.config.generation.deadline,
        )
        return Attempt(request, row, compared=not self._gate.awaits(group))

    def _open(self, group: int) -> tuple[int, ...]:
        return self._gate.members(group, *DROPPABLE)

    def _failed(self, group: int, reason: str) -> None:
        if not self._open(group):
            return
        self._failures = {known: count for known, count in self._failures.items() if not self._gate.finished(known)}
        self._failures[group] = failures = self._failures.get(group, 0) + 1
        if failures < ATTEMPTS:
            self.tracker.restart(group, reason)
        else:
            self.poison(group, reason)


def wait_of(task: "asyncio.Task[None] | None") -> str:
    where = where_task_waits(task) if task is not None else ""
    return f"waits in {where}" if where else "waits for asyncrl"

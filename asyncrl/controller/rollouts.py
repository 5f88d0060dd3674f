"""The groups in flight: each is rolled out in a task of its own until no member of it runs any more.

A group is the unit of retry. When a worker dies, what lay there is gone: the members of a group that are not trained
yet are sampled again in a new attempt, with the same seeds. A group that fails three attempts by itself is dropped as
poison, and so is one that is to blame for deaths of workers (suspects.py); an attempt that a death ended is no failure
of the group.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from asyncrl.books import POISON, Books
from asyncrl.errors import Retryable, first
from asyncrl.events import AttemptBegan, GroupPoisoned, Prompt
from asyncrl.protocols.batch import GREEDY
from asyncrl.protocols.messages import PromptGroup
from asyncrl.protocols.seeds import group_seed
from asyncrl.staleness import Stage
from asyncrl.suspects import Suspects

ATTEMPTS = 3
"""Failed attempts after which a group is dropped: one may be chance, two bad luck, a third one is its prompt."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a group, as a page sees it. row: all columns of the prompt's row, for the reward functions.
    compared: the reward of its greedy answer is known, or nobody asks for it."""

    prompts: PromptGroup
    row: dict[str, Any]
    compared: bool = False

    @property
    def greedy(self) -> PromptGroup:
        """The prompt once more, to be answered with the likeliest tokens. That is no sample: `gate.compared` takes it.
        No member is asked for once the group has been compared: a later attempt keeps what an earlier one found."""
        return replace(self.prompts, members=() if self.compared else (GREEDY,), temperature=0.0)


class Prompts(Protocol):
    """Where prompts come from: a pure function of the group's id (and of the run's seed)."""

    def __call__(self, group: int) -> tuple[Prompt, dict[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """How every group is sampled. deadline: seconds a group may take; seed: the run's; epoch: of this resume."""

    temperature: float
    max_new_tokens: int
    deadline: float
    seed: int
    epoch: int

    def attempt(self, prompts: Prompts, group: int, attempt: int, members: tuple[int, ...], not_before: int) -> Attempt:
        """What to ask generation for. members: which samples; not_before: oldest version to start one with."""
        prompt, row = prompts(group)
        return Attempt(
            PromptGroup(
                id=group,
                attempt=attempt,
                epoch=self.epoch,
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


class Rolling:
    """Keeps one task, owned by `tasks`, for each group with a member that is not scored yet.

    roll_out: the page's; returns when every sample asked for was handed to `ready`.
    """

    def __init__(
        self,
        books: Books,
        prompts: Prompts,
        sampling: Sampling,
        suspects: Suspects,
        roll_out: Callable[[Attempt], Awaitable[None]],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._books, self._gate = books, books.gate
        self._prompts, self._sampling, self._suspects = prompts, sampling, suspects
        self._roll_out, self._tasks = roll_out, tasks
        self._alive: dict[int, asyncio.Task[None]] = {}
        self._scopes: dict[int, asyncio.Timeout] = {}
        self._overtaken: dict[int, None] = {}
        self._failures: dict[int, int] = {}
        self._again: dict[int, None] = {}

    def start(self, group: int) -> None:
        """Roll this group out, in a task of its own."""
        self._alive[group] = self._tasks.create_task(self._live(group), name=f"group {group}")

    @property
    def alive(self) -> "Mapping[int, asyncio.Task[None]]":
        """The task of each group that is rolled out, the one begun first before the others."""
        return self._alive

    def stop(self) -> None:
        """Abandon all groups; they stay in flight."""
        for task in self._alive.values():
            task.cancel()

    def lost(self, group: int, reason: str) -> None:
        """Rows of this group are gone: a new attempt begins, and one that runs ends where it is."""
        if self._open(group):
            self._restart(group, reason)
        if group in self._scopes:
            self._end_attempt(group)
        else:
            self._again[group] = None

    def poison(self, group: int, reason: str) -> None:
        """What is left of this group is dropped, for good."""
        prompt, _ = self._prompts(group)
        self._books.observe(GroupPoisoned(group, prompt, reason))
        self._books.drop(group, self._open(group), POISON)
        if group in self._scopes:
            self._end_attempt(group)

    def start_again(self) -> None:
        """Roll out those that lost rows after their attempt. Not at once: the news comes at any time, also when the run
        ends and takes no more tasks."""
        again, self._again = self._again, {}
        for group in again:
            if group not in self._alive and self._gate.members(group, Stage.RUNNING):
                self.start(group)

    async def _live(self, group: int) -> None:
        while self._unfinished(group):
            async with self._suspects.turn(group):
                deaths = self._suspects.deaths
                failure = await self._try(group) if self._unfinished(group) else ""  # while it waited for its turn
            if failure and self._suspects.deaths > deaths and self._open(group):
                self._restart(group, failure)
            elif failure:
                self._failed(group, failure)
        del self._alive[group]

    def _unfinished(self, group: int) -> bool:
        return bool(self._gate.members(group, Stage.RUNNING, Stage.SCORING)) or self._gate.awaits(group)

    def _end_attempt(self, group: int) -> None:
        """The one that runs; what ends it is known."""
        if group not in self._overtaken:
            self._overtaken[group] = None
            self._scopes[group].reschedule(asyncio.get_running_loop().time())

    async def _try(self, group: int) -> str:
        """One attempt; returns why it failed, "" when it did not, or when another one overtook it."""
        failure = ""
        try:
            async with asyncio.timeout(None) as self._scopes[group]:
                await self._roll_out(self._attempt(group))
        except* (Retryable, TimeoutError) as failures:
            failure = str(first(failures))
        finally:
            del self._scopes[group]
            overtaken = self._overtaken.pop(group, "no") is None
        missing = self._gate.members(group, Stage.RUNNING, Stage.SCORING)
        unfinished = f"the attempt ended without samples {missing}" if missing else self._not_compared(group)
        return "" if overtaken else failure or unfinished

    def _not_compared(self, group: int) -> str:
        return "the attempt ended without the reward of a greedy answer" if self._gate.awaits(group) else ""

    def _attempt(self, group: int) -> Attempt:
        members, not_before = self._gate.members(group, Stage.RUNNING), self._gate.not_before(group)
        attempt = self._sampling.attempt(self._prompts, group, self._books.attempt(group), members, not_before)
        attempt = replace(attempt, compared=not self._gate.awaits(group))
        self._books.observe(AttemptBegan(attempt.prompts))
        return attempt

    def _open(self, group: int) -> tuple[int, ...]:
        """Members that are neither trained nor dropped nor just being trained."""
        return self._gate.members(group, Stage.RUNNING, Stage.SCORING, Stage.READY)

    def _restart(self, group: int, reason: str) -> None:
        self._books.restart(group, reason, self._failures.get(group, 0))

    def _failed(self, group: int, reason: str) -> None:
        if not self._open(group):
            return
        self._failures = {known: count for known, count in self._failures.items() if not self._gate.finished(known)}
        self._failures[group] = failures = self._failures.get(group, 0) + 1
        if failures < ATTEMPTS:
            self._restart(group, reason)
        else:
            self.poison(group, reason)

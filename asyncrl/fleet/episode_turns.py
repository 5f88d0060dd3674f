"""Samples a prompt to the end of each sample: one answer, or an episode whose turns an environment answers.

    reset ── opening ──> generate ──> rows ── step ── the episode goes on ──> generate (continues) ──> ...
                                        └── it has ended ──> finished

The samples of a group go on independently. References travel, rows do not. A request that continues rows begins with
them: a worker died, and the environment kept the turns before.
"""

from asyncio import TaskGroup
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.concurrency import one_error
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.batch import BatchRef, RowRef
from asyncrl.protocols.messages import PromptGroup
from asyncrl.protocols.service_contracts import Environment, Generation

TakeSamples = Callable[[BatchRef], None]


def ignore(samples: BatchRef) -> None:
    """Takes samples whose turns nobody continues after a death."""


async def sample_group(
    fleet: Fleet, prompts: PromptGroup, row: dict[str, Any], finished: TakeSamples, answered: TakeSamples = ignore
) -> None:
    """Samples the members of a group; `finished` takes them as they end. answered: takes the rows of episodes that go
    on, as the environment stored them. row: the row of the prompt."""
    await sample_turns(fleet.generation, fleet.environment, prompts, row, finished, answered)


async def sample_turns(
    generation: Generation,
    environment: Environment | None,
    prompts: PromptGroup,
    row: dict[str, Any],
    finished: TakeSamples,
    answered: TakeSamples = ignore,
) -> None:
    """Does what `sample_group` does, with these services. environment: None where each sample is one answer. Raises the
    error of a call bare, as a call alone does."""
    if environment is None:
        async for samples in generation.generate(prompts):
            finished(samples)
    elif prompts.members:
        opening = await environment.reset(prompts, row)
        begun = replace(prompts, prompt=opening.prompt, tools=opening.tools)
        with one_error():
            async with TaskGroup() as tasks:
                episodes = _Episodes(generation, environment, row, finished, answered, tasks)
                for part in _begun_and_continued(begun):
                    tasks.create_task(episodes.sample(part))


@dataclass(frozen=True, slots=True)
class _Episodes:
    """The episodes of a group. tasks: one for each answer that is awaited."""

    generation: Generation
    environment: Environment
    row: dict[str, Any]
    finished: TakeSamples
    answered: TakeSamples
    tasks: TaskGroup

    async def sample(self, prompts: PromptGroup) -> None:
        """Samples the next turn of these members."""
        before = {row.member: row for row in prompts.continues or ()}
        async for samples in self.generation.generate(prompts):
            ended = [_ended_before(row, before, prompts.attempt) for row in samples]
            if over := tuple(row for row in ended if row is not None):
                self.finished(BatchRef(over))
            said = tuple(row for row, end in zip(samples, ended, strict=True) if end is None)
            if said:
                self.tasks.create_task(self._answer(prompts, BatchRef(said)))

    async def _answer(self, prompts: PromptGroup, said: BatchRef) -> None:
        """Lets the environment answer, and goes on with the samples whose episode does."""
        answered = await self.environment.step(said, self.row)
        over = tuple(row for row in answered if row.finish)
        going_on = tuple(row for row in answered if not row.finish)
        if over:
            self.finished(BatchRef(over))
        if going_on:
            self.answered(BatchRef(going_on))
            members = tuple(row.member for row in going_on)
            await self.sample(replace(prompts, members=members, continues=BatchRef(going_on)))


def _begun_and_continued(prompts: PromptGroup) -> list[PromptGroup]:
    """Returns the request for members that begin, and the one for those whose rows it continues."""
    rows = tuple(row for row in prompts.continues or () if row.member in prompts.members)
    continued = tuple(row.member for row in rows)
    begun = tuple(member for member in prompts.members if member not in continued)
    parts = [replace(prompts, members=begun, continues=None)] if begun else []
    return parts + ([replace(prompts, members=continued, continues=BatchRef(rows))] if rows else [])


def _ended_before(row: RowRef, before: dict[int, RowRef], attempt: int) -> RowRef | None:
    """Returns the finished sample of an episode that had no room for another turn; None after a turn. It is the row
    that the environment stored, which has all rewards."""
    known = before.get(row.member)
    if known is None or row.turns != known.turns:
        return None
    return known._replace(finish=row.finish, attempt=attempt)

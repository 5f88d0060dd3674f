"""Samples a group, for all algorithms: single answers, or episodes where an environment is configured."""

from asyncio import TaskGroup
from collections.abc import Callable, Coroutine
from typing import Any

from asyncrl.controller.controller import Controller
from asyncrl.controller.rollouts import Attempt
from asyncrl.fleet.episode_turns import sample_group
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.batch import BatchRef

ScoreSamples = Callable[[Fleet, Controller, Attempt, BatchRef], Coroutine[Any, Any, None]]
"""The `score` of an algorithm, which ends with `control.ready`."""


async def play(fleet: Fleet, control: Controller, group: Attempt, score: ScoreSamples) -> None:
    """Samples one prompt; samples are scored as soon as they finish, while others of the group still run."""
    async with TaskGroup() as tasks:

        def finished(samples: BatchRef) -> None:
            control.generated(samples)
            tasks.create_task(score(fleet, control, group, samples))

        await sample_group(fleet, group.prompts, group.row, finished, control.answered)


async def play_greedily(fleet: Fleet, group: Attempt) -> BatchRef:
    """Samples the greedy answer of a group; there is none once an earlier attempt was compared with it."""
    answers: list[BatchRef] = []
    await sample_group(fleet, group.greedy, group.row, answers.append)
    return BatchRef.join(answers)

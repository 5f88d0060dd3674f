"""GRPO (DeepSeekMath, arXiv 2402.03300): samples of one prompt are compared with each other.

`control` is the controller: it draws groups, calls `roll_out` for each in a task of its own, and restarts those whose
worker died. Both functions pass references only; rows go straight from the worker that made them to the trainer.
"""

from asyncio import TaskGroup

from asyncrl.algorithms.play_episode import play
from asyncrl.controller.controller import Algorithm, Controller
from asyncrl.controller.rollouts import Attempt
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.batch import BatchRef


async def roll_out(fleet: Fleet, control: Controller, group: Attempt) -> None:
    """Samples one prompt; samples are scored as soon as they finish, while others of the group still run."""
    await play(fleet, control, group, score)


async def score(fleet: Fleet, control: Controller, group: Attempt, samples: BatchRef) -> None:
    """Asks for reward and reference log-probabilities of finished samples, side by side."""
    if fleet.reference is None:
        return control.ready(samples, await fleet.reward.score(samples, group.row))
    async with TaskGroup() as tasks:
        scores = tasks.create_task(fleet.reward.score(samples, group.row))
        samples = control.holds(await fleet.reference.logprobs(samples))
    control.ready(samples, scores.result())


async def train(fleet: Fleet, control: Controller) -> None:
    """Trains whenever enough samples are ready; new weights are on their way to generation when a step returns."""
    async for iteration in control.iterations():
        with iteration as cuts:
            control.trained(await fleet.training.step(cuts))


ALGORITHM = Algorithm(roll_out, train)

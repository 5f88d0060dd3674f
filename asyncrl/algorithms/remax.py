"""ReMax (arXiv 2310.10505): each sample is compared with the greedy answer to its prompt.

ReMax adds to GRPO one more answer a group, of the likeliest tokens. The samples of the group are compared with its
reward and train once it is known. The answer itself is never trained.
"""

from asyncio import TaskGroup

from asyncrl.algorithms.play_episode import play, play_greedily
from asyncrl.controller.controller import Algorithm, Controller
from asyncrl.controller.rollouts import Attempt
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.batch import BatchRef


async def roll_out(fleet: Fleet, control: Controller, group: Attempt) -> None:
    """Samples one prompt; samples are scored as soon as they finish, while others of the group still run."""
    async with TaskGroup() as tasks:
        tasks.create_task(compare(fleet, control, group))
        await play(fleet, control, group, score)


async def compare(fleet: Fleet, control: Controller, group: Attempt) -> None:
    """Asks for the greedy answer, the baseline of ReMax, and its reward."""
    answer = await play_greedily(fleet, group)
    if len(answer):
        control.compared(answer, await fleet.reward.score(answer, group.row))


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

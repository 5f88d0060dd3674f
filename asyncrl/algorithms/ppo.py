"""PPO (arXiv 1707.06347): each token is compared with what a critic expected before it.

PPO adds a critic to GRPO. It values samples beside reward and reference, and learns from each batch beside the trainer.
Rewards stay with the samples; trainer and critic make advantages of rewards and values where they read the rows.
"""

from asyncio import TaskGroup

from asyncrl.algorithms.play_episode import play
from asyncrl.concurrency import gather
from asyncrl.controller.controller import Algorithm, Controller
from asyncrl.controller.rollouts import Attempt
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.service_contracts import Critic


async def roll_out(fleet: Fleet, control: Controller, group: Attempt) -> None:
    """Samples one prompt; samples are scored as soon as they finish, while others of the group still run."""
    await play(fleet, control, group, score)


async def score(fleet: Fleet, control: Controller, group: Attempt, samples: BatchRef) -> None:
    """Asks for reward, values and reference log-probabilities of finished samples, side by side."""
    async with TaskGroup() as tasks:
        scores = tasks.create_task(fleet.reward.score(samples, group.row))
        valued = tasks.create_task(critic_of(fleet).values(samples))
        if fleet.reference is not None:
            samples = control.holds(await fleet.reference.logprobs(samples))
    control.ready(control.holds(samples.also_at(valued.result())), scores.result())


async def train(fleet: Fleet, control: Controller) -> None:
    """Trains policy and critic whenever enough samples are ready."""
    async for iteration in control.iterations():
        with iteration as cuts:
            learnt, report = await gather(critic_of(fleet).update(cuts), fleet.training.step(cuts))
            control.trained(report, learnt)


def critic_of(fleet: Fleet) -> Critic:
    assert fleet.critic is not None, 'no critic runs: write preset = "ppo"'
    return fleet.critic


ALGORITHM = Algorithm(roll_out, train)

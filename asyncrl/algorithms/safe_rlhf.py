"""Safe RLHF (arXiv 2310.12773): the most reward at which answers cost no more than `cost.limit` on average.

Safe RLHF adds to PPO a cost for each sample, and a second critic that learns what costs to expect. The trainer
weighs the advantages of both with a multiplier, which rises while the mean cost of a batch is above the limit; to the
policy's loss it may add that of texts which the policy shall not forget (`task.pretrain`).
"""

from asyncio import TaskGroup

from asyncrl.algorithms.play_episode import play
from asyncrl.algorithms.ppo import critic_of
from asyncrl.concurrency import gather
from asyncrl.controller.controller import Algorithm, Controller
from asyncrl.controller.rollouts import Attempt
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.service_contracts import Critic, Reward


async def roll_out(fleet: Fleet, control: Controller, group: Attempt) -> None:
    """Samples one prompt; samples are scored as soon as they finish, while others of the group still run."""
    await play(fleet, control, group, score)


async def score(fleet: Fleet, control: Controller, group: Attempt, samples: BatchRef) -> None:
    """Asks for reward, cost, values of both and reference log-probabilities of finished samples, side by side."""
    async with TaskGroup() as tasks:
        scores = tasks.create_task(fleet.reward.score(samples, group.row))
        costs = tasks.create_task(cost_of(fleet).score(samples, group.row))
        valued = tasks.create_task(critic_of(fleet).values(samples))
        cost_valued = tasks.create_task(cost_critic_of(fleet).values(samples))
        if fleet.reference is not None:
            samples = control.holds(await fleet.reference.logprobs(samples))
    samples = samples.also_at(cost_valued.result())
    control.ready(control.holds(samples.also_at(valued.result())), scores.result(), costs.result())


async def train(fleet: Fleet, control: Controller) -> None:
    """Trains policy and both critics whenever enough samples are ready."""
    async for iteration in control.iterations():
        with iteration as cuts:
            critics = gather(critic_of(fleet).update(cuts), cost_critic_of(fleet).update(cuts))
            learnt, report = await gather(critics, fleet.training.step(cuts))
            control.trained(report, *learnt)


def cost_of(fleet: Fleet) -> Reward:
    assert fleet.cost is not None, 'no cost service runs: write preset = "safe_rlhf"'
    return fleet.cost


def cost_critic_of(fleet: Fleet) -> Critic:
    assert fleet.cost_critic is not None, 'no cost critic runs: write preset = "safe_rlhf"'
    return fleet.cost_critic


ALGORITHM = Algorithm(roll_out, train)

"""PPO and SAC on environments: a policy acts, and each sample has its transitions, their rewards among them.

The trainer knows the rest: PPO compares the rewards with its values (engines/acting/ppo_learner.py), SAC adds the
transitions to its replay (engines/acting/sac_learner.py).
"""

from asyncrl.controller.controller import Algorithm, Controller
from asyncrl.controller.rollouts import Attempt
from asyncrl.fleet.fleet import Fleet
from asyncrl.protocols.messages import Score


async def roll_out(fleet: Fleet, control: Controller, group: Attempt) -> None:
    """Acts in all environments of a worker; samples are ready as soon as they are full."""
    async for samples in fleet.generation.generate(group.prompts):
        control.generated(samples)
        control.ready(samples, [Score(row.reward, {}) for row in samples])


async def train(fleet: Fleet, control: Controller) -> None:
    """Trains whenever enough samples are ready; new weights are on their way to generation when a step returns."""
    async for iteration in control.iterations():
        with iteration as cuts:
            control.trained(await fleet.training.step(cuts))


ALGORITHM = Algorithm(roll_out, train)

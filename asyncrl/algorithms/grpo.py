"""GRPO (DeepSeekMath, arXiv 2402.03300): samples of one prompt are judged against each other.

`gate` is the controller: it draws groups, calls `roll_out` for each in a task of its own, and restarts those whose
worker died. Both functions pass references only; rows go straight from the worker that made them to the trainer.
"""

from asyncio import TaskGroup

from asyncrl.controller import Controller, Page
from asyncrl.fleet import Fleet
from asyncrl.protocols.batch import BatchRef
from asyncrl.rolling import Attempt


async def roll_out(fleet: Fleet, gate: Controller, group: Attempt) -> None:
    """Sample one prompt; samples are judged as soon as they are there, while their siblings still run."""
    async with TaskGroup() as tasks:
        async for samples in fleet.generation.generate(group.prompts):
            gate.generated(samples)
            tasks.create_task(judge(fleet, gate, group, samples))


async def judge(fleet: Fleet, gate: Controller, group: Attempt, samples: BatchRef) -> None:
    """Reward and reference log-probabilities of samples that finished together, side by side."""
    async with TaskGroup() as tasks:
        scores = tasks.create_task(fleet.reward.score(samples, group.row))
        if fleet.reference is not None:
            samples = gate.holds(await fleet.reference.logprobs(samples))
    gate.ready(samples, scores.result())


async def train(fleet: Fleet, gate: Controller) -> None:
    """Train whenever enough samples are ready; new weights are on their way to generation when a step returns."""
    async for iteration in gate.iterations():
        with iteration as cuts:
            gate.trained(await fleet.training.step(cuts))


PAGE = Page(roll_out, train)

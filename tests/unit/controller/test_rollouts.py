"""The request of an attempt for generation, and prompts that generation refuses."""

import sys
from pathlib import Path

import pytest

from asyncrl.algorithms import grpo
from asyncrl.controller.algorithm import Algorithm
from asyncrl.controller.controller import Controller
from asyncrl.controller.rollouts import Attempt, Sampling
from asyncrl.errors import TaskError
from asyncrl.fleet.fleet import Fleet

sys.path.insert(0, str(Path(__file__).parents[1]))
from scene import Scene


@pytest.mark.trap("redone")
@pytest.mark.trap("seeds")
def test_every_attempt_at_a_group_has_its_seed_and_its_prompt_and_other_groups_have_others() -> None:
    sampling = Sampling(temperature=1.0, max_new_tokens=8, deadline=60.0, seed=5, incarnation=0)
    after_a_resume = Sampling(temperature=1.0, max_new_tokens=8, deadline=60.0, seed=5, incarnation=2)

    def asked(group: int, attempt: int, sampling: Sampling = sampling) -> tuple[int, object]:
        prompts = sampling.attempt(lambda id: (f"prompt {id}", {}), group, attempt, (0, 1), attempt).prompts
        return prompts.seed, prompts.prompt

    assert asked(3, 0) == asked(3, 1) == asked(3, 2) == asked(3, 4, after_a_resume)
    assert len({asked(group, 0) for group in range(20)}) == 20


def test_a_prompt_that_generation_refuses_is_named() -> None:
    async def refuse(fleet: Fleet, control: Controller, group: Attempt) -> None:
        if group.prompts.id == 1:
            raise TaskError("the prompt has 9 tokens")
        await grpo.roll_out(fleet, control, group)

    scene = Scene()
    scene.algorithm = Algorithm(refuse, grpo.train)
    with pytest.raises(TaskError, match="row 1 of the scene: the prompt has 9 tokens"):
        scene.play()

"""What an attempt at a group asks generation for."""

import pytest

from asyncrl.rolling import Sampling


@pytest.mark.trap("redone")
@pytest.mark.trap("seeds")
def test_every_attempt_at_a_group_has_its_seed_and_its_prompt_and_other_groups_have_others() -> None:
    sampling = Sampling(temperature=1.0, max_new_tokens=8, deadline=60.0, seed=5, epoch=0)
    after_a_resume = Sampling(temperature=1.0, max_new_tokens=8, deadline=60.0, seed=5, epoch=2)

    def asked(group: int, attempt: int, sampling: Sampling = sampling) -> tuple[int, object]:
        prompts = sampling.attempt(lambda id: (f"prompt {id}", {}), group, attempt, (0, 1), attempt).prompts
        return prompts.seed, prompts.prompt

    assert asked(3, 0) == asked(3, 1) == asked(3, 2) == asked(3, 4, after_a_resume)
    assert len({asked(group, 0) for group in range(20)}) == 20

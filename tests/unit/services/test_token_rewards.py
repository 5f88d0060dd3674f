"""Rewards of single tokens: what functions are told, what is stored for the trainer, and what a wrong list says."""

from typing import Any

import numpy as np
import pytest

from asyncrl.config.schema import Config
from asyncrl.environments.transcript import transcript_column
from asyncrl.errors import RewardError
from asyncrl.protocols.batch import BatchRef, RowRef
from asyncrl.rewards.functions import function_problems
from asyncrl.services.reward import RewardService
from tests.unit.services.conftest import Serve, put_row, store_read_by

FUNCTIONS = """
def vowels(sample):
    assert len(sample.token_ids) == len(sample.token_texts) == sample.tokens
    return [float(text == "token_id:97") for text in sample.token_texts]

def short(sample):
    return [1.0] * (sample.tokens - sample.member)

def trls(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns):
    log_metric("step", trainer_state.global_step)
    log_extra("last", [ids[-1] for ids in completion_ids])
    return [len(ids) / trainer_state.max_steps for ids in completion_ids]

def first_turn(sample):
    first = sample.turn_tokens[0]
    return [0.5] * first + [0.0] * (sample.tokens - first)
"""
ROW = {"prompt": "p", "answer": "banana"}


def config(*functions: Any, preset: str = "ppo", **sections: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"name": "m"},
            "task": {"prompts": "rows.jsonl"},
            "algorithm": {"preset": preset},
            "reward": {"functions": functions},
            **sections,
        }
    )


@pytest.fixture
def serving(serve: Serve) -> Serve:
    return lambda settings, **changes: serve(RewardService, "reward", settings, **changes)


def plain(service: RewardService, text: str, member: int = 0, group: int = 4) -> RowRef:
    return put_row(store_read_by(service), text=text, response_ids=[*text.encode()], member=member, group=group)


async def test_a_critic_finds_the_weighted_rewards_of_tokens_in_a_row(mine: str, serving: Serve) -> None:
    by_token = {"use": f"{mine}:vowels", "by_token": True, "weight": 0.5}
    async with serving(config(by_token, "exact_match")) as service:
        ref = plain(service, "banana")
        (score,) = await service.score(BatchRef((ref,)), ROW)
        assert (score.reward, score.terms) == (2.5, {"vowels": 3.0, "exact_match": 1.0})
        (found,) = service.rows.read(score.place, ["token_rewards"])
        assert found.tolist() == [0.0, 0.5, 0.0, 0.5, 0.0, 0.5]
        (held_out,) = await service.score(BatchRef((plain(service, "banana", group=-1),)), ROW)
        assert (held_out.reward, held_out.place) == (2.5, None), "an evaluation trains nothing"
        await service.release([ref.name], oldest=0)
        assert service.rows.used == 0


async def test_without_a_critic_the_sum_is_the_reward_and_nothing_is_stored(mine: str, serving: Serve) -> None:
    by_token = {"use": f"{mine}:vowels", "by_token": True}
    async with serving(config(by_token, preset="grpo")) as service:
        (score,) = await service.score(BatchRef((plain(service, "banana"),)), ROW)
        assert (score.reward, score.place, service.rows) == (3.0, None, None)


async def test_a_list_of_another_length_names_the_sample(mine: str, serving: Serve) -> None:
    async with serving(config({"use": f"{mine}:short", "by_token": True})) as service:
        with pytest.raises(RewardError, match=r"short on member 2 of group 4: it returned 4 rewards for the 6 tokens"):
            await service.score(BatchRef((plain(service, "banana", member=2),)), ROW)


async def test_the_tokens_of_all_turns_are_rewarded_beside_the_turns(mine: str, serving: Serve) -> None:
    functions = ({"use": f"{mine}:first_turn", "by_token": True}, "environment")
    row = {
        "text": "a",
        "response_ids": range(9),
        "spans": [2, 3, 4, 0],
        "turn_rewards": np.array([0.0, 2.0], np.float32),
    }
    row["transcript"] = transcript_column([{"role": "assistant", "content": "a"}])
    async with serving(config(*functions, environment={"use": "guess", "max_tokens": 64})) as service:
        ref = put_row(store_read_by(service), **row)._replace(tokens=6, turns=2, given=3)
        (score,) = await service.score(BatchRef((ref,)), ROW)
        assert (score.reward, score.turns) == (3.0, (1.0, 2.0))
        assert score.by_turn(2) == (1.0, 2.0)
        (found,) = service.rows.read(score.place, ["token_rewards"])
        assert found.tolist() == [0.5, 0.5, 0.0, 0.0, 0.0, 0.0]


def test_templates_and_costs_give_no_rewards_of_tokens() -> None:
    (problem,) = function_problems(config({"use": "exact_match", "by_token": True}))
    assert "exact_match gives one reward to a sample; remove by_token = true" in problem.text
    costs = {"functions": [{"use": "mine.py:vowels", "by_token": True}], "limit": 0.5}
    settings = config("exact_match", preset="safe_rlhf", cost=costs)
    (problem,) = function_problems(settings, "cost")
    assert "a cost belongs to a whole sample" in problem.text


@pytest.mark.parametrize("group", [4, -1])
async def test_a_function_of_trl_gets_token_ids_and_step_and_logs_terms(mine: str, serving: Serve, group: int) -> None:
    settings = config(f"trl:{mine}:trls", preset="grpo", steps=100)
    async with serving(settings) as service:
        ref = plain(service, "banana", group=group)._replace(last=7)
        (score,) = await service.score(BatchRef((ref,)), ROW)
        assert (score.reward, score.terms) == (0.06, {"trls": 0.06, "trls/step": 7.0, "trls/last": 97.0})

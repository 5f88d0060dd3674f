"""What tokens are credited with: GAE, the KL in the reward, costs, what the multiplier does, and that ranks agree."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.schema import Config
from asyncrl.engines.ranks.rank_mesh import Ranks
from asyncrl.engines.training.critic_trainer import CriticTrainer
from asyncrl.engines.training.micro_batches import mask_rows
from asyncrl.engines.training.policy_loss import set_token_advantages, token_advantages
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import COST, TrainRow
from asyncrl.objectives.advantages import Multiplier
from tests.unit.engines.training.tiny_training import (
    INCARNATION,
    VERSION,
    changed,
    drawn,
    make_config,
    make_rows,
    side_by_side,
    step,
)

LIMIT = 0.25
ONE_RANK = Ranks()


def safe(**sections: Any) -> Config:
    """safe(cost={...}, algorithm={...}, ...) -> Config of Safe RLHF."""
    algorithm = {"preset": "safe_rlhf", **sections.pop("algorithm", {})}
    cost = {"functions": ["exact_match"], "limit": LIMIT, **sections.pop("cost", {})}
    return make_config(algorithm=algorithm, cost=cost, **sections)


def costly() -> list[TrainRow]:
    """Rows with a cost, values of both critics and a reference."""
    draw = np.random.default_rng(3)
    return changed(
        make_rows(12, 3),
        values=drawn(0, 0.3, 4),
        cost=lambda _: float(draw.normal()),
        cost_values=drawn(0, 0.3, 5),
        reference_logprobs=drawn(-4, 0.3, 6),
    )


def gae(rewards: np.ndarray, values: np.ndarray, gamma: float, lambda_: float) -> np.ndarray:
    """By its definition: the sum over later tokens of (gamma lambda)^l delta_(t+l)."""
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    powers = (gamma * lambda_) ** np.arange(len(deltas))
    return np.array([np.dot(deltas[token:], powers[: len(deltas) - token]) for token in range(len(deltas))])


def at_end(score: float, tokens: int, along: Any = 0.0) -> np.ndarray:
    rewards = np.zeros(tokens) + along
    rewards[-1] += score
    return rewards


def standardized(parts: list[np.ndarray]) -> np.ndarray:
    flat = np.concatenate(parts)
    return (flat - flat.mean()) / (flat.std(ddof=1) + 1e-4)


def test_half_of_the_kl_is_taken_off_the_rewards_and_half_added_to_the_costs() -> None:
    """r_t = r^RM_t + beta/2 r^KL_t, c_t = c^CM_t - beta/2 r^KL_t with r^KL_t = -log(pi / pi_ref), scores at the end."""
    algorithm = safe(algorithm={"kl": 0.3, "gamma": 0.9, "gae_lambda": 0.8}).algorithm
    for row in costly():
        kl = row.logprobs.astype(np.float64) - row.reference_logprobs
        of_reward = gae(at_end(row.advantage, len(kl), -0.15 * kl), row.values.astype(float), 0.9, 0.8)
        of_cost = gae(at_end(row.cost, len(kl), 0.15 * kl), row.cost_values.astype(float), 0.9, 0.8)
        np.testing.assert_allclose(token_advantages(row, algorithm), of_reward, atol=1e-12)
        np.testing.assert_allclose(token_advantages(row, algorithm, COST), of_cost, atol=1e-12)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("price", [None, 2.0])
def test_tokens_are_credited_with_rewards_values_and_costs_then_standardized(
    normalize: bool, kl: float, price: float | None
) -> None:
    """Over all tokens, stale ones too: masking re-weights nothing, and a token keeps its advantage in the batch."""
    rows = changed(costly(), versions=lambda row: np.arange(len(row.versions)) + VERSION - 10)
    settings = {"normalize_std": normalize, "kl": kl, "gamma": 0.97}
    config = make_config(algorithm={"preset": "ppo", **settings}) if price is None else safe(algorithm=settings)
    found = mask_rows(rows, INCARNATION, VERSION, 2, "mask", False)
    assert 0 < sum(item.live_tokens for item in found) < sum(len(item.live) for item in found)
    multiplier = None if price is None else Multiplier(price, 0, 0, 9)
    set_token_advantages(found, config.algorithm, 0.0, ONE_RANK, multiplier)
    expected = []
    for row in rows:
        penalty = kl * (row.logprobs.astype(np.float64) - row.reference_logprobs)
        share = 1.0 if price is None else 0.5
        tokens = len(penalty)
        own = gae(at_end(row.advantage, tokens, -share * penalty), row.values.astype(float), 0.97, 0.95)
        if price is not None:
            of_cost = gae(at_end(row.cost, tokens, share * penalty), row.cost_values.astype(float), 0.97, 0.95)
            own = (own - price * of_cost) / (1 + price)
        expected.append(own)
    flat = standardized(expected) if normalize else np.concatenate(expected)
    np.testing.assert_allclose(np.concatenate([item.advantages for item in found]), flat, atol=1e-9)


@pytest.mark.trap("truncated")
def test_answers_that_are_left_out_as_truncated_are_in_no_standardization() -> None:
    rows = costly()
    algorithm = make_config(algorithm={"preset": "ppo", "normalize_std": True}).algorithm

    def credited(reward: float) -> list[np.ndarray]:
        batch = [dataclasses.replace(rows[0], truncated=True, advantage=reward), *rows[1:]]
        masked = mask_rows(batch, INCARNATION, VERSION, 2, "mask", True)
        set_token_advantages(masked, algorithm, 0.0, ONE_RANK)
        return [np.asarray(item.advantages) for item in masked[1:]]

    for first, second in zip(credited(0.0), credited(50.0), strict=True):
        np.testing.assert_array_equal(first, second)


def multiplier(engine: PolicyTrainer) -> Multiplier:
    assert engine.multiplier is not None
    return engine.multiplier


def test_a_step_takes_one_multiplier_and_then_moves_it(tiny: Path, tmp_path: Path) -> None:
    """It is part of the checkpoint, and a step that trains nothing leaves it."""
    rows = costly()
    config = safe(training={"updates": 3})
    engine = PolicyTrainer(config, tiny)
    assert step(engine, changed(rows, versions=lambda row: row.versions - 9)).skipped == "stale"
    assert step(engine, changed(rows, logprobs=lambda row: row.logprobs * np.nan)).skipped == "not finite"
    expected = Multiplier(1.0, 0.1, LIMIT, 5.0)
    for _ in range(3):
        assert step(engine, rows).metrics["cost/multiplier"] == pytest.approx(expected.value, rel=1e-12)
        expected.update(float(np.mean([row.cost for row in rows])))
    assert multiplier(engine).value == pytest.approx(expected.value, rel=1e-12) != 1.0
    engine.save(tmp_path, {})
    resumed, _ = PolicyTrainer.resume(config, tmp_path)
    assert multiplier(resumed).value == multiplier(engine).value
    assert step(engine, rows).metrics == step(resumed, rows).metrics


@pytest.mark.parametrize("first", [4, 0])
def test_ranks_agree_on_multiplier_and_advantages(first: int, tiny: Path, thread_ranks: Callable) -> None:
    rows = costly()
    config = safe()
    alone = PolicyTrainer(config, tiny)
    expected = step(alone, rows).metrics
    engines = [PolicyTrainer(config, tiny, rank) for rank in thread_ranks(2)]
    shares = (rows[:first], rows[first:])
    outcomes = side_by_side([lambda e=e, s=s: step(e, s) for e, s in zip(engines, shares, strict=True)])
    for engine, outcome in zip(engines, outcomes, strict=True):
        assert outcome.metrics == pytest.approx(expected, rel=1e-6, abs=1e-6)
        assert multiplier(engine).value == pytest.approx(multiplier(alone).value, rel=1e-12)
    assert multiplier(engines[0]).value == multiplier(engines[1]).value


def test_a_cost_critic_learns_costs_as_a_critic_learns_rewards(tiny: Path) -> None:
    """With the costs of the rows as rewards of others, a critic learns bit for bit the same."""
    config = safe(critic={"learning_rate": 1e-2}, cost_critic={"learning_rate": 1e-2}, training={"updates": 2})
    rows = changed(costly(), cost_valued_at=-2)
    swapped = changed(rows, advantage=lambda row: row.cost, values=lambda row: row.cost_values, valued_at=-2)
    found = {}
    for name, critic, learnt in (
        ("cost_critic", CriticTrainer(config, tiny, COST), rows),
        ("critic", CriticTrainer(config, tiny), swapped),
    ):
        metrics = step(critic, learnt).metrics
        found[name] = {key.removeprefix(f"{name}/"): value for key, value in metrics.items()}
        assert set(metrics) == {f"{name}/{key}" for key in found[name]}
    assert found["cost_critic"] == found["critic"]
    assert found["critic"]["updates"] == 2
    assert torch.isfinite(torch.tensor(list(found["critic"].values()))).all()

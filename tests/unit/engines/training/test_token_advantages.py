"""Costs in a training step: what tokens are credited with, what the multiplier does, and that ranks agree on it."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
from asyncrl.engines.training.training_step import StepOutcome, run_step
from asyncrl.objectives.advantages import Multiplier

INCARNATION = 1
VERSION = 5
LIMIT = 0.25


@pytest.fixture
def safe(make_config: Callable) -> Callable[..., Config]:
    """safe(cost={...}, algorithm={...}, ...) -> Config of Safe RLHF."""

    def make(**sections: Any) -> Config:
        algorithm = {"preset": "safe_rlhf", **sections.pop("algorithm", {})}
        cost = {"functions": ["exact_match"], "limit": LIMIT, **sections.pop("cost", {})}
        return make_config(algorithm=algorithm, cost=cost, **sections)

    return make


@pytest.fixture
def costly(make_rows: Callable) -> Callable[..., list[TrainRow]]:
    """Rows with a cost, values of both critics and a reference."""

    def make(count: int = 12, seed: int = 3) -> list[TrainRow]:
        draw = np.random.default_rng(seed)
        return [
            dataclasses.replace(
                row,
                values=draw.normal(0, 0.3, len(row.versions)).astype(np.float32),
                cost=float(draw.normal()),
                cost_values=draw.normal(0, 0.3, len(row.versions)).astype(np.float32),
                reference_logprobs=draw.normal(-4, 0.3, len(row.versions)).astype(np.float32),
            )
            for row in make_rows(count, seed)
        ]

    return make


def gae(rewards: np.ndarray, values: np.ndarray, gamma: float, lambda_: float) -> np.ndarray:
    """By its definition: the sum over later tokens of (gamma lambda)^l delta_(t+l)."""
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    powers = (gamma * lambda_) ** np.arange(len(deltas))
    return np.array([np.dot(deltas[token:], powers[: len(deltas) - token]) for token in range(len(deltas))])


def test_half_of_the_kl_is_taken_off_the_rewards_and_half_added_to_the_costs(safe: Callable, costly: Callable) -> None:
    """r_t = r^RM_t + beta/2 r^KL_t, c_t = c^CM_t - beta/2 r^KL_t with r^KL_t = -log(pi / pi_ref), scores at the end."""
    algorithm = safe(algorithm={"kl": 0.3, "gamma": 0.9, "gae_lambda": 0.8}).algorithm
    for row in costly():
        kl = row.logprobs.astype(np.float64) - row.reference_logprobs
        rewards = -0.15 * kl
        costs = 0.15 * kl
        rewards[-1] += row.advantage
        costs[-1] += row.cost
        of_reward = token_advantages(row, algorithm)
        of_cost = token_advantages(row, algorithm, COST)
        np.testing.assert_allclose(of_reward, gae(rewards, row.values.astype(float), 0.9, 0.8), atol=1e-12)
        np.testing.assert_allclose(of_cost, gae(costs, row.cost_values.astype(float), 0.9, 0.8), atol=1e-12)


@pytest.mark.parametrize("normalize", [False, True])
def test_tokens_are_credited_with_both_advantages_then_standardized(
    normalize: bool, safe: Callable, costly: Callable
) -> None:
    rows = costly()
    algorithm = safe(algorithm={"normalize_std": normalize}).algorithm
    found = mask_rows(rows, INCARNATION, VERSION, 2, "mask", False)
    set_token_advantages(found, algorithm, 0.0, Ranks(), Multiplier(2, 0, 0, 9))
    expected = []
    for row in rows:
        rewards = np.zeros(len(row.versions))
        costs = np.zeros(len(row.versions))
        rewards[-1] = row.advantage
        costs[-1] = row.cost
        of_reward = gae(rewards, row.values.astype(float), 1.0, 0.95)
        of_cost = gae(costs, row.cost_values.astype(float), 1.0, 0.95)
        expected.append((of_reward - 2 * of_cost) / (1 + 2))
    flat = np.concatenate(expected)
    if normalize:
        flat = (flat - flat.mean()) / (flat.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(np.concatenate([item.advantages for item in found]), flat, atol=1e-10)


def multiplier(engine: PolicyTrainer) -> Multiplier:
    assert engine.multiplier is not None
    return engine.multiplier


def test_a_step_takes_one_multiplier_and_then_moves_it(tiny: Path, safe: Callable, costly: Callable) -> None:
    rows = costly()
    engine = PolicyTrainer(safe(training={"updates": 3, "learning_rate": 1e-3}), tiny)
    expected = Multiplier(1.0, 0.1, LIMIT, 5.0)
    for _ in range(3):
        assert run_step(engine, rows, INCARNATION, VERSION).metrics["cost/multiplier"] == expected.value
        expected.update(float(np.mean([row.cost for row in rows])))
        assert multiplier(engine).value == pytest.approx(expected.value, rel=1e-12)


def test_a_step_that_trains_nothing_leaves_the_multiplier(tiny: Path, safe: Callable, costly: Callable) -> None:
    engine = PolicyTrainer(safe(), tiny)
    stale = [dataclasses.replace(row, versions=row.versions - 9) for row in costly()]
    broken = [dataclasses.replace(row, logprobs=row.logprobs * np.nan) for row in costly()]
    assert run_step(engine, stale, INCARNATION, VERSION).skipped == "stale"
    assert run_step(engine, broken, INCARNATION, VERSION).skipped == "not finite"
    assert multiplier(engine).value == 1.0


def test_the_multiplier_is_part_of_the_checkpoint(tiny: Path, safe: Callable, costly: Callable, tmp_path: Path) -> None:
    config = safe(cost={"multiplier_rate": 3.0})
    rows = costly()
    engine = PolicyTrainer(config, tiny)
    run_step(engine, rows, INCARNATION, VERSION)
    assert multiplier(engine).value != 1.0
    engine.save(tmp_path, {})
    resumed, _ = PolicyTrainer.resume(config, tmp_path)
    assert multiplier(resumed).value == multiplier(engine).value
    found = [run_step(each, rows, INCARNATION, VERSION).metrics for each in (engine, resumed)]
    assert found[0] == found[1]


@pytest.mark.parametrize("first", [4, 0])
def test_ranks_agree_on_multiplier_and_advantages(
    first: int, tiny: Path, safe: Callable, costly: Callable, thread_ranks: Callable
) -> None:
    rows = costly()
    config = safe()
    alone = PolicyTrainer(config, tiny)
    expected = run_step(alone, rows, INCARNATION, VERSION).metrics
    engines = [PolicyTrainer(config, tiny, rank) for rank in thread_ranks(2)]

    def step(engine: PolicyTrainer, share: list[TrainRow]) -> StepOutcome:
        return run_step(engine, share, INCARNATION, VERSION)

    with ThreadPoolExecutor(2) as threads:
        outcomes = list(threads.map(step, engines, (rows[:first], rows[first:]), timeout=60))
    for engine, outcome in zip(engines, outcomes, strict=True):
        assert outcome.metrics == pytest.approx(expected, rel=1e-6, abs=1e-6)
        assert multiplier(engine).value == pytest.approx(multiplier(alone).value, rel=1e-12)
    assert multiplier(engines[0]).value == multiplier(engines[1]).value


def test_a_cost_critic_learns_costs_as_a_critic_learns_rewards(tiny: Path, safe: Callable, costly: Callable) -> None:
    """With the costs of the rows as rewards of others, a critic learns bit for bit the same."""
    config = safe(critic={"learning_rate": 1e-2}, cost_critic={"learning_rate": 1e-2}, training={"updates": 2})
    rows = costly()
    swapped = [dataclasses.replace(row, advantage=row.cost, values=row.cost_values, valued_at=-2) for row in rows]
    found = {}
    for name, critic, learnt in (
        ("cost_critic", CriticTrainer(config, tiny, COST), [dataclasses.replace(r, cost_valued_at=-2) for r in rows]),
        ("critic", CriticTrainer(config, tiny), swapped),
    ):
        metrics = run_step(critic, learnt, INCARNATION, VERSION).metrics
        found[name] = {key.removeprefix(f"{name}/"): value for key, value in metrics.items()}
        assert set(metrics) == {f"{name}/{key}" for key in found[name]}
    assert found["cost_critic"] == found["critic"]
    assert found["critic"]["updates"] == 2
    assert torch.isfinite(torch.tensor(list(found["critic"].values()))).all()

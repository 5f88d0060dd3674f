"""Details of training steps that change what is learnt and that no total shows."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.engines.ranks.rank_mesh import DistributedRanks, Ranks
from asyncrl.engines.training.critic_trainer import CriticTrainer
from asyncrl.engines.training.micro_batches import mask_rows
from asyncrl.engines.training.models_with_heads import frozen_logprobs, load_causal_model
from asyncrl.engines.training.policy_loss import set_token_advantages, token_advantages
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow, batch_digest, train_rows
from asyncrl.engines.training.training_step import run_step
from asyncrl.protocols.batch import Batch, BatchRef, Column, Cuts, RowRef

INCARNATION = 1
VERSION = 5


def logprobs_now(folder: Path, rows: list[TrainRow]) -> list[np.ndarray]:
    model = load_causal_model(folder, "cpu")
    return [frozen_logprobs(model, [row.prompt_ids], [row.response_ids], [1.0], 1024)[0] for row in rows]


def near(folder: Path, rows: list[TrainRow], spread: float) -> list[TrainRow]:
    """The rows with recorded log-probs near the model's own."""
    draw = np.random.default_rng(7)
    return [
        dataclasses.replace(row, logprobs=(now + draw.normal(0, spread, len(now))).astype(np.float32))
        for row, now in zip(rows, logprobs_now(folder, rows), strict=True)
    ]


def test_a_rejection_compares_with_the_start_of_the_step_in_every_update(
    tiny: Path, make_rows: Callable, make_config: Callable
) -> None:
    """With the engine's log-probs in the ratio too: what the first update moves rejects nothing in the second."""
    rows = near(tiny, make_rows(8), 0.25)
    rejection = {"rejection": "token_k3", "rejection_high": 0.02}
    training = {"updates": 2, "learning_rate": 0.02}
    engine = PolicyTrainer(make_config(algorithm=rejection, training=training), tiny)
    outcome = run_step(engine, rows, INCARNATION, VERSION)
    assert outcome.updates == 2
    for row, now, sample in zip(rows, logprobs_now(tiny, rows), outcome.samples, strict=True):
        log_weight = now.astype(np.float64) - row.logprobs
        assert sample.rejected == (np.exp(log_weight) - 1 - log_weight > 0.02).sum()


def test_the_coefficient_of_the_kl_follows_the_kl_and_not_its_term_of_the_loss(
    tiny: Path, make_rows: Callable, make_config: Callable
) -> None:
    draw = np.random.default_rng(8)
    rows = make_rows(8)
    rows = [
        dataclasses.replace(
            row,
            logprobs=now,
            reference_logprobs=(now - 0.3 + draw.normal(0, 0.1, len(now))).astype(np.float32),
        )
        for row, now in zip(rows, logprobs_now(tiny, rows), strict=True)
    ]
    measured = run_step(PolicyTrainer(make_config(algorithm={"kl": 0.5}), tiny), rows, INCARNATION, VERSION).metrics
    target = measured["policy/kl_reference"] / 1.1
    engine = PolicyTrainer(make_config(algorithm={"kl": 0.5, "kl_target": target}), tiny)
    run_step(engine, rows, INCARNATION, VERSION)
    assert engine.kl.value == pytest.approx(0.5 * (1 + 0.1 * 0.1), rel=1e-5)


def test_m2po_takes_its_bound_from_live_tokens_only(tiny: Path, make_rows: Callable, make_config: Callable) -> None:
    """Stale tokens that hardly moved would make room in the budget for live ones that moved far."""
    rows = near(tiny, make_rows(10), 0.5)
    for index, now in enumerate(logprobs_now(tiny, rows)):
        stale = np.arange(len(now)) < len(now) // 2
        row = rows[index]
        hardly_moved = now - 0.01 * np.sign(row.advantage)
        logprobs = np.where(stale, hardly_moved, row.logprobs).astype(np.float32)
        versions = np.where(stale, VERSION - 9, VERSION)
        rows[index] = dataclasses.replace(row, versions=versions, logprobs=logprobs)
    live = [row.versions == VERSION for row in rows]
    assert sum((~each).sum() for each in live) > 0
    logs = np.concatenate(
        [(now - row.logprobs)[own] for row, now, own in zip(rows, logprobs_now(tiny, rows), live, strict=True)]
    )
    advantages = np.repeat([row.advantage for row in rows], [own.sum() for own in live])
    away = np.sort(logs[logs * advantages > 0] ** 2)
    kept = len(away)
    while away[:kept].mean() > 0.04:
        kept -= 1
    config = make_config(algorithm={"preset": "m2po"}, training={"micro_batch_tokens": 100})
    metrics = run_step(PolicyTrainer(config, tiny), rows, INCARNATION, VERSION).metrics
    assert metrics["policy/clip_frac"] == pytest.approx((len(away) - kept) / len(logs))
    assert 0 < kept < len(away)


def valued(rows: list[TrainRow], **changes: object) -> list[TrainRow]:
    draw = np.random.default_rng(4)
    return [
        dataclasses.replace(row, values=draw.normal(0, 0.3, len(row.versions)).astype(np.float32), **changes)
        for row in rows
    ]


def test_advantages_are_standardized_over_all_tokens_stale_ones_too(make_rows: Callable, make_config: Callable) -> None:
    """Masking re-weights nothing: a token keeps the advantage that it has in the whole batch."""
    rows = valued(make_rows(6))
    rows = [dataclasses.replace(row, versions=np.arange(len(row.versions)) + VERSION - 10) for row in rows]
    algorithm = make_config(algorithm={"preset": "ppo"}).algorithm
    masked = mask_rows(rows, INCARNATION, VERSION, 2, "mask", False)
    assert 0 < sum(item.live_tokens for item in masked) < sum(len(item.live) for item in masked)
    set_token_advantages(masked, algorithm, 0.0, Ranks())
    plain = [token_advantages(row, algorithm) for row in rows]
    flat = np.concatenate(plain)
    for item, each in zip(masked, plain, strict=True):
        np.testing.assert_allclose(item.advantages, (each - flat.mean()) / (flat.std(ddof=1) + 1e-4), rtol=1e-9)


@pytest.mark.parametrize(("age", "skipped"), [(2, ""), (3, "stale")])
def test_a_critic_learns_from_no_token_beyond_the_limit(
    age: int, skipped: str, tiny: Path, make_rows: Callable, make_config: Callable
) -> None:
    rows = [dataclasses.replace(row, versions=row.versions - age) for row in valued(make_rows(4))]
    critic = CriticTrainer(make_config(algorithm={"preset": "ppo"}, staleness={"limit": 2}), tiny)
    assert run_step(critic, rows, INCARNATION, VERSION).skipped == skipped


class TwoRanks(DistributedRanks):
    """One of two ranks, of which the other one's tensors are known."""

    def __init__(self, own: Tensor, others: Tensor) -> None:
        self.size = 2
        self._rows = (own, others)

    def gather_equal(self, values: Tensor) -> list[Tensor]:
        own, others = self._rows
        if values.dim() == 1:
            return [torch.tensor([len(own)]), torch.tensor([len(others)])]
        padded = torch.full((max(len(own), len(others)), 3), -7)
        padded[: len(others)] = others
        assert values.shape == padded.shape, "an all-gather needs the same shape on every rank"
        return [values, padded]


@pytest.mark.parametrize(("own", "others"), [(3, 1), (1, 3), (0, 2), (2, 2)])
def test_ranks_with_different_numbers_of_rows_gather_each_row_once(own: int, others: int) -> None:
    rows = torch.arange(3 * (own + others)).reshape(-1, 3)
    gathered = TwoRanks(rows[:own], rows[own:]).gather(rows[:own])
    assert torch.equal(gathered, rows)


def referred(finish: str, cost: float | None = None) -> RowRef:
    return RowRef(0, 0, 0, 1, 2, 3, 5, 5, finish, (), 1.0, 0.5, cost)


@pytest.mark.parametrize(
    ("finish", "truncated"), [("stop", False), ("stop_string", False), ("abort", False), ("length", True)]
)
def test_only_an_answer_that_met_its_token_limit_is_truncated(finish: str, truncated: bool) -> None:
    ids = Column.of([np.arange(3, dtype=np.int32)])
    rows = Batch({"prompt_ids": ids, "response_ids": ids, "logprobs": ids, "versions": ids})
    (row,) = train_rows(BatchRef((referred(finish),)), rows, 1.0)
    assert row.truncated is truncated


def test_batches_that_differ_in_what_a_row_is_worth_have_different_digests() -> None:
    first = referred("stop", 0.25)
    of_turns = (first.with_advantage(0.5, (0.5, 0.25)), first.with_reward(1.0, 0.25, (0.5, 0.5)))
    others = (first, first.with_advantage(0.75), first.with_reward(1.0, 0.5), *of_turns)
    digests = {batch_digest(Cuts(1, 5, BatchRef((row,)), 3, 1)) for row in others}
    assert len(digests) == len(others)

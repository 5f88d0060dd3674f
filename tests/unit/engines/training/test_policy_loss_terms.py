"""Every preset and correction in a training step: what it computes, and that micro-batches do not matter."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.schema import Config
from asyncrl.config.sections.algorithm_config import PRESETS, AlgorithmConfig
from asyncrl.engines.training.micro_batches import MaskedRow, mask_rows, micro_batch
from asyncrl.engines.training.policy_loss import LARGEST, LossTerms, PolicyTotals, mismatch_metrics, policy_loss_terms
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import StepOutcome
from asyncrl.objectives.ragged import Ragged
from asyncrl.telemetry.jsonl import FURTHER_METRICS, METRICS
from tests.unit.engines.training.tiny_training import (
    VERSION,
    assert_close,
    changed,
    drawn,
    gradients,
    logprobs_now,
    make_config,
    make_rows,
    near,
    step,
)

CORRECTIONS: dict[str, dict[str, Any]] = {
    "cap token": {"old_logprobs": "recomputed"},
    "cap sequence": {"old_logprobs": "recomputed", "correction_level": "sequence"},
    "icepop": {"old_logprobs": "recomputed", "correction": "mask"},
    "masked sequence": {"old_logprobs": "recomputed", "correction": "mask", "correction_level": "sequence"},
    "geometric": {"rejection": "geometric", "rejection_low": 0.9, "rejection_high": 1.2},
    "token k3": {"rejection": "token_k3", "rejection_high": 0.02},
    "cap and sequence k2": {"old_logprobs": "recomputed", "rejection": "sequence_k2", "rejection_high": 0.1},
}
ALGORITHMS = {preset: {"preset": preset, "entropy_bonus": 0.01, "kl": 0.1} for preset in PRESETS} | CORRECTIONS
OF_THE_TRAINER = ("loss/", "policy/", "mismatch/", "mask/")
Train = Callable[..., StepOutcome]


def off_policy(folder: Path, count: int = 14, spread: float = 0.25) -> list[TrainRow]:
    """Rows whose recorded log-probs are near the model's own, with a reference, and what critics say."""
    rows = changed(near(folder, make_rows(count), 0), reference_logprobs=lambda row: row.logprobs)
    noise = drawn(0, spread)
    return changed(
        rows,
        logprobs=lambda row: row.logprobs + noise(row),
        reference_logprobs=lambda row: row.logprobs + noise(row),
        values=drawn(0, 0.3, 8),
        cost=lambda row: float(np.sin(row.member)),
        cost_values=drawn(0, 0.3, 9),
    )


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.trap("micro_batches")
def test_gradients_are_those_of_one_micro_batch_and_metrics_are_documented(name: str, tiny: Path) -> None:
    rows = off_policy(tiny)
    algorithm = ALGORITHMS[name]
    cost = {"functions": ["exact_match"], "limit": 0.5} if name == "safe_rlhf" else {}
    found = []
    for budget in (100_000, 150, 36):
        config = make_config(training={"micro_batch_tokens": budget}, algorithm=algorithm, cost=cost)
        outcome, of_parameters = gradients(PolicyTrainer(config, tiny), rows)
        found.append(of_parameters)
        assert set(outcome.metrics) <= {*METRICS, *FURTHER_METRICS}
        if name in PRESETS:
            assert {each for each in METRICS if each.startswith(OF_THE_TRAINER)} <= set(outcome.metrics)
    for other in found[1:]:
        assert_close(other, found[0])


@pytest.mark.parametrize("loss", ["gspo", "gmpo"])
def test_ratios_of_rows_are_those_of_rows_computed_alone(loss: str, tiny: Path, train: Train) -> None:
    rows = off_policy(tiny, 9)
    total = 0.0
    for row, now in zip(rows, logprobs_now(tiny, rows), strict=True):
        log_ratio = now.astype(np.float64) - row.logprobs
        if loss == "gmpo":
            held = np.clip(log_ratio, -0.1, 0.3)
            log_ratio = np.minimum(log_ratio, held) if row.advantage > 0 else np.maximum(log_ratio, held)
        ratio = np.exp(log_ratio.mean())
        clipped = ratio if loss == "gmpo" else np.clip(ratio, 0.8, 1.2)
        total += -min(ratio * row.advantage, clipped * row.advantage)
    bounds = {"clip_low": 0.1, "clip_high": 0.3} if loss == "gmpo" else {"clip_low": 0.2, "clip_high": 0.2}
    outcome = train(rows, algorithm={"loss": loss, "aggregation": "sequence_mean_token_mean"} | bounds)
    assert outcome.metrics["loss/policy"] == pytest.approx(total / 9, rel=1e-5)


@pytest.mark.parametrize("advantage", [None, 0.0])
@pytest.mark.trap("masked_denominators")
def test_what_a_correction_leaves_out_adds_nothing_and_changes_no_other_tokens_weight(
    advantage: float | None, tiny: Path
) -> None:
    """Nor has it an entropy bonus, which is all that is left without advantages."""
    terms = {"kl": 0.1} if advantage is None else {"entropy_bonus": 0.1}
    rows = off_policy(tiny, 6) if advantage is None else changed(off_policy(tiny, 6), advantage=advantage)
    strange = dataclasses.replace(rows[2], logprobs=rows[2].logprobs - 3)
    stale = dataclasses.replace(strange, versions=strange.versions - 9)
    rejection = {"rejection": "sequence_k2", "rejection_high": 1.0}
    outcome, found = gradients(
        PolicyTrainer(make_config(algorithm={**rejection, **terms}), tiny), [*rows[:2], strange, *rows[3:]]
    )
    _, without = gradients(PolicyTrainer(make_config(algorithm=terms), tiny), [*rows[:2], stale, *rows[3:]])
    assert_close(found, without, atol=1e-7)
    tokens = [len(row.logprobs) for row in rows]
    assert outcome.metrics["mask/rejected_fraction"] == pytest.approx(tokens[2] / sum(tokens))


@pytest.mark.parametrize("chunk", [1024, 16])
def test_the_entropys_gradient_is_that_of_finite_differences(chunk: int, tiny: Path) -> None:
    rows = make_rows(3, advantage=0.0)
    config = make_config(algorithm={"entropy_bonus": 1.0}, training={"learning_rate": 0.0, "logits_chunk": chunk})
    trainer = PolicyTrainer(config, tiny)
    outcome, direction = gradients(trainer, rows)
    assert outcome.metrics["loss/entropy"] == pytest.approx(-outcome.metrics["policy/entropy"], rel=1e-5)
    squares = sum(float(each.square().sum()) for each in direction)
    losses = []
    length = 1e-2 / squares**0.5
    for sign in (1.0, -2.0):
        for parameter, each in zip(trainer.optimizer.parameters, direction, strict=True):
            parameter.data += sign * length * each
        losses.append(step(trainer, rows).metrics["loss/entropy"])
    assert (losses[0] - losses[1]) / (2 * length) == pytest.approx(squares, rel=1e-2)


def test_an_adaptive_coefficient_moves_after_each_step_and_is_resumed(tiny: Path, tmp_path: Path) -> None:
    rows = off_policy(tiny, 6)
    config = make_config(algorithm={"kl": 0.5, "kl_target": 1e-4})
    trainer = PolicyTrainer(config, tiny)
    broken = changed(rows, advantage=float("nan"))
    assert step(trainer, broken).skipped == "not finite"
    first, second = (step(trainer, rows).metrics for _ in range(2))
    assert first["policy/kl_coefficient"] == 0.5, "a skipped step leaves it"
    error = np.clip(first["policy/kl_reference"] / 1e-4 - 1, -0.2, 0.2)
    assert second["policy/kl_coefficient"] == pytest.approx(0.5 * (1 + 0.1 * error))
    trainer.save(tmp_path, {})
    resumed, _ = PolicyTrainer.resume(config, tmp_path)
    fixed, _ = PolicyTrainer.resume(make_config(algorithm={"kl": 0.25}), tmp_path)
    found = [step(each, rows).metrics["policy/kl_coefficient"] for each in (trainer, resumed, fixed)]
    assert found[1:] == [found[0], 0.25]


def test_the_coefficient_of_the_kl_follows_the_kl_and_not_its_term_of_the_loss(tiny: Path, train: Train) -> None:
    noise = drawn(-0.3, 0.1)
    rows = changed(near(tiny, make_rows(8), 0), reference_logprobs=lambda row: row.logprobs + noise(row))
    target = train(rows, algorithm={"kl": 0.5}).metrics["policy/kl_reference"] / 1.1
    trainer = PolicyTrainer(make_config(algorithm={"kl": 0.5, "kl_target": target}), tiny)
    step(trainer, rows)
    assert trainer.kl.value == pytest.approx(0.5 * (1 + 0.1 * 0.1), rel=1e-5)


@pytest.mark.parametrize(("estimator", "kl_in"), [("k2", "loss"), ("k3", "loss"), ("k1", "reward")])
def test_kl_of_a_policy_with_itself_adds_nothing(estimator: str, kl_in: str, tiny: Path, train: Train) -> None:
    rows = changed(near(tiny, make_rows(8), 0), reference_logprobs=lambda row: row.logprobs)
    found = train(rows, algorithm={"kl": 0.5, "kl_estimator": estimator, "kl_in": kl_in}).metrics
    assert found["loss/kl"] == pytest.approx(0, abs=1e-9)
    assert found["loss/policy"] == pytest.approx(train(rows).metrics["loss/policy"], abs=1e-5)


def test_m2po_bounds_what_a_kl_in_the_reward_pushes_away(train: Train) -> None:
    rows = changed(make_rows(6), reference_logprobs=lambda row: row.logprobs - 0.3, advantage=0.0)
    outcome = train(rows, algorithm={"preset": "m2po", "kl": 0.5, "kl_estimator": "k1", "kl_in": "reward"})
    assert outcome.metrics["policy/clip_frac"] > 0


def test_m2po_takes_its_bound_from_live_tokens_only(tiny: Path, train: Train) -> None:
    """Stale tokens that hardly moved would make room in the budget for live ones that moved far."""
    rows = near(tiny, make_rows(10), 0.5)
    now = logprobs_now(tiny, rows)
    for index, row in enumerate(rows):
        stale = np.arange(len(now[index])) < len(now[index]) // 2
        hardly_moved = now[index] - 0.01 * np.sign(row.advantage)
        logprobs = np.where(stale, hardly_moved, row.logprobs).astype(np.float32)
        rows[index] = dataclasses.replace(row, versions=np.where(stale, VERSION - 9, VERSION), logprobs=logprobs)
    live = [row.versions == VERSION for row in rows]
    assert sum((~each).sum() for each in live) > 0
    logs = np.concatenate([(each - row.logprobs)[own] for row, each, own in zip(rows, now, live, strict=True)])
    advantages = np.repeat([row.advantage for row in rows], [own.sum() for own in live])
    away = np.sort(logs[logs * advantages > 0] ** 2)
    kept = len(away)
    while away[:kept].mean() > 0.04:
        kept -= 1
    metrics = train(rows, algorithm={"preset": "m2po"}, training={"micro_batch_tokens": 100}).metrics
    assert metrics["policy/clip_frac"] == pytest.approx((len(away) - kept) / len(logs))
    assert 0 < kept < len(away)


@pytest.mark.parametrize(("estimator", "old"), [("k2", "engine"), ("k3", "engine"), ("k3", "recomputed")])
@pytest.mark.trap("kl_gradient")
def test_off_policy_kl_carries_the_policys_weight(estimator: str, old: str, tiny: Path, train: Train) -> None:
    rows = changed(make_rows(5), reference_logprobs=lambda row: row.logprobs - 0.3, advantage=0.0)
    total = 0.0
    for row, now in zip(rows, logprobs_now(tiny, rows), strict=True):
        importance = np.exp(now.astype(np.float64) - row.logprobs)
        weight = np.clip(importance, 0.8, 1.2) if old == "engine" else np.minimum(importance, 2.0)
        difference = now.astype(np.float64) - row.reference_logprobs
        total += (weight * (difference**2 / 2 if estimator == "k2" else np.exp(-difference) - 1 + difference)).sum()
    outcome = train(rows, algorithm={"kl": 0.5, "kl_estimator": estimator, "old_logprobs": old})
    expected = 0.5 * total / sum(len(row.response_ids) for row in rows)
    assert outcome.metrics["loss/kl"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.trap("whole_answer_weight")
def test_mismatch_is_that_of_the_uncapped_weights(updates: int, tiny: Path, train: Train) -> None:
    rows = off_policy(tiny, 12, spread=0.6)
    algorithm = {"old_logprobs": "recomputed", "weight_cap": 1.0}
    metrics = train(rows, algorithm=algorithm, training={"updates": updates, "micro_batch_tokens": 100}).metrics
    parts = [now.astype(np.float64) - row.logprobs for row, now in zip(rows, logprobs_now(tiny, rows), strict=True)]
    token = np.exp(np.concatenate(parts))
    sequence = np.exp([part.sum() for part in parts])
    for name, weights in (("weight", token), ("sequence_weight", sequence)):
        assert metrics[f"mismatch/{name}_max"] == pytest.approx(weights.max(), rel=1e-4)
        for quantile in (1, 10, 50, 90, 99):
            exact = np.quantile(weights, quantile / 100, method="inverted_cdf")
            assert metrics[f"mismatch/{name}_p{quantile:02d}"] == pytest.approx(exact, rel=0.01)
        ess = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
        assert metrics[f"mismatch/{name.replace('weight', 'ess')}"] == pytest.approx(ess, rel=1e-3)
    assert metrics["mismatch/kl"] == pytest.approx((token - 1 - np.log(token)).mean(), rel=1e-4)


def test_a_mismatch_beyond_all_bounds_is_given_as_the_bound() -> None:
    totals = PolicyTotals(torch.device("cpu"))
    _, moments, bins = totals._sums
    assert mismatch_metrics(moments, bins, dict(zip(LARGEST, totals._largest.tolist(), strict=True))) == {}
    totals.add_mismatch(torch.tensor([100.0, -100.0]), Ragged.of([2]))
    found = mismatch_metrics(moments, bins, dict(zip(LARGEST, totals._largest.tolist(), strict=True)))
    assert found["mismatch/weight_max"] == pytest.approx(np.exp(20))


# The terms of the policy loss against float64 formulas, token by token, where several parts of a config meet.


KL = 0.3
RECOMPUTED: dict[str, Any] = {"old_logprobs": "recomputed"}
FAR = {"rejection": "token_k2", "rejection_high": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "cap and rejection": {**RECOMPUTED, "weight_cap": 1.3, **FAR},
    "mask and rejection": {**RECOMPUTED, "correction": "mask", "weight_floor": 0.7, "weight_cap": 1.5, **FAR},
    "cap of whole answers": {**RECOMPUTED, "correction_level": "sequence", "weight_cap": 1.3},
    "mask of whole answers": {**RECOMPUTED, "correction": "mask", "correction_level": "sequence"},
    "rejection of answers": {**RECOMPUTED, "rejection": "sequence_k2", "rejection_high": 0.05},
}


class Batch:
    """Four rows of answers, with all policies apart from each other."""

    def __init__(self) -> None:
        draw = np.random.default_rng(5)
        self.rows: list[MaskedRow] = []
        for member, tokens in enumerate((6, 1, 9, 4)):
            ids = np.ones(tokens, np.int64)
            behaviour = draw.normal(-2, 0.4, tokens).astype(np.float32)
            reference = (behaviour + draw.normal(0, 0.5, tokens)).astype(np.float32)
            row = TrainRow(0, member, 0, 1, ids, ids, behaviour, 5 * ids, draw.normal(), reference_logprobs=reference)
            (masked,) = mask_rows([row], 1, 5, 2, "mask", False)
            masked.weight = 0.1 + 0.1 * member
            masked.proximal = (behaviour + draw.normal(0, 0.3, tokens)).astype(np.float32)
            self.rows.append(masked)
        self.behaviour = self.flat([row.row.logprobs for row in self.rows])
        self.reference = self.flat([row.row.reference_logprobs for row in self.rows])
        self.proximal = self.flat([row.proximal for row in self.rows])
        self.current = self.proximal + draw.normal(0, 0.5, len(self.proximal))
        self.advantages = self.spread([row.row.advantage for row in self.rows])
        self.weights = self.spread([row.weight for row in self.rows])

    def flat(self, parts: list[Any]) -> np.ndarray:
        return np.concatenate(parts).astype(np.float64)

    def spread(self, of_rows: Any) -> np.ndarray:
        return np.repeat(np.array(of_rows, np.float64), [len(row.live) for row in self.rows])

    def of_rows(self, values: np.ndarray, how: str) -> np.ndarray:
        ends = np.cumsum([len(row.live) for row in self.rows])[:-1]
        return self.spread([getattr(part, how)() for part in np.split(values, ends)])

    def terms(self, algorithm: AlgorithmConfig) -> LossTerms:
        current = torch.tensor(self.current, dtype=torch.float32)
        batch = micro_batch(self.rows, torch.device("cpu"))
        return policy_loss_terms(algorithm, KL, 1e9, current, torch.zeros_like(current), batch)


def expected_weight(algorithm: AlgorithmConfig, batch: Batch) -> np.ndarray:
    log_weight = batch.proximal - batch.behaviour
    leveled = batch.of_rows(log_weight, "sum") if algorithm.correction_level == "sequence" else log_weight
    weight = np.exp(leveled)
    if algorithm.correction == "cap":
        weight = np.minimum(weight, algorithm.weight_cap)
    else:
        weight = np.where((weight >= algorithm.weight_floor) & (weight <= algorithm.weight_cap), weight, 0)
    distance = log_weight**2 / 2
    if algorithm.rejection == "sequence_k2":
        distance = batch.of_rows(distance, "mean")
    return np.where(distance <= (algorithm.rejection_high or np.inf), weight, 0)


@pytest.mark.parametrize("case", CASES)
def test_a_correction_and_a_rejection_weigh_each_token_together(case: str) -> None:
    batch = Batch()
    algorithm = AlgorithmConfig(kl=KL, **CASES[case])
    found = batch.terms(algorithm)
    weight = expected_weight(algorithm, batch)
    ratio = np.exp(batch.current - batch.proximal)
    surrogate = -np.minimum(ratio * batch.advantages, np.clip(ratio, 0.8, 1.2) * batch.advantages)
    surrogate = np.where(batch.advantages < 0, np.minimum(surrogate, -3 * batch.advantages), surrogate)
    kl = (batch.current - batch.reference) ** 2 / 2
    np.testing.assert_allclose(found.weight.numpy(), weight, rtol=1e-5)
    np.testing.assert_allclose(found.policy.numpy(), batch.weights * weight * surrogate, rtol=1e-4, atol=1e-7)
    expected = KL * batch.weights * weight * np.clip(ratio, 0.8, 1.2) * kl
    np.testing.assert_allclose(found.kl.numpy(), expected, rtol=1e-4, atol=1e-7)
    assert len(set(weight.round(6))) > 2, "the weights differ"
    assert "rejection" not in case or (weight == 0).any()


def test_gmpo_bounds_the_weight_of_its_kl_by_the_logarithm_of_the_ratio() -> None:
    batch = Batch()
    for row in batch.rows:
        row.proximal = None
    algorithm = AlgorithmConfig(preset="gmpo", kl=KL)
    ratio = np.exp(np.clip(batch.current - batch.behaviour, -algorithm.clip_low, algorithm.clip_high))
    expected = KL * batch.weights * ratio * (batch.current - batch.reference) ** 2 / 2
    np.testing.assert_allclose(batch.terms(algorithm).kl.numpy(), expected, rtol=1e-4)
    far = np.abs(np.exp(batch.current - batch.behaviour) - 1) > algorithm.clip_high
    assert far.any(), "some ratios lie beyond every bound"


# One stale token far from the policy that sampled it is never the whole step, and never skips it.


def gradient_of(algorithm: AlgorithmConfig, log_ratio: float, advantage: float) -> float:
    """Returns the gradient of the log-prob of a single token in the loss."""
    one = np.ones(1, np.int64)
    row = TrainRow(0, 0, 0, 1, one, one, np.full(1, -log_ratio - 1, np.float32), 5 * one, advantage)
    masked = mask_rows([row], 1, 5, 2, "mask", False)
    masked[0].weight = 1.0
    current = torch.tensor([-1.0], requires_grad=True)
    terms = policy_loss_terms(algorithm, 0.0, 1e9, current, torch.zeros(1), micro_batch(masked, torch.device("cpu")))
    (gradient,) = torch.autograd.grad(terms.policy.sum() + terms.kl.sum(), current)
    return float(gradient)


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_the_default_gradient_of_a_token_is_at_most_three_times_that_of_a_fresh_one(advantage: float) -> None:
    assert abs(gradient_of(AlgorithmConfig(), 0.0, advantage)) == pytest.approx(1)
    assert all(abs(gradient_of(AlgorithmConfig(), far, advantage)) <= 3 for far in (1.2, 5.0, 20.0, 60.0))
    assert abs(gradient_of(AlgorithmConfig(), np.log(2.9), -1.0)) == pytest.approx(2.9, rel=1e-5), "held from 3 on"
    assert gradient_of(AlgorithmConfig(dual_clip=1e9), 19.9, -1.0) == pytest.approx(np.exp(19.9), rel=1e-4)


@pytest.mark.parametrize(
    ("written", "dual_clip"),
    [
        *(({"preset": preset}, 3.0 if preset == "grpo" else None) for preset in sorted(PRESETS)),
        *(({"clip_high": clip_high}, 3.0) for clip_high in (0.28, "0.28")),
        *(({"clip_high": clip_high}, None) for clip_high in (2.5, "2.5")),
    ],
)
def test_the_default_lies_beyond_the_bound_of_the_ratio_and_other_presets_are_those_of_their_paper(
    written: dict[str, Any], dual_clip: float | None
) -> None:
    assert AlgorithmConfig.model_validate(written).dual_clip == dual_clip


@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"ppo", "safe_rlhf"}))
def test_no_objective_overflows(preset: str) -> None:
    for advantage in (-1.0, 1.0):
        for far in (-200.0, -90.0, 90.0, 200.0):
            assert np.isfinite(gradient_of(AlgorithmConfig(preset=preset), far, advantage))


@pytest.mark.parametrize("preset", ["grpo", "dapo", "sapo"])
def test_a_token_that_was_all_but_impossible_skips_no_step(preset: str, tiny: Path) -> None:
    rows = make_rows(4)
    far = dataclasses.replace(rows[1], logprobs=rows[1].logprobs - 120, advantage=-1.0)
    sections = {"model": {"name": "tiny"}, "task": {"prompts": "none"}, "algorithm": {"preset": preset}}
    outcome = step(PolicyTrainer(Config.model_validate(sections), tiny), [rows[0], far, *rows[2:]])
    assert (outcome.updates, outcome.skipped, len(outcome.trained)) == (1, "", 4)
    assert all(np.isfinite(value) for value in outcome.metrics.values())

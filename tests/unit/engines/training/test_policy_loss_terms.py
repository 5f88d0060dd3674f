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
from asyncrl.engines.training.models_with_heads import frozen_logprobs, load_causal_model
from asyncrl.engines.training.policy_loss import LARGEST, LossTerms, PolicyTotals, mismatch_metrics, policy_loss_terms
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import run_step
from asyncrl.objectives.ragged import Ragged
from asyncrl.telemetry.jsonl import FURTHER_METRICS, METRICS

INCARNATION = 1
VERSION = 5
CORRECTIONS: dict[str, dict[str, Any]] = {
    "cap token": {"old_logprobs": "recomputed"},
    "cap sequence": {"old_logprobs": "recomputed", "correction_level": "sequence"},
    "icepop": {"old_logprobs": "recomputed", "correction": "mask"},
    "masked sequence": {"old_logprobs": "recomputed", "correction": "mask", "correction_level": "sequence"},
    "geometric": {"rejection": "geometric", "rejection_low": 0.9, "rejection_high": 1.2},
    "token k3": {"rejection": "token_k3", "rejection_high": 0.02},
    "cap and sequence k2": {"old_logprobs": "recomputed", "rejection": "sequence_k2", "rejection_high": 0.1},
}


@pytest.fixture
def off_policy(tiny: Path, make_rows: Callable) -> Callable[..., list[TrainRow]]:
    """Rows whose recorded log-probs are near the model's own, with a reference."""

    def make(count: int = 14, spread: float = 0.25) -> list[TrainRow]:
        rows = make_rows(count)
        draw = np.random.default_rng(7)
        valued = np.random.default_rng(8)
        return [
            dataclasses.replace(
                row,
                logprobs=(now + draw.normal(0, spread, len(now))).astype(np.float32),
                reference_logprobs=(now + draw.normal(0, 0.3, len(now))).astype(np.float32),
                values=valued.normal(0, 0.3, len(now)).astype(np.float32),
                cost=float(valued.normal()),
                cost_values=valued.normal(0, 0.3, len(now)).astype(np.float32),
            )
            for row, now in zip(rows, logprobs_now(tiny, rows), strict=True)
        ]

    return make


def logprobs_now(folder: Path, rows: list[TrainRow]) -> list[np.ndarray]:
    model = load_causal_model(folder, "cpu")
    return [frozen_logprobs(model, [row.prompt_ids], [row.response_ids], [1.0], 1024)[0] for row in rows]


def gradient(config: Config, folder: Path, rows: list[TrainRow]) -> tuple[torch.Tensor, dict[str, float]]:
    """Of the first update, all parameters in one vector, and the metrics of the step."""
    engine = PolicyTrainer(config, folder)
    parameters = engine.optimizer.parameters
    found: dict[torch.nn.Parameter, torch.Tensor] = {}
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda p: found.update({p: p.grad.clone()}))
    outcome = run_step(engine, rows, INCARNATION, VERSION)
    return torch.cat([found[parameter].flatten() for parameter in parameters]), outcome.metrics


def cost_of(algorithm: dict[str, Any]) -> dict[str, Any]:
    """Of the section that Safe RLHF needs."""
    return {"functions": ["exact_match"], "limit": 0.5} if algorithm.get("preset") == "safe_rlhf" else {}


def assert_micro_batches_do_not_matter(
    make_config: Callable, algorithm: dict[str, Any], folder: Path, rows: list[TrainRow]
) -> None:
    cost = cost_of(algorithm)
    budgets = (100_000, 150, 36)
    found = [
        gradient(make_config(training={"micro_batch_tokens": budget}, algorithm=algorithm, cost=cost), folder, rows)[0]
        for budget in budgets
    ]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-6, rtol=1e-4)
    assert found[0].abs().max() > 1e-4


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.trap("micro_batches")
def test_gradients_of_every_preset_are_those_of_one_micro_batch(
    preset: str, tiny: Path, off_policy: Callable, make_config: Callable
) -> None:
    assert_micro_batches_do_not_matter(make_config, {"preset": preset, "entropy_bonus": 0.01}, tiny, off_policy())


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.trap("micro_batches")
def test_gradients_of_every_correction_are_those_of_one_micro_batch(
    correction: str, tiny: Path, off_policy: Callable, make_config: Callable
) -> None:
    assert_micro_batches_do_not_matter(make_config, CORRECTIONS[correction], tiny, off_policy())


@pytest.mark.parametrize("loss", ["gspo", "gmpo"])
def test_ratios_of_rows_are_those_of_rows_computed_alone(
    loss: str, tiny: Path, off_policy: Callable, make_config: Callable
) -> None:
    rows = off_policy(9)
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
    config = make_config(algorithm={"loss": loss, "aggregation": "sequence_mean_token_mean"} | bounds)
    assert gradient(config, tiny, rows)[1]["loss/policy"] == pytest.approx(total / 9, rel=1e-5)


@pytest.mark.trap("masked_denominators")
def test_what_a_correction_leaves_out_adds_nothing_and_changes_no_other_tokens_weight(
    tiny: Path, off_policy: Callable, make_config: Callable
) -> None:
    rows = off_policy(6)
    strange = dataclasses.replace(rows[2], logprobs=rows[2].logprobs - 3)
    rejection = {"rejection": "sequence_k2", "rejection_high": 1.0}
    config = make_config(algorithm={**rejection, "kl": 0.1})
    silent = make_config(algorithm={"kl": 0.1})
    found, metrics = gradient(config, tiny, [*rows[:2], strange, *rows[3:]])
    without = [*rows[:2], dataclasses.replace(strange, versions=strange.versions - 9), *rows[3:]]
    torch.testing.assert_close(found, gradient(silent, tiny, without)[0], atol=1e-7, rtol=1e-4)
    tokens = [len(row.logprobs) for row in rows]
    assert metrics["mask/rejected_fraction"] == pytest.approx(tokens[2] / sum(tokens))


def test_what_a_correction_leaves_out_has_no_entropy_bonus(
    tiny: Path, off_policy: Callable, make_config: Callable
) -> None:
    rows = [dataclasses.replace(row, advantage=0.0) for row in off_policy(4)]
    strange = dataclasses.replace(rows[2], logprobs=rows[2].logprobs - 3)
    stale = dataclasses.replace(strange, versions=strange.versions - 9)
    config = make_config(algorithm={"rejection": "sequence_k2", "rejection_high": 1.0, "entropy_bonus": 0.1})
    found, metrics = gradient(config, tiny, [*rows[:2], strange, rows[3]])
    assert 0 < metrics["mask/rejected_fraction"] < 1
    without = gradient(make_config(algorithm={"entropy_bonus": 0.1}), tiny, [*rows[:2], stale, rows[3]])[0]
    assert without.abs().max() > 0
    torch.testing.assert_close(found, without, atol=1e-7, rtol=1e-4)


def test_an_entropy_bonus_raises_the_entropy(tiny: Path, make_rows: Callable, make_config: Callable) -> None:
    rows = [dataclasses.replace(row, advantage=0.0) for row in make_rows(8)]
    for chunk in (1024, 16):
        config = make_config(training={"logits_chunk": chunk}, algorithm={"entropy_bonus": 0.5})
        engine = PolicyTrainer(config, tiny)
        first, second = (run_step(engine, rows, INCARNATION, VERSION).metrics for _ in range(2))
        assert first["loss/entropy"] == pytest.approx(-0.5 * first["policy/entropy"], rel=1e-5)
        assert second["policy/entropy"] > first["policy/entropy"]


def test_the_entropys_gradient_is_that_of_finite_differences(
    tiny: Path, make_rows: Callable, make_config: Callable, move: Callable
) -> None:
    rows = [dataclasses.replace(row, advantage=0.0) for row in make_rows(3)]
    config = make_config(algorithm={"entropy_bonus": 1.0}, training={"learning_rate": 0.0})
    direction, _ = gradient(config, tiny, rows)
    engine = PolicyTrainer(config, tiny)
    losses = []
    step = 1e-2 / float(direction.norm())
    for sign in (1.0, -2.0):
        move(engine, sign * step * direction)
        losses.append(run_step(engine, rows, INCARNATION, VERSION).metrics["loss/entropy"])
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(float(direction.square().sum()), rel=1e-2)


def test_an_adaptive_coefficient_moves_after_each_step_and_is_resumed(
    tiny: Path, off_policy: Callable, make_config: Callable, tmp_path: Path
) -> None:
    rows = off_policy(6)
    config = make_config(algorithm={"kl": 0.5, "kl_target": 1e-4})
    engine = PolicyTrainer(config, tiny)
    first, second = (run_step(engine, rows, INCARNATION, VERSION).metrics for _ in range(2))
    assert first["policy/kl_coefficient"] == 0.5
    error = np.clip(first["policy/kl_reference"] / 1e-4 - 1, -0.2, 0.2)
    assert second["policy/kl_coefficient"] == pytest.approx(0.5 * (1 + 0.1 * error))
    engine.save(tmp_path, {})
    resumed, _ = PolicyTrainer.resume(config, tmp_path)
    expected = run_step(engine, rows, INCARNATION, VERSION).metrics["policy/kl_coefficient"]
    assert run_step(resumed, rows, INCARNATION, VERSION).metrics["policy/kl_coefficient"] == expected
    fixed, _ = PolicyTrainer.resume(make_config(algorithm={"kl": 0.25}), tmp_path)
    assert run_step(fixed, rows, INCARNATION, VERSION).metrics["policy/kl_coefficient"] == 0.25


def test_a_skipped_step_leaves_the_coefficient(tiny: Path, off_policy: Callable, make_config: Callable) -> None:
    rows = [dataclasses.replace(row, advantage=float("nan")) for row in off_policy(3)]
    engine = PolicyTrainer(make_config(algorithm={"kl": 0.5, "kl_target": 1e-4}), tiny)
    assert run_step(engine, rows, INCARNATION, VERSION).skipped == "not finite"
    assert engine.kl.value == 0.5


def kl_config(make_config: Callable, **algorithm: object) -> Config:
    config: Config = make_config(algorithm={"kl": 0.5, **algorithm})
    return config


def test_kl_of_a_policy_with_itself_adds_nothing(tiny: Path, on_policy: Callable, make_config: Callable) -> None:
    rows = [dataclasses.replace(row, reference_logprobs=row.logprobs) for row in on_policy(8)]
    for algorithm in ({"kl_estimator": "k2"}, {"kl_estimator": "k3"}, {"kl_estimator": "k1", "kl_in": "reward"}):
        outcome = run_step(PolicyTrainer(kl_config(make_config, **algorithm), tiny), rows, INCARNATION, VERSION)
        plain = run_step(PolicyTrainer(make_config(), tiny), rows, INCARNATION, VERSION)
        assert outcome.metrics["loss/kl"] == pytest.approx(0, abs=1e-9)
        assert outcome.metrics["loss/policy"] == pytest.approx(plain.metrics["loss/policy"], abs=1e-5)


@pytest.mark.trap("kl_gradient")
def test_with_kl_in_the_reward_a_token_bears_that_of_all_after_it(
    tiny: Path, on_policy: Callable, make_config: Callable
) -> None:
    draw = np.random.default_rng(0)
    rows = [
        dataclasses.replace(
            row, reference_logprobs=(row.logprobs + draw.normal(0, 0.5, len(row.logprobs))).astype(np.float32)
        )
        for row in on_policy(8)
    ]
    shaped = []
    for row in rows:
        k1 = row.logprobs.astype(np.float64) - row.reference_logprobs
        to_go = [k1[place:].sum() for place in range(len(k1))]
        shaped.append(dataclasses.replace(row, advantage=row.advantage - 0.5 * np.array(to_go)))
    found, _ = gradient(kl_config(make_config, kl_estimator="k1", kl_in="reward"), tiny, rows)
    torch.testing.assert_close(found, gradient(make_config(), tiny, shaped)[0], atol=1e-7, rtol=1e-5)


def test_m2po_bounds_what_a_kl_in_the_reward_pushes_away(
    tiny: Path, make_rows: Callable, make_config: Callable
) -> None:
    rows = [dataclasses.replace(r, reference_logprobs=r.logprobs - 0.3, advantage=0.0) for r in make_rows(6)]
    algorithm = {"preset": "m2po", "kl": 0.5, "kl_estimator": "k1", "kl_in": "reward"}
    outcome = run_step(PolicyTrainer(make_config(algorithm=algorithm), tiny), rows, INCARNATION, VERSION)
    assert outcome.metrics["policy/clip_frac"] > 0


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("old", ["engine", "recomputed"])
@pytest.mark.trap("kl_gradient")
def test_off_policy_kl_carries_the_policys_weight(
    estimator: str, old: str, tiny: Path, make_rows: Callable, make_config: Callable
) -> None:
    rows = [dataclasses.replace(r, reference_logprobs=r.logprobs - 0.3, advantage=0.0) for r in make_rows(5)]
    model = load_causal_model(tiny, "cpu")
    total = 0.0
    for row in rows:
        (current,) = frozen_logprobs(model, [row.prompt_ids], [row.response_ids], [1.0], 1024)
        importance = np.exp(current.astype(np.float64) - row.logprobs)
        weight = np.clip(importance, 0.8, 1.2) if old == "engine" else np.minimum(importance, 2.0)
        difference = current.astype(np.float64) - row.reference_logprobs
        total += (weight * (difference**2 / 2 if estimator == "k2" else np.exp(-difference) - 1 + difference)).sum()
    config = kl_config(make_config, kl_estimator=estimator, old_logprobs=old)
    outcome = run_step(PolicyTrainer(config, tiny), rows, INCARNATION, VERSION)
    expected = 0.5 * total / sum(len(row.response_ids) for row in rows)
    assert outcome.metrics["loss/kl"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.trap("whole_answer_weight")
def test_mismatch_is_that_of_the_uncapped_weights(
    updates: int, tiny: Path, off_policy: Callable, make_config: Callable
) -> None:
    rows = off_policy(12, spread=0.6)
    algorithm = {"old_logprobs": "recomputed", "weight_cap": 1.0}
    config = make_config(algorithm=algorithm, training={"updates": updates, "micro_batch_tokens": 100})
    metrics = run_step(PolicyTrainer(config, tiny), rows, INCARNATION, VERSION).metrics
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


@pytest.mark.parametrize("preset", PRESETS)
def test_every_metric_of_a_step_is_documented(
    preset: str, tiny: Path, off_policy: Callable, make_config: Callable
) -> None:
    algorithm = {"preset": preset, "kl": 0.1}
    config = make_config(algorithm=algorithm, cost=cost_of(algorithm))
    metrics = run_step(PolicyTrainer(config, tiny), off_policy(), INCARNATION, VERSION).metrics
    assert set(metrics) <= {*METRICS, *FURTHER_METRICS}
    of_the_trainer = ("loss/", "policy/", "mismatch/", "mask/")
    assert {name for name in METRICS if name.startswith(of_the_trainer)} <= set(metrics)


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

"""The terms of the policy loss against float64 formulas, token by token, where several parts of a config meet."""

from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.sections.algorithm_config import AlgorithmConfig
from asyncrl.engines.training.batch.masking import MaskedRow, mask_rows
from asyncrl.engines.training.batch.micro_batches import micro_batch
from asyncrl.engines.training.batch.train_rows import TrainRow
from asyncrl.engines.training.policy_loss_terms import LossTerms, policy_loss_terms

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
            ids, behaviour = np.ones(tokens, np.int64), draw.normal(-2, 0.4, tokens).astype(np.float32)
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
    batch, algorithm = Batch(), AlgorithmConfig(kl=KL, **CASES[case])
    found, weight = batch.terms(algorithm), expected_weight(algorithm, batch)
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

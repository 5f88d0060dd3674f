"""Our functions against TRL's and verl's own, on values that tests/data/rivals/generate.py made with their wheels.

Where a rival differs from ours, the test says in what and why, and compares what is left.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.engines.ranks.rank_mesh import Ranks
from asyncrl.engines.training.policy_loss import _moments
from asyncrl.objectives import corrections, losses
from asyncrl.objectives.advantages import (
    STD_EPSILON,
    RewardedCut,
    batch_normalized,
    generalized_advantages,
    greedy_baseline,
    group_advantages,
    group_baseline,
    leave_one_out_advantages,
    token_rewards,
)
from asyncrl.objectives.kl import KlCoefficient, KlEstimator, kl_estimate
from asyncrl.objectives.losses import Aggregation, SurrogateLoss, row_weights, value_loss
from asyncrl.objectives.ragged import Ragged

FILE = Path(__file__).parents[2] / "data" / "rivals" / "values.json"
VALUES: dict[str, Any] = json.loads(FILE.read_text())
LENGTHS: list[int] = VALUES["lengths"]
WIDTH = 9
ROWS = Ragged.of(LENGTHS)
LOW, HIGH = VALUES["bounds"].values()
NOT_EMPTY = 6
"""Rows with a token; the last of the seven has none."""


def flat(table: Any) -> torch.Tensor:
    """The tokens of a padded table, row after row."""
    parts = [row[:length] for row, length in zip(table, LENGTHS, strict=True)]
    return torch.tensor(np.concatenate(parts), dtype=torch.float64)


OLD, BEHAVIOUR, REFERENCE = (flat(VALUES[name]) for name in ("old", "behaviour", "reference"))
A = torch.tensor(np.repeat(VALUES["advantages"], LENGTHS))


def ours(name: str, current: torch.Tensor) -> SurrogateLoss:
    log_ratio = current - OLD
    match name:
        case "clip":
            return losses.clipped_loss(log_ratio, A, LOW, HIGH)
        case "dual clip":
            return losses.clipped_loss(log_ratio, A, LOW, HIGH, VALUES["dual"])
        case "gspo":
            return losses.clipped_loss(losses.sequence_log_ratio(log_ratio, ROWS), A, LOW, HIGH)
        case "cispo":
            return losses.clipped_weight_loss(log_ratio, current, A, LOW, HIGH)
        case "cispo without a lower bound":
            return losses.clipped_weight_loss(log_ratio, current, A, 1.0, HIGH)
        case "gmpo":
            return losses.geometric_mean_loss(log_ratio, A, ROWS, 0.4, 0.4)
        case _:
            return losses.soft_gate_loss(log_ratio, A, 1.0, 1.05)


def assert_same(rival: dict[str, Any], name: str, aggregation: Aggregation, samples: int, *, more: float = 0.0) -> None:
    """Loss and gradient; `more`: what the rival adds to the loss that has no gradient."""
    current = flat(VALUES["current"]).requires_grad_()
    lengths = torch.tensor([max(1, length) for length in LENGTHS])
    weights = row_weights(aggregation, lengths, sum(LENGTHS), samples, WIDTH).double()
    loss = (ROWS.spread(weights) * ours(name, current).terms).sum()
    loss.backward()
    assert loss.item() + more == pytest.approx(rival["loss"], rel=1e-6)
    torch.testing.assert_close(current.grad, flat(rival["gradient"]), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(
    ("mode", "aggregation"),
    [
        ("token-mean", "token_mean"),
        ("seq-mean-token-sum", "sequence_mean_token_sum"),
        ("seq-mean-token-mean", "sequence_mean_token_mean"),
        ("seq-mean-token-sum-norm", "constant"),
    ],
)
def test_clip_and_its_averages_are_verls(mode: str, aggregation: Aggregation) -> None:
    """verl always clips dually, and leaves rows without a token out of the number of samples. Its divisor is the padded
    width of the batch unless one is given; ours is always the token limit."""
    assert_same(VALUES["verl"]["losses"][f"clip {mode}"], "dual clip", aggregation, NOT_EMPTY)


@pytest.mark.parametrize(
    ("name", "aggregation"),
    [
        ("gspo", "sequence_mean_token_mean"),
        ("cispo", "token_mean"),
        ("sapo", "sequence_mean_token_mean"),
    ],
)
def test_other_losses_are_verls(name: str, aggregation: Aggregation) -> None:
    """verl holds log ratios within 20 and so never meets an infinite ratio; nothing here comes near."""
    assert_same(VALUES["verl"]["losses"][name], name, aggregation, NOT_EMPTY)


@pytest.mark.parametrize("rival", ["verl", "trl"])
def test_gmpo_is_the_rivals_but_for_rows_without_a_token(rival: str) -> None:
    """Both average GMPO over all rows; one without a token has the ratio 1 there, and its advantage enters the loss.
    verl leaves a row without tokens its advantage only through the mask, which makes it 0."""
    empty = 0.0 if rival == "verl" else -VALUES["advantages"][-1] / len(LENGTHS)
    found = VALUES[rival]["losses"]["gmpo"]
    assert_same(found, "gmpo", "sequence_mean_token_mean", len(LENGTHS), more=empty)


@pytest.mark.parametrize(
    ("rival", "name", "aggregation"),
    [
        ("clip token_mean", "clip", "token_mean"),
        ("clip sequence_mean_token_mean", "clip", "sequence_mean_token_mean"),
        ("clip constant", "clip", "constant"),
        ("gspo", "gspo", "sequence_mean_token_mean"),
        ("cispo", "cispo without a lower bound", "token_mean"),
        ("sapo", "sapo", "sequence_mean_token_mean"),
    ],
)
def test_losses_are_trls(rival: str, name: str, aggregation: Aggregation) -> None:
    """TRL averages over all rows, also those without a token. Its `epsilon_high` of CISPO is the bound of the ratio
    itself, ours is what it may exceed 1 by."""
    assert_same(VALUES["trl"]["losses"][rival], name, aggregation, len(LENGTHS))


def test_trls_two_sided_clip_holds_other_tokens_than_the_dual_clip_only_where_both_are_flat() -> None:
    """TRL's delta caps the ratio of negative advantages: the same term, -c A, and no gradient beyond."""
    assert_same(VALUES["trl"]["losses"]["two-sided"], "dual clip", "sequence_mean_token_mean", len(LENGTHS))


def test_trls_kl_is_k3_in_the_loss() -> None:
    """TRL's only KL: k3 in the loss with weight 1, whose gradient is a biased one; ours has k2 there as the default."""
    current = flat(VALUES["current"])
    added = VALUES["trl"]["losses"]["kl"]["loss"] - VALUES["trl"]["losses"]["clip sequence_mean_token_mean"]["loss"]
    k3 = kl_estimate(current, REFERENCE, "k3")
    assert added == pytest.approx(0.1 * float(ROWS.mean(k3).mean()), rel=1e-9)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_are_verls(estimator: KlEstimator) -> None:
    found = kl_estimate(flat(VALUES["current"]), REFERENCE, estimator)
    torch.testing.assert_close(found, flat(VALUES["verl"]["kl"][estimator]))


def test_the_adaptive_coefficient_is_verls() -> None:
    coefficient = KlCoefficient(0.05, target=0.1)
    for measured, value in zip((0.3, 0.11, 0.1, 0.05, -0.02, 0.099), VALUES["verl"]["controller"], strict=True):
        coefficient.update(measured)
        assert coefficient.value == pytest.approx(value, rel=1e-12)


GROUPS: list[int] = VALUES["groups"]


def cuts(groups: list[int]) -> list[RewardedCut]:
    found = []
    for group in groups:
        rows = [row for row, of in enumerate(GROUPS) if of == group]
        rewards = {member: VALUES["rewards"][row] for member, row in enumerate(rows)}
        tokens = {member: VALUES["tokens"][row] for member, row in enumerate(rows)}
        found.append(RewardedCut(group, tuple(range(len(rows))), rewards, tokens))
    return found


@pytest.mark.trap("group_of_one")
def test_verl_gives_a_group_of_one_its_reward_as_advantage_and_ours_never_trains_it() -> None:
    for name in ("group_mean", "leave_one_out"):
        assert VALUES["verl"]["advantages"][name][-1] == pytest.approx(0.7)
    with pytest.raises(ValueError, match="at least two"):
        group_baseline(cuts([3]), 0)


@pytest.mark.trap("which_deviation")
def test_advantages_of_groups_are_verls() -> None:
    """But for the epsilon of the standard deviation, 1e-6 there and 1e-4 here, and for equal rewards, whose rounding
    error verl divides by 1e-6."""
    verl = VALUES["verl"]["advantages"]
    several = cuts([0, 1, 2])
    assert np.concatenate(group_baseline(several, 0)) == pytest.approx(verl["group_mean"][:7], abs=1e-6)
    assert np.concatenate(group_baseline(several, 0, estimate=leave_one_out_advantages)) == pytest.approx(
        verl["leave_one_out"][:7], abs=1e-6
    )
    scales = [np.std(list(cut.rewards.values()), ddof=1) for cut in several for _ in cut.members]
    found = np.concatenate(partial(group_baseline, estimate=partial(group_advantages, normalize_std=True))(several, 0))
    rescaled = found * (np.array(scales) + STD_EPSILON) / (np.array(scales) + 1e-6)
    assert rescaled == pytest.approx(verl["group_std"][:7], abs=1e-5)
    assert partial(group_baseline, estimate=partial(group_advantages, normalize_std=True))(several, 0)[1] == [0.0, 0.0]


def test_advantages_over_greedy_answers_are_verls() -> None:
    judged = [replace(cut, greedy=VALUES["greedy"][cut.group]) for cut in cuts([0, 1, 2, 3])]
    assert np.concatenate(greedy_baseline(judged, 0)) == pytest.approx(VALUES["verl"]["advantages"]["greedy"])


def test_advantages_of_the_batch_are_verls() -> None:
    """But for the epsilon: 1e-8 in the variance there, 1e-4 on the standard deviation here. The variant with a group's
    mean is compared without the group of one, for which verl takes 0 as the mean."""
    rewards = np.array(VALUES["rewards"])
    tokens = np.array(VALUES["tokens"])
    std = np.repeat(rewards, tokens).std(ddof=1)
    found = np.concatenate(batch_normalized(cuts([0, 1, 2, 3]), 0)) * (std + STD_EPSILON) / np.sqrt(std**2 + 1e-8)
    assert found == pytest.approx(VALUES["verl"]["advantages"]["batch"], rel=1e-6)

    def from_the_group(of_cuts: Sequence[RewardedCut], version: int) -> list[list[float]]:
        return [*group_baseline(of_cuts[:3], version), [rewards[-1]]]

    centred = np.concatenate(from_the_group(cuts([0, 1, 2, 3]), 0))
    std = np.repeat(centred, tokens).std(ddof=1)
    found = np.concatenate(partial(batch_normalized, first=from_the_group)(cuts([0, 1, 2, 3]), 0))
    rescaled = found * (std + STD_EPSILON) / np.sqrt(std**2 + 1e-8)
    assert rescaled == pytest.approx(VALUES["verl"]["advantages"]["group_batch"], rel=1e-5)


LOG_WEIGHT = OLD - BEHAVIOUR


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_verls(level: corrections.Level) -> None:
    leveled = corrections.weight_at_level(LOG_WEIGHT, level, ROWS)
    verl = VALUES["verl"]["corrections"]
    torch.testing.assert_close(corrections.capped_weight(leveled, 1.2), flat(verl[f"cap {level}"]))
    torch.testing.assert_close(corrections.masked_weight(leveled, 0.8, 1.25), flat(verl[f"mask {level}"]))


@pytest.mark.parametrize(
    ("option", "rejection", "low", "high"),
    [
        ("seq_mean_k1", "geometric", 0.9, 1 / 0.9),
        ("token_k2", "token_k2", 0.0, 0.05),
        ("token_k3", "token_k3", 0.0, 0.05),
        ("seq_mean_k2", "sequence_k2", 0.0, 0.05),
        ("seq_mean_k3", "sequence_k3", 0.0, 0.05),
    ],
)
def test_rejections_are_verls(option: str, rejection: corrections.Rejection, low: float, high: float) -> None:
    """verl's bounds of k1 are those of behaviour / proximal, the inverse of the weight; here they are symmetric."""
    kept = corrections.accepted(LOG_WEIGHT, ROWS, rejection, low, high)
    assert kept.double().tolist() == flat(VALUES["verl"]["corrections"][option]).tolist()
    assert 0 < kept.sum() < len(kept)


def test_advantages_of_tokens_and_their_returns_are_those_of_verl() -> None:
    """verl divides by sqrt(variance + 1e-8), we by the standard deviation + 1e-4."""
    verl = VALUES["verl"]["critic"]
    settings = verl["settings"]
    judged = flat(verl["judged"]).numpy()
    parts = np.split(np.stack([judged, (BEHAVIOUR - REFERENCE).numpy()]), np.cumsum(LENGTHS)[:-1], axis=1)
    found = []
    for reward, (values, kl) in zip(VALUES["advantages"][:NOT_EMPTY], parts[:NOT_EMPTY], strict=True):
        rewards = token_rewards(reward, len(values), kl, settings["kl"])
        found.append(generalized_advantages(rewards, values, settings["gamma"], settings["gae_lambda"]))
    advantages = np.concatenate(found)
    np.testing.assert_allclose(advantages + judged, flat(verl["returns"]).numpy(), atol=1e-12)
    mean, scale = _moments(np.split(advantages, np.cumsum(LENGTHS)[:-1]), Ranks())
    rescaled = (advantages - mean) / np.sqrt((scale - STD_EPSILON) ** 2 + 1e-8)
    np.testing.assert_allclose(rescaled, flat(verl["advantages"]).numpy(), atol=1e-12)


def test_the_critics_loss_is_that_of_verl() -> None:
    verl = VALUES["verl"]["critic"]
    predicted = flat(verl["predicted"]).requires_grad_()
    terms, clipped = value_loss(predicted, flat(verl["judged"]), flat(verl["returns"]), verl["settings"]["value_clip"])
    loss = terms.mean()
    loss.backward()
    assert loss.item() == pytest.approx(verl["loss"], rel=1e-9)
    assert clipped.double().mean().item() == pytest.approx(verl["held"])
    torch.testing.assert_close(predicted.grad, flat(verl["gradient"]), atol=1e-9, rtol=1e-6)

"""A training step: gradients, denominators, masks, updates, what is skipped, and what its account says has trained."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncrl.engines.training.training_step
from asyncrl.engines.training.micro_batches import micro_batches
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import StepOutcome
from asyncrl.protocols.messages import LEFT_OUT
from tests.unit.engines.training.tiny_training import (
    VERSION,
    assert_close,
    changed,
    gradients,
    logprobs_now,
    make_config,
    make_rows,
    near,
    same,
    step,
    weights,
)

AGGREGATIONS = ("token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "constant")
BOUNDS = {"rejection": "geometric", "rejection_low": 0.9, "rejection_high": 1.1}
Train = Callable[..., StepOutcome]


def trained_keys(outcome: StepOutcome) -> list[tuple[int, int, int]]:
    return sorted((sample.group, sample.member, sample.attempt) for sample in outcome.samples if sample.trained)


def policy(folder: Path, **sections: Any) -> PolicyTrainer:
    return PolicyTrainer(make_config(**sections), folder)


@pytest.mark.parametrize("temperature", [0.6, 1.3])
@pytest.mark.trap("tempered_logprobs")
def test_ratio_of_an_unchanged_policy_is_one(temperature: float, tiny: Path, train: Train) -> None:
    metrics = train(near(tiny, make_rows(temperature=temperature), 0)).metrics
    assert metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["policy/ess"] == pytest.approx(1, abs=1e-5)
    assert metrics["policy/logprob_difference_max"] < 1e-5
    assert metrics["policy/kl_rollout_train"] == pytest.approx(0, abs=1e-6)


def test_tokens_over_keys_of_older_weights_are_no_difference_of_engines(tiny: Path, train: Train) -> None:
    """Sampled under `kv = "keep"`: the token is of the weights that train, what it looks back at is not."""
    rows = [row for row in near(tiny, make_rows(), 0) if len(row.response_ids) > 4]
    mixed = []
    for row in rows[1:]:
        versions = row.versions.copy()
        logprobs = row.logprobs.copy()
        versions[:2] -= 1
        logprobs[2:] -= 0.2
        mixed.append(dataclasses.replace(row, versions=versions, logprobs=logprobs))
    assert train([rows[0], *mixed]).metrics["policy/logprob_difference_max"] < 1e-5
    assert "policy/logprob_difference_max" not in train(mixed).metrics


@pytest.mark.trap("engines_disagree")
def test_what_engine_and_trainer_say_of_a_fresh_token_is_compared(tiny: Path, train: Train) -> None:
    rows = near(tiny, make_rows(4), 0)
    off = rows[1].logprobs + np.float32(0.25)
    rows[1] = dataclasses.replace(rows[1], logprobs=off)
    metrics = train(rows).metrics
    assert metrics["policy/logprob_difference_max"] == pytest.approx(0.25, abs=1e-4)
    share = len(off) / sum(len(row.logprobs) for row in rows)
    assert metrics["policy/kl_rollout_train"] == pytest.approx(0.25 * share, abs=1e-4)


@pytest.mark.trap("end_is_padding")
@pytest.mark.parametrize("ids", [[0], [0, 7, 0, 8, 0]])
def test_no_token_is_left_out_for_its_id(ids: list[int], train: Train) -> None:
    """The padding's id, which is the end's here, alone or at both ends and in the middle, beside longer rows."""
    count = len(ids)
    own = {"logprobs": np.full(count, -3, np.float32), "versions": np.full(count, VERSION), "advantage": 1.0}
    short = make_rows(1, response_ids=np.array(ids), **own)
    others = make_rows(8, advantage=0.0)[4:]
    outcome = train([*short, *others], algorithm={"clip_low": 1e9, "clip_high": 1e9})
    assert (outcome.samples[0].trained, outcome.samples[0].masked) == (count, 0)
    assert outcome.metrics["tokens/trained"] == outcome.metrics["tokens/response"]
    assert outcome.metrics["grad_norm"] > 1e-3


@pytest.mark.parametrize(
    ("aggregation", "masked"), [*((each, True) for each in AGGREGATIONS), ("sequence_mean_token_mean", False)]
)
@pytest.mark.trap("truncated")
def test_truncated_samples_leave_loss_and_denominator_when_asked(aggregation: str, masked: bool, train: Train) -> None:
    rows = make_rows(6)
    rows[2] = dataclasses.replace(rows[2], truncated=True)
    outcome = train(rows, algorithm={"mask_truncated": masked, "aggregation": aggregation})
    alone = train(rows[:2] + rows[3:] if masked else rows, algorithm={"aggregation": aggregation})
    assert outcome.metrics["loss/policy"] == pytest.approx(alone.metrics["loss/policy"], abs=1e-6)
    assert (outcome.metrics["mask/truncated_fraction"] > 0) == masked
    assert outcome.samples[2].reason == ("truncated" if masked else "")
    assert len(trained_keys(outcome)) == (5 if masked else 6)


@pytest.mark.trap("truncated")
def test_a_batch_of_answers_without_an_end_is_skipped_as_truncated(train: Train) -> None:
    outcome = train(make_rows(4, truncated=True), algorithm={"mask_truncated": True})
    assert (outcome.updates, outcome.skipped, outcome.metrics["mask/stale_fraction"]) == (0, "truncated", 0)
    assert {sample.reason for sample in outcome.samples} == {"truncated"}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.trap("masked_denominators")
def test_masking_a_sample_or_its_head_leaves_the_gradients_of_the_others_unchanged(
    aggregation: str, share: float, tiny: Path
) -> None:
    *others, row = make_rows(6)
    old = np.arange(len(row.versions)) < share * len(row.versions)
    silent = dataclasses.replace(row, advantage=np.where(old, 0.0, row.advantage))
    stale = dataclasses.replace(row, versions=row.versions - 3 * old)
    trainers = [policy(tiny, algorithm={"aggregation": aggregation}) for _ in range(2)]
    found = [gradients(each, [*others, last])[1] for each, last in zip(trainers, (silent, stale), strict=True)]
    assert_close(*found, atol=1e-7)


@pytest.mark.parametrize("divisor", [None, 100])
@pytest.mark.trap("batch_length_divisor")
def test_a_constant_divisor_is_that_of_the_config_whatever_the_batch(divisor: int | None, train: Train) -> None:
    rows = make_rows(6)
    sums = train(rows, algorithm={"aggregation": "sequence_mean_token_sum"}).metrics["loss/policy"]
    found = train(rows, algorithm={"aggregation": "constant", "divisor": divisor}).metrics["loss/policy"]
    tokens = divisor or make_config().generation.max_new_tokens
    assert tokens > max(len(row.versions) for row in rows)
    assert found == pytest.approx(sums / tokens, rel=1e-5)


def ragged_versions(rows: list[TrainRow]) -> list[TrainRow]:
    """Tokens of staleness 4 down to 0 in every row."""
    return changed(rows, versions=lambda row: np.linspace(VERSION - 4, VERSION, len(row.response_ids)).astype(np.int64))


@pytest.mark.parametrize("rule", ["mask", "drop", "block", "admit"])
@pytest.mark.parametrize("limit", [0, 2])
def test_no_token_over_the_bound_enters_the_loss(rule: str, limit: int, train: Train) -> None:
    rows = ragged_versions(make_rows(12))
    outcome = train(rows, staleness={"limit": limit, "policy": rule})
    bound = 4 if rule == "admit" else limit
    expected = [int((VERSION - row.versions <= bound).sum()) for row in rows]
    assert [sample.trained for sample in outcome.samples] == expected
    assert outcome.metrics["staleness/max"] == bound
    assert outcome.metrics["staleness/updates_max"] == bound
    tokens = sum(len(row.versions) for row in rows)
    assert outcome.metrics["mask/stale_fraction"] == (tokens - sum(expected)) / tokens
    assert {s.reason for s in outcome.samples if s.masked} <= {"stale"}


def test_a_stale_head_changes_nothing_but_its_own_terms(tiny: Path) -> None:
    """What a masked token recorded cannot matter."""
    rows = ragged_versions(make_rows(6))
    spoilt = changed(
        rows, logprobs=lambda row: np.where(row.versions < VERSION - 2, -99, row.logprobs).astype(np.float32)
    )
    trainers = [policy(tiny) for _ in range(2)]
    for trainer, batch in zip(trainers, (rows, spoilt), strict=True):
        step(trainer, batch)
    assert same(*map(weights, trainers))


@pytest.mark.parametrize("change", [{"incarnation": 0}, {"versions": lambda row: row.versions - 3}])
def test_a_batch_without_a_live_token_is_no_step(change: dict[str, Any], tiny: Path) -> None:
    trainer = policy(tiny)
    before = weights(trainer)
    outcome = step(trainer, changed(make_rows(4), **change))
    assert (outcome.updates, outcome.skipped, trained_keys(outcome)) == (0, "stale", [])
    assert {(s.trained, s.reason) for s in outcome.samples} == {(0, "stale")}
    assert same(before, weights(trainer))


@pytest.mark.trap("not_finite")
def test_a_step_that_is_not_finite_changes_nothing_and_names_the_sample(tiny: Path) -> None:
    """The shortest row is computed last: the micro-batches before it had added their gradients."""
    rows = make_rows(6)
    last = min(rows, key=lambda row: len(row.prompt_ids) + len(row.response_ids))
    broken = [dataclasses.replace(row, advantage=float("nan")) if row is last else row for row in rows]
    trainer, fresh = (policy(tiny, training={"micro_batch_tokens": 1}) for _ in range(2))
    before = weights(trainer)
    outcome = step(trainer, broken)
    assert (outcome.updates, outcome.skipped, trained_keys(outcome)) == (0, "not finite", [])
    assert outcome.culprits == (last.key,)
    assert all(np.isfinite(value) for value in outcome.metrics.values())
    assert same(before, weights(trainer))
    for each in (trainer, fresh):
        step(each, rows)
    assert same(weights(trainer), weights(fresh)), "nothing of the skipped step is left"


@pytest.mark.trap("not_finite")
def test_a_gradient_that_is_not_finite_changes_nothing(tiny: Path) -> None:
    trainer = policy(tiny)
    trainer.optimizer.parameters[0].register_hook(lambda gradient: gradient * float("inf"))
    before = weights(trainer)
    outcome = step(trainer, make_rows(3))
    assert (outcome.updates, outcome.skipped) == (0, "not finite")
    assert same(before, weights(trainer))


def test_updates_split_the_batch_and_each_has_its_own_denominator(tiny: Path) -> None:
    rows = make_rows(8)
    split, halves = (policy(tiny, training={"updates": updates}) for updates in (2, 1))
    outcome = step(split, rows)
    assert outcome.updates == 2
    assert outcome.metrics["staleness/updates_max"] == 1
    for half in (rows[:4], rows[4:]):
        step(halves, half)
    assert same(weights(split), weights(halves))


def test_recomputed_log_probs_are_those_at_the_start_of_the_step(train: Train) -> None:
    """With a learning rate of zero every ratio is exactly current / proximal = 1, whatever was recorded, and at the
    temperature of the rows."""
    algorithm = {"old_logprobs": "recomputed", "weight_cap": 2.0}
    training = {"updates": 3, "learning_rate": 0.0}
    metrics = train(make_rows(9, temperature=0.7), training=training, algorithm=algorithm).metrics
    assert metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["policy/weight_mean"] != pytest.approx(1, abs=1e-2)


def test_the_second_update_is_measured_against_the_start_of_the_step(tiny: Path, tmp_path: Path) -> None:
    """Its ratio is to the policy before the first update, and the weight goes from there to the sampler."""
    rows = make_rows(8)
    algorithm = {"old_logprobs": "recomputed", "weight_cap": 1.5}
    fast = {"learning_rate": 3e-3}
    halfway = policy(tiny, training=fast, algorithm=algorithm)
    first = step(halfway, rows[:4])
    halfway.save(tmp_path, {})
    starts = logprobs_now(tiny, rows[4:])
    total = 0.0
    tokens = 0
    for row, start, now in zip(rows[4:], starts, logprobs_now(tmp_path / "model", rows[4:]), strict=True):
        ratio = np.exp(now.astype(np.float64) - start)
        weight = np.minimum(np.exp(start.astype(np.float64) - row.logprobs), 1.5)
        total -= (weight * np.minimum(ratio * row.advantage, np.clip(ratio, 0.8, 1.2) * row.advantage)).sum()
        tokens += len(now)
        assert not np.allclose(ratio, 1, atol=1e-3)
    both = step(policy(tiny, training={"updates": 2, **fast}, algorithm=algorithm), rows).metrics
    assert both["loss/policy"] == pytest.approx((first.metrics["loss/policy"] + total / tokens) / 2, rel=1e-4)


@pytest.mark.parametrize(
    "algorithm",
    [{"old_logprobs": "recomputed", "correction": "mask"}, {"rejection": "token_k3", "rejection_high": 0.5}],
)
def test_tokens_that_a_correction_leaves_out_have_not_trained(
    algorithm: dict[str, Any], tiny: Path, train: Train
) -> None:
    rows = make_rows(8)
    outcome = train(rows, algorithm=algorithm, training={"micro_batch_tokens": 100})
    for row, now, sample in zip(rows, logprobs_now(tiny, rows), outcome.samples, strict=True):
        log_weight = now.astype(np.float64) - row.logprobs
        weight = np.exp(log_weight)
        out = (weight < 0.5) | (weight > 5) if "correction" in algorithm else weight - 1 - log_weight > 0.5
        expected = (len(row.response_ids) - out.sum(), 0, out.sum())
        assert (sample.trained, sample.masked, sample.rejected) == expected
    rejected = sum(sample.rejected for sample in outcome.samples)
    assert 0 < rejected < outcome.metrics["tokens/response"]
    assert outcome.metrics["tokens/trained"] == outcome.metrics["tokens/response"] - rejected


def test_a_rejection_compares_with_the_start_of_the_step_in_every_update(tiny: Path, train: Train) -> None:
    """With the engine's log-probs in the ratio too: what the first update moves rejects nothing in the second."""
    rows = near(tiny, make_rows(8), 0.25)
    rejection = {"rejection": "token_k3", "rejection_high": 0.02}
    outcome = train(rows, algorithm=rejection, training={"updates": 2, "learning_rate": 0.02})
    assert outcome.updates == 2
    for row, now, sample in zip(rows, logprobs_now(tiny, rows), outcome.samples, strict=True):
        log_weight = now.astype(np.float64) - row.logprobs
        assert sample.rejected == (np.exp(log_weight) - 1 - log_weight > 0.02).sum()


def test_the_same_rows_give_the_same_bits(tiny: Path) -> None:
    trainers = [policy(tiny, training={"micro_batch_tokens": 100}) for _ in range(2)]
    first, second = ([step(each, make_rows(10), VERSION + number) for number in range(3)] for each in trainers)
    assert first == second
    assert same(*map(weights, trainers))


# The account and chain of a step hold what entered the loss of an update that was taken, and nothing else.


def expect(outcome: StepOutcome, rows: list[TrainRow], expected: Sequence[str]) -> None:
    assert [sample.untrained_because for sample in outcome.samples] == list(expected)
    assert outcome.metrics["tokens/trained"] == sum(sample.trained for sample in outcome.samples)
    assert outcome.trained == tuple(row.key for row, why in zip(rows, expected, strict=True) if not why)


def test_a_row_lost_between_packing_and_loss_has_not_trained(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def lossy(*given: Any, packed: bool) -> list[list[int]]:
        return [[row for row in part if row != 2] for part in micro_batches(*given, packed=packed)]

    monkeypatch.setattr(asyncrl.engines.training.training_step, "micro_batches", lossy)
    rows = make_rows(4)
    outcome = train(rows)
    expect(outcome, rows, ["", "", LEFT_OUT, ""])
    assert outcome.samples[2].trained == 0


def test_masked_rows_have_not_trained(train: Train) -> None:
    rows = make_rows(3)
    rows = [rows[0], dataclasses.replace(rows[1], truncated=True), dataclasses.replace(rows[2], incarnation=0)]
    expect(train(rows, algorithm={"mask_truncated": True}), rows, ["", "truncated", "stale"])


def test_an_update_that_is_not_finite_has_trained_none_of_its_rows(train: Train) -> None:
    rows = make_rows(4)
    rows = [*rows[:3], dataclasses.replace(rows[3], advantage=float("nan"))]
    outcome = train(rows, training={"updates": 2, "micro_batch_tokens": 1})
    assert outcome.updates == 1
    expect(outcome, rows, ["", "", "not finite", "not finite"])


def test_rows_whose_every_token_is_rejected_have_not_trained(tiny: Path, train: Train) -> None:
    rows = near(tiny, make_rows(4), 0)
    rows = [*rows[:3], dataclasses.replace(rows[3], logprobs=rows[3].logprobs - 3)]
    expect(train(rows, algorithm=BOUNDS), rows, ["", "", "", "rejected"])


def test_a_batch_whose_every_token_is_rejected_is_no_step(tiny: Path) -> None:
    rows = changed(make_rows(4), logprobs=lambda row: row.logprobs - 30)
    trainer = policy(tiny, algorithm=BOUNDS, training={"weight_decay": 0.1})
    before = weights(trainer)
    outcome = step(trainer, rows)
    assert (outcome.updates, outcome.skipped, trainer.optimizer.updates) == (0, "rejected", 0)
    expect(outcome, rows, ["rejected"] * 4)
    assert all(parameter.grad is None for parameter in trainer.optimizer.parameters)
    assert same(before, weights(trainer))


def test_shown_rows_have_the_numbers_of_their_tokens(train: Train) -> None:
    rows = make_rows(3)
    parts = np.linspace(-1.0, 1.0, len(rows[0].versions)) / 3
    rows[0] = dataclasses.replace(rows[0], is_shown=True, advantage=parts, rewards=parts[::-1].copy())
    rows[1] = dataclasses.replace(rows[1], is_shown=True)
    rows[2] = dataclasses.replace(rows[2], advantage=np.zeros(len(rows[2].versions)))
    first, second, third = train(rows).samples
    assert first.advantages == pytest.approx(parts, abs=5e-5)
    assert first.rewards == pytest.approx(parts[::-1], abs=5e-5)
    assert (second.advantages, second.rewards, third.advantages) == ((), (), ())

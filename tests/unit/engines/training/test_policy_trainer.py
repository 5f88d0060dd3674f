"""A training step: gradients, denominators, masks, updates, what is skipped, and that it repeats bit for bit."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.config.schema import Config
from asyncrl.engines.training.models_with_heads import frozen_logprobs, load_causal_model
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import StepOutcome, run_step

INCARNATION = 1
VERSION = 5
FROZEN = {"learning_rate": 0.0}
AGGREGATIONS = ("token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "constant")


def weights(engine: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.float().clone() for name, tensor in engine.named_tensors().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def trained_keys(outcome: StepOutcome) -> list[tuple[int, int, int]]:
    return sorted((sample.group, sample.member, sample.attempt) for sample in outcome.samples if sample.trained)


def gradients(config: Config, folder: Path, rows: list[TrainRow]) -> list[torch.Tensor]:
    """Of the first optimizer step, before clipping."""
    engine = PolicyTrainer(config, folder)
    found: dict[torch.nn.Parameter, torch.Tensor] = {}
    for parameter in engine.optimizer.parameters:
        parameter.register_post_accumulate_grad_hook(lambda p: found.update({p: p.grad.clone()}))
    run_step(engine, rows, INCARNATION, VERSION)
    return [found[parameter] for parameter in engine.optimizer.parameters]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.trap("tempered_logprobs")
def test_ratio_of_an_unchanged_policy_is_one(
    temperature: float, tiny: Path, on_policy: Callable, make_config: Callable
) -> None:
    outcome = run_step(PolicyTrainer(make_config(), tiny), on_policy(temperature=temperature), INCARNATION, VERSION)
    assert outcome.metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert outcome.metrics["policy/ess"] == pytest.approx(1, abs=1e-5)
    assert outcome.metrics["policy/logprob_difference_max"] < 1e-5
    assert outcome.metrics["policy/kl_rollout_train"] == pytest.approx(0, abs=1e-6)


def test_tokens_over_keys_of_older_weights_are_no_difference_of_engines(
    tiny: Path, on_policy: Callable, make_config: Callable
) -> None:
    """Sampled under `kv = "keep"`: the token is of the weights that train, what it looks back at is not."""
    rows = [row for row in on_policy() if len(row.response_ids) > 4]
    mixed = []
    for row in rows[1:]:
        versions = row.versions.copy()
        logprobs = row.logprobs.copy()
        versions[:2] -= 1
        logprobs[2:] -= 0.2
        mixed.append(dataclasses.replace(row, versions=versions, logprobs=logprobs))
    outcome = run_step(PolicyTrainer(make_config(), tiny), [rows[0], *mixed], INCARNATION, VERSION)
    assert outcome.metrics["policy/logprob_difference_max"] < 1e-5
    alone = run_step(PolicyTrainer(make_config(), tiny), mixed, INCARNATION, VERSION)
    assert "policy/logprob_difference_max" not in alone.metrics


@pytest.mark.trap("end_is_padding")
def test_the_last_sampled_token_has_a_gradient_even_when_it_is_also_the_padding(
    tiny: Path, make_rows: Callable, make_config: Callable
) -> None:
    eos = np.zeros(1, np.int64)
    row = make_rows(1, response_ids=eos, logprobs=np.full(1, -3, np.float32), versions=np.full(1, VERSION))[0]
    wide = make_config(algorithm={"clip_low": 1e9, "clip_high": 1e9})
    outcome = run_step(PolicyTrainer(wide, tiny), [row], INCARNATION, VERSION)
    assert outcome.samples[0].trained == 1
    assert outcome.metrics["grad_norm"] > 1e-3


@pytest.mark.trap("end_is_padding")
def test_no_token_is_left_out_for_its_id(tiny: Path, make_rows: Callable, make_config: Callable) -> None:
    """The padding's id, which is the end's here, at both ends of an answer and in its middle, beside longer rows."""
    ids = np.array([0, 7, 0, 8, 0])
    short = make_rows(1, response_ids=ids, logprobs=np.full(5, -3, np.float32), versions=np.full(5, VERSION))
    outcome = run_step(PolicyTrainer(make_config(), tiny), [*short, *make_rows(8)[4:]], INCARNATION, VERSION)
    assert (outcome.samples[0].trained, outcome.samples[0].masked) == (5, 0)
    assert outcome.metrics["tokens/trained"] == outcome.metrics["tokens/response"]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.trap("truncated")
def test_truncated_samples_leave_loss_and_denominator_when_asked(
    masked: bool, aggregation: str, tiny: Path, make_rows: Callable, make_config: Callable
) -> None:
    rows = make_rows(6)
    average = {"aggregation": aggregation}
    rows[2] = dataclasses.replace(rows[2], truncated=True)
    config = make_config(algorithm={"mask_truncated": masked, **average})
    outcome = run_step(PolicyTrainer(config, tiny), rows, INCARNATION, VERSION)
    kept = rows[:2] + rows[3:] if masked else rows
    alone = run_step(PolicyTrainer(make_config(algorithm=average), tiny), kept, INCARNATION, VERSION)
    assert outcome.metrics["loss/policy"] == pytest.approx(alone.metrics["loss/policy"], abs=1e-6)
    assert (outcome.metrics["mask/truncated_fraction"] > 0) == masked
    assert outcome.samples[2].reason == ("truncated" if masked else "")
    assert len(trained_keys(outcome)) == (5 if masked else 6)


@pytest.mark.trap("truncated")
def test_a_batch_of_answers_without_an_end_is_skipped_as_truncated(
    tiny: Path, make_rows: Callable, make_config: Callable
) -> None:
    rows = [dataclasses.replace(row, truncated=True) for row in make_rows(4)]
    outcome = run_step(PolicyTrainer(make_config(algorithm={"mask_truncated": True}), tiny), rows, INCARNATION, VERSION)
    assert (outcome.updates, outcome.skipped, outcome.metrics["mask/stale_fraction"]) == (0, "truncated", 0)
    assert {sample.reason for sample in outcome.samples} == {"truncated"}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.trap("masked_denominators")
def test_masking_a_sample_or_its_head_leaves_the_gradients_of_the_others_unchanged(
    aggregation: str, share: float, tiny: Path, make_rows: Callable, make_config: Callable
) -> None:
    rows = make_rows(6)
    config = make_config(algorithm={"aggregation": aggregation})
    row = rows[5]
    old = np.arange(len(row.versions)) < share * len(row.versions)
    silent = [*rows[:5], dataclasses.replace(row, advantage=np.where(old, 0.0, row.advantage))]
    stale = [*rows[:5], dataclasses.replace(row, versions=row.versions - 3 * old)]
    for first, second in zip(gradients(config, tiny, silent), gradients(config, tiny, stale), strict=True):
        torch.testing.assert_close(first, second, atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize("divisor", [None, 100])
@pytest.mark.trap("batch_length_divisor")
def test_a_constant_divisor_is_that_of_the_config_whatever_the_batch(
    divisor: int | None, tiny: Path, make_rows: Callable, make_config: Callable
) -> None:
    rows = make_rows(6)
    sums = run_step(
        PolicyTrainer(make_config(algorithm={"aggregation": "sequence_mean_token_sum"}), tiny),
        rows,
        INCARNATION,
        VERSION,
    )
    config = make_config(algorithm={"aggregation": "constant", "divisor": divisor})
    outcome = run_step(PolicyTrainer(config, tiny), rows, INCARNATION, VERSION)
    tokens = divisor or config.generation.max_new_tokens
    assert tokens > max(len(row.versions) for row in rows)
    assert outcome.metrics["loss/policy"] == pytest.approx(sums.metrics["loss/policy"] / tokens, rel=1e-5)


@pytest.mark.trap("engines_disagree")
def test_what_engine_and_trainer_say_of_a_fresh_token_is_compared(
    tiny: Path, on_policy: Callable, make_config: Callable
) -> None:
    rows = [dataclasses.replace(row, versions=np.full_like(row.versions, VERSION)) for row in on_policy(4)]
    off = rows[1].logprobs + np.float32(0.25)
    rows[1] = dataclasses.replace(rows[1], logprobs=off)
    metrics = run_step(PolicyTrainer(make_config(), tiny), rows, INCARNATION, VERSION).metrics
    assert metrics["policy/logprob_difference_max"] == pytest.approx(0.25, abs=1e-4)
    share = len(off) / sum(len(row.logprobs) for row in rows)
    assert metrics["policy/kl_rollout_train"] == pytest.approx(0.25 * share, abs=1e-4)


def ragged_versions(rows: list[TrainRow]) -> list[TrainRow]:
    """Tokens of staleness 4 down to 0 in every row."""
    return [
        dataclasses.replace(row, versions=np.linspace(VERSION - 4, VERSION, len(row.response_ids)).astype(np.int64))
        for row in rows
    ]


@pytest.mark.parametrize("policy", ["mask", "drop", "block", "admit"])
@pytest.mark.parametrize("limit", [0, 2])
def test_no_token_over_the_bound_enters_the_loss(
    policy: str, limit: int, tiny: Path, make_rows: Callable, make_config: Callable
) -> None:
    rows = ragged_versions(make_rows(12))
    config = make_config(staleness={"limit": limit, "policy": policy})
    outcome = run_step(PolicyTrainer(config, tiny), rows, INCARNATION, VERSION)
    bound = 4 if policy == "admit" else limit
    expected = [int((VERSION - row.versions <= bound).sum()) for row in rows]
    assert [sample.trained for sample in outcome.samples] == expected
    assert outcome.metrics["staleness/max"] == bound
    assert outcome.metrics["staleness/updates_max"] == bound
    stale = sum(len(row.versions) for row in rows) - sum(expected)
    assert outcome.metrics["mask/stale_fraction"] == stale / sum(len(row.versions) for row in rows)
    assert {s.reason for s in outcome.samples if s.masked} <= {"stale"}


def test_a_stale_head_changes_nothing_but_its_own_terms(tiny: Path, make_rows: Callable, make_config: Callable) -> None:
    """What a masked token recorded cannot matter."""
    rows = ragged_versions(make_rows(6))
    spoilt = [
        dataclasses.replace(row, logprobs=np.where(row.versions < VERSION - 2, -99, row.logprobs).astype(np.float32))
        for row in rows
    ]
    engines = [PolicyTrainer(make_config(), tiny) for _ in range(2)]
    for engine, batch in zip(engines, (rows, spoilt), strict=True):
        run_step(engine, batch, INCARNATION, VERSION)
    assert same(*map(weights, engines))


@pytest.mark.parametrize("change", [{"incarnation": 0}, {"versions": None}])
def test_a_batch_without_a_live_token_is_no_step(
    change: dict, tiny: Path, make_rows: Callable, make_config: Callable
) -> None:
    rows = make_rows(4)
    rows = [
        dataclasses.replace(r, **({"incarnation": 0} if "incarnation" in change else {"versions": r.versions - 3}))
        for r in rows
    ]
    engine = PolicyTrainer(make_config(), tiny)
    before = weights(engine)
    outcome = run_step(engine, rows, INCARNATION, VERSION)
    assert (outcome.updates, outcome.skipped, trained_keys(outcome)) == (0, "stale", [])
    assert {(s.trained, s.reason) for s in outcome.samples} == {(0, "stale")}
    assert same(before, weights(engine))


@pytest.mark.trap("not_finite")
def test_a_step_that_is_not_finite_changes_nothing_and_names_the_sample(
    tiny: Path, make_rows: Callable, make_config: Callable
) -> None:
    """The shortest row is computed last: the micro-batches before it had added their gradients."""
    rows = make_rows(6)
    last = min(rows, key=lambda row: len(row.prompt_ids) + len(row.response_ids))
    broken = [dataclasses.replace(row, advantage=float("nan")) if row is last else row for row in rows]
    config = make_config(training={"micro_batch_tokens": 1})
    engine = PolicyTrainer(config, tiny)
    before = weights(engine)
    outcome = run_step(engine, broken, INCARNATION, VERSION)
    assert (outcome.updates, outcome.skipped, trained_keys(outcome)) == (0, "not finite", [])
    assert outcome.culprits == (last.key,)
    assert all(np.isfinite(value) for value in outcome.metrics.values())
    assert same(before, weights(engine))
    run_step(engine, rows, INCARNATION, VERSION)
    fresh = PolicyTrainer(config, tiny)
    run_step(fresh, rows, INCARNATION, VERSION)
    assert same(weights(engine), weights(fresh)), "nothing of the skipped step is left"


@pytest.mark.trap("not_finite")
def test_a_gradient_that_is_not_finite_changes_nothing(tiny: Path, make_rows: Callable, make_config: Callable) -> None:
    engine = PolicyTrainer(make_config(), tiny)
    parameter = engine.optimizer.parameters[0]
    parameter.register_hook(lambda gradient: gradient * float("inf"))
    before = weights(engine)
    outcome = run_step(engine, make_rows(3), INCARNATION, VERSION)
    assert (outcome.updates, outcome.skipped) == (0, "not finite")
    assert same(before, weights(engine))


def test_updates_split_the_batch_and_each_has_its_own_denominator(
    tiny: Path, make_rows: Callable, make_config: Callable
) -> None:
    rows = make_rows(8)
    split = PolicyTrainer(make_config(training={"updates": 2, "learning_rate": 1e-3}), tiny)
    outcome = run_step(split, rows, INCARNATION, VERSION)
    assert outcome.updates == 2
    assert outcome.metrics["staleness/updates_max"] == 1
    halves = PolicyTrainer(make_config(), tiny)
    for half in (rows[:4], rows[4:]):
        run_step(halves, half, INCARNATION, VERSION)
    assert same(weights(split), weights(halves))


def test_recomputed_log_probs_are_those_at_the_start_of_the_step(
    tiny: Path, make_rows: Callable, make_config: Callable
) -> None:
    """With a learning rate of zero every ratio is exactly current / proximal = 1, whatever was recorded, and at the
    temperature of the rows."""
    config = make_config(training={"updates": 3, **FROZEN}, algorithm={"old_logprobs": "recomputed", "weight_cap": 2.0})
    outcome = run_step(PolicyTrainer(config, tiny), make_rows(9, temperature=0.7), INCARNATION, VERSION)
    assert outcome.metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert outcome.metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-5)
    assert outcome.metrics["policy/weight_mean"] != pytest.approx(1, abs=1e-2)


def test_the_second_update_is_measured_against_the_start_of_the_step(
    tiny: Path, make_rows: Callable, make_config: Callable
) -> None:
    """Its ratio is to the policy before the first update, and the weight goes from there to the sampler."""
    rows = make_rows(8, reference_logprobs=None)
    algorithm = {"old_logprobs": "recomputed", "weight_cap": 1.5, "aggregation": "token_mean"}
    fast = {"learning_rate": 3e-3}
    before = load_causal_model(tiny, "cpu")
    halfway = PolicyTrainer(make_config(training=fast, algorithm=algorithm), tiny)
    first = run_step(halfway, rows[:4], INCARNATION, VERSION)
    total = 0.0
    tokens = 0
    for row in rows[4:]:
        start, now = (
            frozen_logprobs(model, [row.prompt_ids], [row.response_ids], [1.0], 1024)[0].astype(np.float64)
            for model in (before, halfway.model)
        )
        ratio = np.exp(now - start)
        weight = np.minimum(np.exp(start - row.logprobs), 1.5)
        total -= (weight * np.minimum(ratio * row.advantage, np.clip(ratio, 0.8, 1.2) * row.advantage)).sum()
        tokens += len(now)
        assert not np.allclose(ratio, 1, atol=1e-3)
    both = PolicyTrainer(make_config(training={"updates": 2, **fast}, algorithm=algorithm), tiny)
    metrics = run_step(both, rows, INCARNATION, VERSION).metrics
    assert metrics["loss/policy"] == pytest.approx((first.metrics["loss/policy"] + total / tokens) / 2, rel=1e-4)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"old_logprobs": "recomputed", "correction": "mask"},
        {"rejection": "token_k3", "rejection_high": 0.5},
    ],
)
def test_tokens_that_a_correction_leaves_out_have_not_trained(
    algorithm: dict, tiny: Path, make_rows: Callable, make_config: Callable
) -> None:
    rows = make_rows(8)
    model = load_causal_model(tiny, "cpu")
    config = make_config(algorithm=algorithm, training={"micro_batch_tokens": 100})
    outcome = run_step(PolicyTrainer(config, tiny), rows, INCARNATION, VERSION)
    for row, sample in zip(rows, outcome.samples, strict=True):
        (now,) = frozen_logprobs(model, [row.prompt_ids], [row.response_ids], [1.0], 1024)
        log_weight = now.astype(np.float64) - row.logprobs
        weight = np.exp(log_weight)
        out = (weight < 0.5) | (weight > 5) if "correction" in algorithm else weight - 1 - log_weight > 0.5
        expected = (len(row.response_ids) - out.sum(), 0, out.sum())
        assert (sample.trained, sample.masked, sample.rejected) == expected
    rejected = sum(sample.rejected for sample in outcome.samples)
    assert 0 < rejected < outcome.metrics["tokens/response"]
    assert outcome.metrics["tokens/trained"] == outcome.metrics["tokens/response"] - rejected


def outcome_and_weights(config: Config, folder: Path, rows: list[TrainRow]) -> tuple[StepOutcome, dict]:
    engine = PolicyTrainer(config, folder)
    for version in range(VERSION, VERSION + 3):
        outcome = run_step(engine, rows, INCARNATION, version)
    return outcome, weights(engine)


def test_the_same_rows_give_the_same_bits(tiny: Path, make_rows: Callable, make_config: Callable) -> None:
    config = make_config(training={"micro_batch_tokens": 100})
    first, second = (outcome_and_weights(config, tiny, make_rows(10)) for _ in range(2))
    assert first[0] == second[0]
    assert same(first[1], second[1])


def test_gradient_checkpointing_changes_no_gradient(tiny: Path, make_rows: Callable, make_config: Callable) -> None:
    rows = make_rows(6)
    plain = gradients(make_config(), tiny, rows)
    again = gradients(make_config(training={"gradient_checkpointing": True}), tiny, rows)
    for first, second in zip(plain, again, strict=True):
        torch.testing.assert_close(first, second, atol=1e-6, rtol=1e-4)

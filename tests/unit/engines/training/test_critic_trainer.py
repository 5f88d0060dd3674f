"""The critic's engine: values, gradients, masks, checkpoints."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from asyncrl.config.schema import Config
from asyncrl.engines.training.critic_trainer import CriticTrainer
from asyncrl.engines.training.policy_loss import token_advantages
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.errors import ConfigError
from tests.unit.engines.training.tiny_training import (
    VERSION,
    assert_close,
    changed,
    drawn,
    gradients,
    make_config,
    make_rows,
    step,
)

LENGTH = 14
ROWS = 7
BUDGETS = {1: LENGTH * ROWS, 2: LENGTH * 4, 7: LENGTH}
"""Micro-batches of ROWS rows of LENGTH tokens, and the budget that makes as many."""


def ppo(**sections: Any) -> Config:
    """ppo(critic={...}, ...) -> Config with a critic."""
    critic = {"learning_rate": 1e-2} | sections.pop("critic", {})
    return make_config(algorithm={"preset": "ppo"}, critic=critic, **sections)


def judged() -> list[TrainRow]:
    """Rows of prompt and response with LENGTH tokens together, with values."""
    draw = np.random.default_rng(3)
    rows = []
    for row in make_rows(ROWS, 3):
        tokens = LENGTH - len(row.prompt_ids)
        changes = {"response_ids": draw.integers(0, 50, tokens), "versions": np.full(tokens, VERSION)}
        changes["logprobs"] = draw.normal(-4, 0.3, tokens).astype(np.float32)
        rows.append(dataclasses.replace(row, **changes))
    return changed(rows, values=drawn(0, 0.3))


def with_a_head(config: Config, folder: Path) -> CriticTrainer:
    """A critic whose values are no longer all 0."""
    critic = CriticTrainer(config, folder)
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in critic.model.head.parameters():
            parameter.normal_(0, 0.5)
    return critic


def values_of(critic: CriticTrainer, rows: list[TrainRow]) -> list[np.ndarray]:
    return [critic.values([row])[0] for row in rows]


def test_a_new_head_values_every_token_at_0_and_one_of_the_folder_is_kept(tiny: Path, tmp_path: Path) -> None:
    """transformers loads the checkpoint as what it is."""
    rows = judged()
    for values, row in zip(values_of(CriticTrainer(ppo(), tiny), rows), rows, strict=True):
        np.testing.assert_array_equal(values, np.zeros(len(row.response_ids), np.float32))
    critic = with_a_head(ppo(), tiny)
    critic.save(tmp_path, {})
    again = CriticTrainer(ppo(), tmp_path / "model")
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "model").eval()
    for values, expected, row in zip(values_of(again, rows), values_of(critic, rows), rows, strict=True):
        assert values.tobytes() == expected.tobytes()
        assert np.abs(values).max() > 0.1
        ids = np.concatenate([row.prompt_ids, row.response_ids[:-1]])
        with torch.no_grad():
            found = model(input_ids=torch.from_numpy(ids)[None]).logits[0, len(row.prompt_ids) - 1 :, 0]
        np.testing.assert_allclose(found.numpy(), values, atol=1e-5)


def test_rows_together_are_valued_as_alone(tiny: Path) -> None:
    critic = with_a_head(ppo(), tiny)
    rows = make_rows(9)
    for found, alone in zip(critic.values(rows), values_of(critic, rows), strict=True):
        np.testing.assert_allclose(found, alone, atol=1e-5)


@pytest.mark.trap("micro_batches")
def test_gradients_are_the_same_for_1_2_and_7_micro_batches(tiny: Path) -> None:
    found = {}
    for count, budget in BUDGETS.items():
        critic = with_a_head(ppo(training={"micro_batch_tokens": budget}), tiny)
        _, found[count] = gradients(critic, judged())
        run = critic.begin(judged(), 1, VERSION)
        assert sum(1 for _ in iter(run.advance, False)) == count + 1, "and the optimizer step"
    for count in (2, 7):
        assert_close(found[count], found[1])


def test_its_metrics_are_those_of_the_formulas(tiny: Path) -> None:
    config = ppo(critic={"learning_rate": 0.0})
    rows = changed(judged(), valued_at=-3)
    critic = with_a_head(config, tiny)
    values = np.concatenate(values_of(critic, rows)).astype(np.float64)
    returns = np.concatenate([token_advantages(row, config.algorithm) + row.values for row in rows])
    old = np.concatenate([row.values for row in rows]).astype(np.float64)
    clipped = np.clip(values, old - 0.2, old + 0.2)
    losses = np.maximum((values - returns) ** 2, (clipped - returns) ** 2) / 2
    outcome = step(critic, rows)
    expected = {
        "critic/updates": 1.0,
        "critic/loss": losses.mean(),
        "critic/clip_frac": ((clipped - returns) ** 2 > (values - returns) ** 2).mean(),
        "critic/value_mean": values.mean(),
        "critic/return_mean": returns.mean(),
        "critic/explained_variance": 1 - np.var(returns - values) / np.var(returns),
        "critic/staleness": 3.0,
        "critic/learning_rate": 0.0,
    }
    assert {name: outcome.metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert outcome.metrics.keys() - expected.keys() == {"critic/grad_norm"}
    assert critic.optimizer.updates == 1


@pytest.mark.trap("masked_denominators")
def test_a_stale_token_loses_its_term_and_re_weights_no_other(tiny: Path) -> None:
    rows = judged()
    stale = changed(rows, versions=lambda row: row.versions - 9)
    batches = (rows, [*stale[:3], *rows[3:]], [*rows[:3], *stale[3:]])
    whole, *parts = (gradients(with_a_head(ppo(), tiny), batch)[1] for batch in batches)
    assert_close([first + second for first, second in zip(*parts, strict=True)], whole)
    critic = CriticTrainer(ppo(), tiny)
    outcome = step(critic, stale)
    assert (outcome.updates, outcome.skipped, critic.optimizer.updates) == (0, "stale", 0)


@pytest.mark.parametrize(("age", "skipped"), [(2, ""), (3, "stale")])
def test_a_critic_learns_from_no_token_beyond_the_limit(age: int, skipped: str, tiny: Path) -> None:
    rows = changed(judged(), versions=lambda row: row.versions - age)
    assert step(CriticTrainer(ppo(staleness={"limit": 2}), tiny), rows).skipped == skipped


@pytest.mark.trap("not_finite")
def test_an_update_that_is_not_finite_changes_nothing(tiny: Path) -> None:
    critic = with_a_head(ppo(), tiny)
    before = [parameter.detach().clone() for parameter in critic.optimizer.parameters]
    outcome = step(critic, changed(judged(), advantage=float("nan")))
    assert (outcome.updates, outcome.skipped, outcome.metrics) == (0, "not finite", {"critic/updates": 0.0})
    assert all(torch.equal(old, new) for old, new in zip(before, critic.optimizer.parameters, strict=True))


def test_it_learns_what_follows(tiny: Path) -> None:
    critic = CriticTrainer(ppo(critic={"learning_rate": 3e-3, "value_clip": 0}, training={"updates": 2}), tiny)
    rows = judged()
    first, *_, last = (step(critic, rows).metrics for _ in range(40))
    assert first["critic/explained_variance"] == pytest.approx(0, abs=0.2)
    assert last["critic/explained_variance"] > 0.9
    assert last["critic/loss"] < 0.1 * first["critic/loss"]
    assert critic.optimizer.updates == 80


def test_a_resumed_critic_goes_on_bit_for_bit(tiny: Path, tmp_path: Path) -> None:
    rows = judged()
    critic = CriticTrainer(ppo(), tiny)
    for _ in range(3):
        step(critic, rows)
    critic.save(tmp_path / "critic", {"version": 3})
    resumed, extra = CriticTrainer.resume(ppo(), tmp_path / "critic")
    assert (extra, resumed.optimizer.updates) == ({"version": 3}, 3)
    for each in (critic, resumed):
        step(each, rows)
    for values, expected in zip(values_of(resumed, rows), values_of(critic, rows), strict=True):
        assert values.tobytes() == expected.tobytes()


def test_a_reward_model_keeps_its_head(tiny: Path, tmp_path: Path) -> None:
    """Its head has no bias; what is missing begins at 0."""
    torch.manual_seed(6)
    model = AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1, pad_token_id=0)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path)
    row = judged()[0]
    ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids[:-1]]))[None]
    with torch.no_grad():
        states = model.model(input_ids=ids).last_hidden_state[0, len(row.prompt_ids) - 1 :]
        expected = model.score(states)[:, 0].numpy()
    np.testing.assert_allclose(values_of(CriticTrainer(ppo(), tmp_path), [row])[0], expected, atol=1e-5)
    assert np.abs(expected).max() > 1e-3


def test_a_head_with_more_labels_is_refused(tiny: Path, tmp_path: Path) -> None:
    AutoModelForTokenClassification.from_pretrained(tiny, num_labels=3).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot be a critic: its head has another number"):
        CriticTrainer(ppo(), tmp_path)


def test_a_checkpoint_without_a_critic_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no critic: .* start anew with another --run-dir"):
        CriticTrainer.resume(ppo(), tmp_path / "critic")


@pytest.mark.parametrize(("own", "rate"), [({}, 1e-2), ({"learning_rate": 3e-4}, 3e-4)])
def test_a_critic_learns_ten_times_as_fast_unless_told_otherwise(own: dict, rate: float, tiny: Path) -> None:
    config = make_config(algorithm={"preset": "ppo"}, training={"learning_rate": 1e-3}, critic=own)
    assert CriticTrainer(config, tiny).optimizer.settings.learning_rate == pytest.approx(rate)

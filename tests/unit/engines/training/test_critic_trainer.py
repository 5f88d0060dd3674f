"""The critic's engine: values, gradients, masks, checkpoints; and what its values make of the policy's advantages."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from asyncrl.config.schema import Config
from asyncrl.engines.ranks.rank_mesh import Ranks
from asyncrl.engines.training.critic_trainer import CriticTrainer
from asyncrl.engines.training.micro_batches import mask_rows
from asyncrl.engines.training.models_with_heads import frozen_logprobs
from asyncrl.engines.training.policy_loss import set_token_advantages, token_advantages
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import StepOutcome, run_step
from asyncrl.errors import ConfigError

INCARNATION = 1
VERSION = 5
LENGTH = 14
ROWS = 7
BUDGETS = {1: LENGTH * ROWS, 2: LENGTH * 4, 7: LENGTH}
"""Micro-batches of ROWS rows of LENGTH tokens, and the budget that makes as many."""


@pytest.fixture
def ppo(make_config: Callable) -> Callable[..., Config]:
    """ppo(critic={...}, algorithm={...}, ...) -> Config with a critic."""

    def make(**sections: dict[str, Any]) -> Config:
        algorithm = {"preset": "ppo", **sections.pop("algorithm", {})}
        return make_config(algorithm=algorithm, critic={"learning_rate": 1e-2} | sections.pop("critic", {}), **sections)

    return make


@pytest.fixture
def judged(make_rows: Callable) -> Callable[..., list[TrainRow]]:
    """Rows of prompt and response with LENGTH tokens together, with values and a reference."""

    def make(count: int = ROWS, seed: int = 3) -> list[TrainRow]:
        draw = np.random.default_rng(seed)
        rows = []
        for row in make_rows(count, seed):
            tokens = LENGTH - len(row.prompt_ids)
            changes = {
                "response_ids": draw.integers(0, 50, tokens),
                "logprobs": draw.normal(-4, 0.3, tokens).astype(np.float32),
                "reference_logprobs": draw.normal(-4, 0.3, tokens).astype(np.float32),
                "versions": np.full(tokens, VERSION),
                "values": draw.normal(0, 0.3, tokens).astype(np.float32),
            }
            rows.append(dataclasses.replace(row, **changes))
        return rows

    return make


def learn(critic: CriticTrainer, rows: list[TrainRow]) -> StepOutcome:
    return run_step(critic, rows, INCARNATION, VERSION)


def parameters(critic: CriticTrainer) -> list[torch.nn.Parameter]:
    return critic.optimizer.parameters


def with_a_head(critic: CriticTrainer) -> CriticTrainer:
    """One whose values are no longer all 0."""
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in critic.model.head.parameters():
            parameter.normal_(0, 0.5)
    return critic


def gradient(critic: CriticTrainer, rows: list[TrainRow]) -> torch.Tensor:
    """Of the first update, all parameters in one vector."""
    found: dict[torch.nn.Parameter, torch.Tensor] = {}
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda p: found.update({p: p.grad.clone()}))
        for parameter in parameters(critic)
    ]
    learn(critic, rows)
    for hook in hooks:
        hook.remove()
    return torch.cat([found[parameter].flatten() for parameter in parameters(critic)])


def values_of(critic: CriticTrainer, rows: list[TrainRow]) -> list[np.ndarray]:
    return [critic.values([row.prompt_ids], [row.response_ids])[0] for row in rows]


def test_a_new_head_values_every_token_at_0_and_one_of_the_folder_is_kept(
    tiny: Path, ppo: Callable, judged: Callable, tmp_path: Path
) -> None:
    rows = judged()
    critic = CriticTrainer(ppo(), tiny)
    for values, row in zip(values_of(critic, rows), rows, strict=True):
        np.testing.assert_array_equal(values, np.zeros(len(row.response_ids), np.float32))
    with_a_head(critic).save(tmp_path, {})
    again = CriticTrainer(ppo(), tmp_path / "model")
    for values, expected in zip(values_of(again, rows), values_of(critic, rows), strict=True):
        assert values.tobytes() == expected.tobytes()
        assert np.abs(values).max() > 0.1


def test_rows_together_are_valued_as_alone(tiny: Path, ppo: Callable, judged: Callable, make_rows: Callable) -> None:
    critic = with_a_head(CriticTrainer(ppo(), tiny))
    rows = make_rows(9)
    together = critic.values([row.prompt_ids for row in rows], [row.response_ids for row in rows])
    for found, alone in zip(together, values_of(critic, rows), strict=True):
        np.testing.assert_allclose(found, alone, atol=1e-5)


@pytest.mark.trap("micro_batches")
def test_gradients_are_the_same_for_1_2_and_7_micro_batches(tiny: Path, ppo: Callable, judged: Callable) -> None:
    found = {}
    for count, budget in BUDGETS.items():
        critic = with_a_head(CriticTrainer(ppo(training={"micro_batch_tokens": budget}), tiny))
        step = critic.begin(judged(), INCARNATION, VERSION)
        passes = 0
        while step.advance():
            passes += 1
        assert passes == count + 1, "and the optimizer step"
        critic = with_a_head(CriticTrainer(ppo(training={"micro_batch_tokens": budget}), tiny))
        found[count] = gradient(critic, judged())
    assert found[1].abs().max() > 1e-3
    for count in (2, 7):
        torch.testing.assert_close(found[count], found[1], atol=1e-6, rtol=1e-4)


def test_its_metrics_are_those_of_the_formulas(tiny: Path, ppo: Callable, judged: Callable) -> None:
    config = ppo(critic={"learning_rate": 0.0})
    rows = [dataclasses.replace(r, valued_at=-3) for r in judged()]
    critic = with_a_head(CriticTrainer(config, tiny))
    values = np.concatenate(values_of(critic, rows)).astype(np.float64)
    returns = np.concatenate([token_advantages(row, config.algorithm) + row.values for row in rows])
    old = np.concatenate([row.values for row in rows]).astype(np.float64)
    clipped = np.clip(values, old - 0.2, old + 0.2)
    losses = np.maximum((values - returns) ** 2, (clipped - returns) ** 2) / 2
    outcome = learn(critic, rows)
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
def test_a_stale_token_loses_its_term_and_re_weights_no_other(tiny: Path, ppo: Callable, judged: Callable) -> None:
    rows = judged()
    whole = gradient(with_a_head(CriticTrainer(ppo(), tiny)), rows)
    stale = [dataclasses.replace(row, versions=row.versions - 9) for row in rows]
    parts = [
        gradient(with_a_head(CriticTrainer(ppo(), tiny)), [*stale[:3], *rows[3:]]),
        gradient(with_a_head(CriticTrainer(ppo(), tiny)), [*rows[:3], *stale[3:]]),
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole, atol=1e-6, rtol=1e-4)
    outcome = learn(critic := CriticTrainer(ppo(), tiny), stale)
    assert (outcome.updates, outcome.skipped, critic.optimizer.updates) == (0, "stale", 0)


@pytest.mark.trap("not_finite")
def test_an_update_that_is_not_finite_changes_nothing(tiny: Path, ppo: Callable, judged: Callable) -> None:
    critic = with_a_head(CriticTrainer(ppo(), tiny))
    before = [parameter.detach().clone() for parameter in parameters(critic)]
    outcome = learn(critic, [dataclasses.replace(row, advantage=float("nan")) for row in judged()])
    assert (outcome.updates, outcome.skipped, outcome.metrics) == (0, "not finite", {"critic/updates": 0.0})
    assert all(torch.equal(old, new) for old, new in zip(before, parameters(critic), strict=True))


def test_it_learns_what_follows(tiny: Path, ppo: Callable, judged: Callable) -> None:
    config = ppo(critic={"learning_rate": 3e-3, "value_clip": 0}, training={"updates": 2})
    critic = CriticTrainer(config, tiny)
    rows = judged()
    first, *_, last = (learn(critic, rows).metrics for _ in range(40))
    assert first["critic/explained_variance"] == pytest.approx(0, abs=0.2)
    assert last["critic/explained_variance"] > 0.9
    assert last["critic/loss"] < 0.1 * first["critic/loss"]
    assert critic.optimizer.updates == 80


def test_a_resumed_critic_goes_on_bit_for_bit(tiny: Path, ppo: Callable, judged: Callable, tmp_path: Path) -> None:
    config = ppo()
    rows = judged()
    critic = CriticTrainer(config, tiny)
    for _ in range(3):
        learn(critic, rows)
    critic.save(tmp_path / "critic", {"version": 3})
    resumed, extra = CriticTrainer.resume(config, tmp_path / "critic")
    assert (extra, resumed.optimizer.updates) == ({"version": 3}, 3)
    for each in (critic, resumed):
        learn(each, rows)
    for values, expected in zip(values_of(resumed, rows), values_of(critic, rows), strict=True):
        assert values.tobytes() == expected.tobytes()


def test_transformers_loads_a_checkpoint_as_what_it_is(
    tiny: Path, ppo: Callable, judged: Callable, tmp_path: Path
) -> None:
    critic = with_a_head(CriticTrainer(ppo(), tiny))
    row = judged()[0]
    critic.save(tmp_path, {})
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "model").eval()
    ids = np.concatenate([row.prompt_ids, row.response_ids[:-1]])
    with torch.no_grad():
        found = model(input_ids=torch.from_numpy(ids)[None]).logits[0, len(row.prompt_ids) - 1 :, 0]
    np.testing.assert_allclose(found.numpy(), values_of(critic, [row])[0], atol=1e-5)


def test_a_reward_model_keeps_its_head(tiny: Path, ppo: Callable, judged: Callable, tmp_path: Path) -> None:
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


def test_a_head_with_more_labels_is_refused(tiny: Path, ppo: Callable, tmp_path: Path) -> None:
    AutoModelForTokenClassification.from_pretrained(tiny, num_labels=3).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot be a critic: its head has another number"):
        CriticTrainer(ppo(), tmp_path)


def test_a_checkpoint_without_a_critic_is_refused(tiny: Path, ppo: Callable, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no critic: .* start anew with another --run-dir"):
        CriticTrainer.resume(ppo(), tmp_path / "critic")


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_the_policys_advantages_are_made_of_rewards_and_values(
    normalize: bool, kl: float, tiny: Path, ppo: Callable, judged: Callable
) -> None:
    config = ppo(algorithm={"normalize_std": normalize, "kl": kl, "gamma": 0.97, "clip_low": 99.0, "clip_high": 99.0})
    rows = [dataclasses.replace(r, reference_logprobs=r.reference_logprobs if kl else None) for r in judged()]
    advantages = []
    for row in rows:
        divergence = (row.logprobs - row.reference_logprobs).astype(np.float64) if kl else 0.0
        rewards = -kl * divergence + np.eye(len(row.values))[-1] * row.advantage
        ahead = np.append(row.values, 0.0).astype(np.float64)
        following = 0.0
        found = []
        for t in reversed(range(len(row.values))):
            following = rewards[t] + 0.97 * ahead[t + 1] - ahead[t] + 0.97 * 0.95 * following
            found.insert(0, following)
        advantages.append(np.array(found))
    flat = np.concatenate(advantages)
    if normalize:
        flat = (flat - flat.mean()) / (flat.std(ddof=1) + 1e-4)
    engine = PolicyTrainer(config, tiny)
    now = [engine_logprobs(engine, row) for row in rows]
    ratio = np.exp(np.concatenate(now).astype(np.float64) - np.concatenate([row.logprobs for row in rows]))
    outcome = run_step(engine, rows, INCARNATION, VERSION)
    assert outcome.metrics["loss/policy"] == pytest.approx(-(ratio * flat).mean(), rel=1e-4, abs=1e-6)
    assert outcome.metrics["loss/kl"] == 0


@pytest.mark.trap("truncated")
def test_answers_that_are_left_out_as_truncated_are_in_no_standardization(ppo: Callable, judged: Callable) -> None:
    rows = judged()
    algorithm = ppo(algorithm={"normalize_std": True}).algorithm

    def credited(cut: int, reward: float) -> list[np.ndarray]:
        batch = list(rows)
        batch[cut] = dataclasses.replace(rows[cut], truncated=True, advantage=reward)
        masked = mask_rows(batch, INCARNATION, VERSION, 2, "mask", True)
        set_token_advantages(masked, algorithm, 0.0, Ranks())
        return [np.asarray(item.advantages) for item in masked[:cut] + masked[cut + 1 :]]

    for first, second in zip(credited(2, 0.0), credited(2, 50.0), strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(("own", "rate"), [({}, 1e-2), ({"learning_rate": 3e-4}, 3e-4)])
def test_a_critic_learns_ten_times_as_fast_unless_told_otherwise(
    own: dict, rate: float, tiny: Path, make_config: Callable
) -> None:
    config = make_config(algorithm={"preset": "ppo"}, training={"learning_rate": 1e-3}, critic=own)
    assert CriticTrainer(config, tiny).optimizer.settings.learning_rate == pytest.approx(rate)


def engine_logprobs(engine: PolicyTrainer, row: TrainRow) -> np.ndarray:
    return frozen_logprobs(engine.model, [row.prompt_ids], [row.response_ids], [1.0], 1024)[0]

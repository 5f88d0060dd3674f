"""The loss of rows of several turns, and its gradient, are those of plain autograd over rows computed alone."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from asyncrl.config.schema import Config
from asyncrl.engines.training.critic_trainer import CriticTrainer
from asyncrl.engines.training.packed_rows import pack_rows
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from tests.unit.engines.training.tiny_training import (
    KNOWN,
    assert_close,
    gradients,
    logprobs_now,
    make_config,
    make_episodes,
)

MAX_TOKENS = 96
TEMPERATURE = 0.8
ALGORITHMS = {
    "grpo": {"preset": "grpo"},
    "dr_grpo": {"preset": "dr_grpo"},
    "kl in the loss": {"preset": "grpo", "kl": 0.3},
    "kl in the reward": {"preset": "rloo", "kl": 0.1},
    "ppo": {"preset": "ppo", "kl": 0.05},
    "ppo by token": {"preset": "ppo", "kl": 0.05},
}
EPISODES = {"environment": {"use": "guess.py:Guess", "max_tokens": MAX_TOKENS}, "training": {"max_grad_norm": 1e9}}


def states_of(row: TrainRow) -> list[int]:
    """The places, in prompt and response, before each sampled token, walked turn by turn."""
    assert row.spans is not None
    places = []
    at = len(row.prompt_ids)
    for sampled, given in row.spans.reshape(-1, 2).tolist():
        places += range(at - 1, at + sampled - 1)
        at += sampled + given
    return places


def last_of_turns(row: TrainRow) -> np.ndarray:
    assert row.spans is not None
    return np.isin(np.arange(len(row.logprobs)), np.cumsum(row.spans[::2]) - 1)


def whole(row: TrainRow) -> Tensor:
    return torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]))


def logprobs_of(model: torch.nn.Module, row: TrainRow) -> Tensor:
    """Log-probs of the sampled tokens, with gradient, by a forward pass over this row alone."""
    ids = whole(row)
    logprobs = (model(input_ids=ids[None]).logits[0, :, :KNOWN] / TEMPERATURE).log_softmax(-1)
    return torch.stack([logprobs[at, ids[at + 1]] for at in states_of(row)])


def clipped(current: Tensor, row: TrainRow, advantages: Tensor, dual_clip: float | None) -> tuple[Tensor, Tensor]:
    ratio = (current - torch.from_numpy(row.logprobs)).exp()
    held = ratio.clamp(0.8, 1.2)
    terms = -torch.minimum(ratio * advantages, held * advantages)
    if dual_clip:
        terms = torch.where(advantages < 0, torch.minimum(terms, -dual_clip * advantages), terms)
    return terms, held.detach()


def advantages_by_hand(row: TrainRow, algorithm: str) -> list[float]:
    """Of each sampled token, before those of PPO are standardized."""
    assert row.reference_logprobs is not None
    assert row.values is not None
    tokens = len(row.logprobs)
    kl = [float(a) - float(b) for a, b in zip(row.logprobs, row.reference_logprobs, strict=True)]
    if algorithm == "kl in the reward":
        return [row.advantage - 0.1 * sum(kl[token:]) for token in range(tokens)]
    if "ppo" not in algorithm:
        return [float(row.advantage)] * tokens
    values = [*map(float, row.values), 0.0]
    assert row.rewards is not None
    rewards = [float(own) - 0.05 * each for own, each in zip(row.rewards, kl, strict=True)]
    rewards[-1] += float(row.advantage) - float(row.rewards.sum())
    deltas = [rewards[token] + values[token + 1] - values[token] for token in range(tokens)]
    return [sum(0.95**later * deltas[token + later] for later in range(tokens - token)) for token in range(tokens)]


def loss_by_hand(model: torch.nn.Module, rows: Sequence[TrainRow], algorithm: str) -> Tensor:
    advantages = [torch.tensor(advantages_by_hand(row, algorithm), dtype=torch.float64) for row in rows]
    if "ppo" in algorithm:
        flat = torch.cat(advantages)
        advantages = [(each - flat.mean()) / (flat.std() + 1e-4) for each in advantages]
    total = torch.zeros(())
    for row, own in zip(rows, advantages, strict=True):
        current = logprobs_of(model, row)
        terms, held = clipped(current, row, own.float(), 3.0 if ALGORITHMS[algorithm]["preset"] == "grpo" else None)
        if algorithm == "kl in the loss":
            terms = terms + 0.3 * held * (current - torch.from_numpy(row.reference_logprobs)).square() / 2
        weights = {
            "grpo": 1 / len(terms) / len(rows),
            "kl in the loss": 1 / len(terms) / len(rows),
            "dr_grpo": 1 / MAX_TOKENS / len(rows),
            "kl in the reward": 1 / len(rows),
            "ppo": 1 / sum(len(row.logprobs) for row in rows),
            "ppo by token": 1 / sum(len(row.logprobs) for row in rows),
        }
        total = total + weights[algorithm] * terms.sum()
    return total


@pytest.fixture
def rows(tiny: Path, request: pytest.FixtureRequest) -> list[TrainRow]:
    """Episodes of which five share a prompt, sampled by a policy near the one that trains. With "ppo by token" each
    sampled token has a reward."""
    by_token = "ppo by token" in request.node.name
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    draw = np.random.default_rng(3)
    found = []
    prompt = draw.integers(0, KNOWN, 30)
    for index, row in enumerate(make_episodes()):
        own = dataclasses.replace(row, temperature=TEMPERATURE, prompt_ids=prompt if index < 5 else row.prompt_ids)
        near = {
            name: (logprobs_of(model, own).detach().numpy() + draw.normal(0, 0.2, len(row.logprobs))).astype(np.float32)
            for name in ("logprobs", "reference_logprobs")
        }
        rewarded = np.where(last_of_turns(own), draw.normal(), 0.0)
        if by_token:
            rewarded += draw.normal(size=len(rewarded))
        found.append(dataclasses.replace(own, rewards=rewarded, **near))
    shared = pack_rows([row.prompt_ids for row in found], [row.response_ids for row in found], math.inf)
    assert shared is not None, "no two rows share the tokens of their prompt"
    return found


@pytest.fixture
def config(request: pytest.FixtureRequest) -> Config:
    return make_config(algorithm=ALGORITHMS[request.param], critic={"value_clip": 0.0}, **EPISODES)


@pytest.mark.parametrize(("config", "algorithm"), [(name, name) for name in ALGORITHMS], indirect=["config"])
def test_a_policy_learns_what_plain_autograd_says(
    config: Config, algorithm: str, tiny: Path, rows: list[TrainRow]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    expected = loss_by_hand(model, rows, algorithm)
    expected.backward()
    outcome, found = gradients(PolicyTrainer(config, tiny), rows)
    assert outcome.metrics["loss/policy"] + outcome.metrics["loss/kl"] == pytest.approx(expected.item(), abs=1e-6)
    assert 0 < outcome.metrics["policy/clip_frac"] < 1
    assert_close(found, [parameter.grad for parameter in model.parameters()])


@pytest.mark.parametrize("config", ["ppo", "ppo by token"], indirect=True)
def test_a_critic_learns_what_plain_autograd_says(config: Config, tiny: Path, rows: list[TrainRow]) -> None:
    critic = CriticTrainer(config, tiny)
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in critic.model.head.parameters():
            parameter.normal_(0, 0.1)
    twin = AutoModelForTokenClassification.from_pretrained(tiny, dtype=torch.float32, num_labels=1)
    twin.load_state_dict(critic.model.whole.state_dict())
    twin.eval()
    tokens = sum(len(row.logprobs) for row in rows)
    loss = torch.zeros(())
    for row in rows:
        values = twin(input_ids=whole(row)[None]).logits[0, :, 0][states_of(row)]
        returns = torch.tensor(advantages_by_hand(row, "ppo")) + torch.from_numpy(row.values)
        loss = loss + (values - returns).square().sum() / 2 / tokens
        (valued,) = critic.values([row])
        np.testing.assert_allclose(valued, values.detach().numpy(), atol=1e-6, rtol=1e-5)
    loss.backward()
    outcome, found = gradients(critic, rows)
    assert outcome.metrics["critic/loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert_close(found, [parameter.grad for parameter in twin.parameters()])


def test_a_given_token_changes_what_comes_after_it(tiny: Path) -> None:
    """The policy sees it, and is asked for no probability of it."""
    (row,) = make_episodes(1)
    assert row.spans is not None
    assert row.spans.tolist() == [5, 3, 4, 0]
    other = row.response_ids.copy()
    other[6] = (other[6] + 1) % KNOWN
    first, second = logprobs_now(tiny, [row, dataclasses.replace(row, response_ids=other)])
    assert len(first) == len(second) == 9
    np.testing.assert_array_equal(first[:5], second[:5])
    assert np.all(first[5:] != second[5:])

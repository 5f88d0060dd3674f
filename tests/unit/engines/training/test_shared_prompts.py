"""Samples of one prompt share its tokens in a forward pass: the log-probs and gradients of rows that stand alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from asyncrl.config.schema import Config
from asyncrl.engines.training.batch.micro_batches import pad_rows
from asyncrl.engines.training.batch.shared_prompts import share_prompts
from asyncrl.engines.training.batch.sharing_cost import FAMILIES, sharing_width
from asyncrl.engines.training.batch.train_rows import TrainRow
from asyncrl.engines.training.models_with_heads import CausalModel, load_causal_model, load_value_model
from asyncrl.engines.training.optimizers.optimizer import Optimizer
from asyncrl.engines.training.token_logprobs import frozen_logprobs, token_logprobs

WIDTH = 32
TOLERANCE = 2e-5


@pytest.fixture
def groups(make_rows: Callable[..., list[TrainRow]]) -> list[TrainRow]:
    """Rows of three prompts of which the second stands between samples of the first, and one answer has one token."""
    rows = make_rows(13)
    chosen = [rows[index].prompt_ids for index in (0, 1, 0, 0, 1, 2, 0, 0, 1, 1, 0, 1, 0)]
    assert min(len(row.response_ids) for row in rows) == 1
    return [replace(row, prompt_ids=np.tile(ids, 3)) for row, ids in zip(rows, chosen, strict=True)]


def columns(rows: list[TrainRow]) -> tuple[list[Any], list[Any]]:
    return [row.prompt_ids for row in rows], [row.response_ids for row in rows]


def gradients(model: CausalModel, rows: list[TrainRow], weights: list[torch.Tensor], width: int) -> None:
    padded = pad_rows(*columns(rows), [0.7] * len(rows), model.device, width)
    assert (padded.passes[0].mask is not None) == (width > 0)
    (token_logprobs(model, padded, 1024)[0] * torch.cat(weights)).sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_gradients_and_logprobs_are_those_of_rows_alone(
    family: str,
    checkpointing: bool,
    make_model: Callable[..., Path],
    make_config: Callable[..., Config],
    groups: list[TrainRow],
) -> None:
    """Every token weighs something else, so that no two errors cancel."""
    folder, draw = make_model(family), np.random.default_rng(0)
    together, alone = load_causal_model(folder, "cpu"), load_causal_model(folder, "cpu")
    Optimizer(together.whole, make_config(training={"gradient_checkpointing": checkpointing}).training, 1)
    weights = [torch.from_numpy(draw.normal(size=len(row.response_ids)).astype(np.float32)) for row in groups]
    gradients(together, groups, weights, WIDTH)
    for row, weight in zip(groups, weights, strict=True):
        gradients(alone, [row], [weight], 0)
    for ours, expected in zip(together.whole.parameters(), alone.whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-4, atol=TOLERANCE)
    shared = frozen_logprobs(together, *columns(groups), [0.7] * len(groups), 1024)
    for row, found in zip(groups, shared, strict=True):
        (expected,) = frozen_logprobs(alone, *columns([row]), [0.7], 1024)
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_values_of_a_critic_are_those_of_rows_alone(tiny: Path, groups: list[TrainRow]) -> None:
    critic = load_value_model(tiny, "cpu")
    torch.nn.init.normal_(critic.head.weight)
    with torch.no_grad():
        shared = critic.values(pad_rows(*columns(groups), 1.0, critic.device, critic.sharing_width))
        alone = [critic.values(pad_rows(*columns([row]), 1.0, critic.device)) for row in groups]
    torch.testing.assert_close(shared, torch.cat(alone), atol=TOLERANCE, rtol=1e-4)


def test_an_answer_does_not_see_another_one(tiny: Path, groups: list[TrainRow]) -> None:
    model, changed = load_causal_model(tiny, "cpu"), list(groups)
    changed[2] = replace(groups[2], response_ids=np.flip(groups[2].response_ids).copy())
    before, after = (frozen_logprobs(model, *columns(rows), [1.0] * len(rows), 1024) for rows in (groups, changed))
    equal = [np.array_equal(old, new) for old, new in zip(before, after, strict=True)]
    assert equal == [index != 2 for index in range(len(groups))]


def test_each_prompt_stands_once_and_short_rows_fill_up(groups: list[TrainRow]) -> None:
    prompts, responses = columns(groups)
    shared = share_prompts(prompts, responses, WIDTH)
    assert shared is not None
    tokens = sum(len(response) - 1 for response in responses)
    assert (shared.segments >= 0).sum() == tokens + sum(len(ids) for ids in {p.tobytes(): p for p in prompts}.values())
    assert len(shared.ids) == 2, "the third prompt fits beside the second"


@pytest.mark.parametrize(("answer", "shares"), [(8, True), (400, False)])
def test_long_answers_stay_in_rows_of_their_own(answer: int, shares: bool) -> None:
    """Attention over sixteen answers of 400 tokens at once costs more than sixteen prompts of 20."""
    prompts, responses = [np.arange(20)] * 16, [np.arange(answer)] * 16
    assert (share_prompts(prompts, responses, 64) is not None) == shares


def test_different_prompts_share_nothing() -> None:
    assert share_prompts([np.arange(3), np.arange(4)], [np.arange(2)] * 2, WIDTH) is None


@pytest.mark.parametrize(
    ("config", "width"),
    [
        (LlamaConfig(hidden_size=64), 64),
        (Qwen3Config(hidden_size=64), 64),
        (MistralConfig(hidden_size=64, sliding_window=None), 64),
        (MistralConfig(hidden_size=64, sliding_window=16), 0),
        (Qwen2Config(hidden_size=64, use_sliding_window=True, sliding_window=16, max_window_layers=0), 0),
        (GPT2Config(n_embd=96), 0),
    ],
    ids=["llama", "qwen3", "mistral", "sliding mistral", "sliding qwen2", "gpt2"],
)
def test_only_models_whose_mask_may_be_given_share(config: Any, width: int) -> None:
    assert config.model_type in FAMILIES or width == 0
    assert sharing_width(config) == width

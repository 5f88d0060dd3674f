"""Packed rows, in which samples share their prompt: the log-probs and gradients of rows that stand alone."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from asyncrl.engines.models.model_families import PACKING, can_pack
from asyncrl.engines.training.micro_batches import lay_out_rows, micro_batches
from asyncrl.engines.training.models_with_heads import (
    CausalModel,
    frozen_logprobs,
    load_causal_model,
    load_value_model,
    token_logprobs,
)
from asyncrl.engines.training.optimizer import Optimizer
from asyncrl.engines.training.packed_rows import TILE, PackedAttention, RowSegment, SegmentVisibility, pack_rows
from asyncrl.engines.training.train_rows import TrainRow
from tests.unit.engines.training.tiny_training import logprobs_now, make_config, make_rows

TOLERANCE = 2e-5
CPU = torch.device("cpu")


@pytest.fixture
def groups() -> list[TrainRow]:
    """Rows of three prompts of which the second stands between samples of the first, and one answer has one token."""
    rows = make_rows(13, temperature=0.7)
    chosen = [rows[index].prompt_ids for index in (0, 1, 0, 0, 1, 2, 0, 0, 1, 1, 0, 1, 0)]
    assert min(len(row.response_ids) for row in rows) == 1
    return [replace(row, prompt_ids=np.tile(ids, 3)) for row, ids in zip(rows, chosen, strict=True)]


def backward(model: CausalModel, rows: list[TrainRow], weights: list[torch.Tensor], *, packs: bool) -> None:
    padded = lay_out_rows(rows, model.device, packs)
    assert (padded.passes[0].attention is not None) == packs
    (token_logprobs(model, padded, 1024)[0] * torch.cat(weights)).sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(("family", "checkpointing"), [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_gradients_and_logprobs_are_those_of_rows_alone(
    family: str, checkpointing: bool, make_model: Callable[..., Path], groups: list[TrainRow]
) -> None:
    """Every token weighs something else, so that no two errors cancel."""
    folder = make_model(family)
    draw = np.random.default_rng(0)
    together = load_causal_model(folder, "cpu")
    alone = load_causal_model(folder, "cpu")
    Optimizer(together.whole, make_config(training={"gradient_checkpointing": checkpointing}).training, 1)
    weights = [torch.from_numpy(draw.normal(size=len(row.response_ids)).astype(np.float32)) for row in groups]
    backward(together, groups, weights, packs=True)
    for row, weight in zip(groups, weights, strict=True):
        backward(alone, [row], [weight], packs=False)
    for ours, expected in zip(together.whole.parameters(), alone.whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-4, atol=TOLERANCE)
    for found, expected in zip(frozen_logprobs(together, groups, 1024), logprobs_now(folder, groups), strict=True):
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_values_of_a_critic_are_those_of_rows_alone(tiny: Path, groups: list[TrainRow]) -> None:
    critic = load_value_model(tiny, "cpu")
    torch.nn.init.normal_(critic.head.weight)
    with torch.no_grad():
        shared = critic.values(lay_out_rows(groups, CPU, critic.packs))
        alone = [critic.values(lay_out_rows([row], CPU)) for row in groups]
    torch.testing.assert_close(shared, torch.cat(alone), atol=TOLERANCE, rtol=1e-4)


def test_an_answer_does_not_see_another_one(tiny: Path, groups: list[TrainRow]) -> None:
    model = load_causal_model(tiny, "cpu")
    other = list(groups)
    other[2] = replace(groups[2], response_ids=np.flip(groups[2].response_ids).copy())
    before, after = (frozen_logprobs(model, rows, 1024) for rows in (groups, other))
    equal = [np.array_equal(old, new) for old, new in zip(before, after, strict=True)]
    assert equal == [index != 2 for index in range(len(groups))]


def test_each_prompt_stands_once_and_nothing_is_padded(groups: list[TrainRow]) -> None:
    prompts = [row.prompt_ids for row in groups]
    responses = [row.response_ids for row in groups]
    packed = pack_rows(prompts, responses, math.inf)
    assert packed is not None
    answers = sum(len(response) - 1 for response in responses)
    assert len(packed.ids) == answers + sum(len(ids) for ids in {p.tobytes(): p for p in prompts}.values())
    assert sum(each.length for each in packed.segments) == len(packed.ids)


def test_what_saves_little_is_padded_unless_that_is_over_the_budget() -> None:
    prompts = [np.arange(20), np.arange(1, 21)]
    responses = [np.arange(21), np.arange(20)]
    assert pack_rows(prompts, responses, 80) is None
    assert pack_rows(prompts, responses, 79) is not None


def test_prompts_that_are_short_beside_their_answers_are_computed_for_each() -> None:
    prompts = [np.arange(8)] * 2 + [np.arange(30)] * 2
    responses = [np.arange(10), np.arange(6), np.arange(9), np.arange(12)]
    packed = pack_rows(prompts, responses, 0, shared_from=1.1)
    assert packed is not None
    assert [(each.given, each.length) for each in packed.segments] == [(0, 17), (0, 13), (0, 30), (30, 8), (30, 11)]
    for prompt, response, states in zip(prompts, responses, packed.states, strict=True):
        assert packed.ids[states].tolist() == [prompt[-1], *response[:-1]]
        assert packed.position_ids[states].tolist() == [*range(len(prompt) - 1, len(prompt) + len(response) - 1)]


def test_micro_batches_of_packed_rows_count_no_padding() -> None:
    lengths = [10, 90, 40, 30, 20]
    assert micro_batches(lengths, 100, packed=True) == [[1], [2, 3, 4, 0]]
    assert micro_batches(lengths, 100) == [[1], [2], [3], [4], [0]]
    assert micro_batches([30, 20], 60, [2, 1], packed=True) == [[0], [1]], "a row of two contexts is two of the model"


def segments_of(shapes: list[tuple[int, ...]]) -> list[RowSegment]:
    """Returns the segments of prompts with the answers that share them, each given by its tokens."""
    segments = list[RowSegment]()
    begin = 0
    for first, *answers in shapes:
        segments.append(RowSegment(begin, first))
        places = np.cumsum([begin + first, *answers]).tolist()
        segments += [RowSegment(at, length, begin, first) for at, length in zip(places, answers, strict=False)]
        begin = places[-1]
    return segments


def dense(segments: list[RowSegment]) -> torch.Tensor:
    """Returns which token sees which, bool [tokens, tokens]."""
    tokens = sum(each.length for each in segments)
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for each in segments:
        mask[each.own, each.own] = True
        mask[each.own, each.prompt] = True
    return mask.tril()


@pytest.mark.parametrize(
    "shapes", [[(300,), (40, 400, 100)], [(600, 200, 300, 10), (2,), (3, 1)], [(1,)], [(128, 128, 256), (255,)]]
)
def test_tiles_are_left_out_or_whole_where_all_their_tokens_are(shapes: list[tuple[int, ...]]) -> None:
    segments = segments_of(shapes)
    mask = SegmentVisibility.of(segments, CPU).mask
    padding = -sum(each.length for each in segments) % TILE
    expected = torch.nn.functional.pad(dense(segments), (0, padding, 0, padding))
    count = len(expected) // TILE
    seen = expected.reshape(count, TILE, count, TILE).sum((1, 3))
    last = torch.zeros(count, count, dtype=torch.bool)
    last[-1, -1] = padding > 0  # Padding sees padding.
    whole = torch.zeros(count, count, dtype=torch.bool)
    for place, number in enumerate(mask.full_kv_num_blocks[0, 0].tolist()):
        whole[place, mask.full_kv_indices[0, 0, place, :number].long()] = True
    assert (mask.to_dense()[0, 0].bool() == ((seen > 0) | last)).all()
    owners = torch.full((count * TILE,), -1)
    for number, each in enumerate(segments):
        owners[each.own] = number
    tiles = owners.reshape(count, TILE)
    of_one = (tiles == tiles[:, :1]).all(1)  # Another tile of keys that is seen whole may count as seen in part.
    assert (whole == ((seen == TILE**2) & of_one)).all()


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=["heads", "grouped heads"])
def test_batches_of_segments_and_flex_attention_are_attention_with_a_mask(heads: tuple[int, int]) -> None:
    """Answers shorter and longer than their prompts, prompts of different lengths, and rows of their own."""
    segments = segments_of([(5, 9, 2, 30), (64, 3, 1), (7,), (40, 41), (300,), (6, 6, 6)])
    mask = dense(segments)
    begin = len(mask)
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(1, heads[0], begin, 16, generator=draw, requires_grad=True)
    key, value = (torch.randn(1, heads[1], begin, 16, generator=draw, requires_grad=True) for _ in range(2))
    weights = torch.randn(1, begin, heads[0], 16, generator=draw)
    module = torch.nn.Module()
    module.num_key_value_groups = heads[0] // heads[1]
    packed = PackedAttention(segments, CPU).attend(module, query, key, value)
    with (
        warnings.catch_warnings(action="ignore", category=UserWarning),
        torch.no_grad(),
    ):  # Slow, and without gradients.
        flex = SegmentVisibility.of(segments, CPU).attend(query, key, value, None)
    repeated = [each.repeat_interleave(module.num_key_value_groups, 1) for each in (key, value)]
    expected = scaled_dot_product_attention(query, *repeated, attn_mask=mask).transpose(1, 2)
    wanted = torch.autograd.grad((expected * weights).sum(), (query, key, value))
    torch.testing.assert_close(packed, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(flex, expected, atol=1e-6, rtol=1e-5)
    for ours, theirs in zip(torch.autograd.grad((packed * weights).sum(), (query, key, value)), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_attention_of_many_segments_pads_little() -> None:
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 512, 64).tolist()
    places = np.cumsum([0, *lengths[:-1]]).tolist()
    attention = PackedAttention([RowSegment(at, length) for at, length in zip(places, lengths, strict=True)], CPU)
    batches, _ = attention.batches
    computed = sum(len(each.queries) * each.queries.shape[1] ** 2 for each in batches)
    assert len(batches) < 16
    assert computed < 1.3 * sum(length**2 for length in lengths)


@pytest.mark.parametrize(
    ("config", "packs"),
    [
        (LlamaConfig(hidden_size=64), True),
        (Qwen3Config(hidden_size=64), True),
        (MistralConfig(hidden_size=64, sliding_window=None), True),
        (MistralConfig(hidden_size=64, sliding_window=16), False),
        (Qwen2Config(hidden_size=64, use_sliding_window=True, sliding_window=16, max_window_layers=0), False),
        (GPT2Config(n_embd=96), False),
    ],
    ids=["llama", "qwen3", "mistral", "sliding mistral", "sliding qwen2", "gpt2"],
)
def test_only_models_with_plain_causal_attention_pack(config: Any, packs: bool) -> None:
    assert config.model_type in PACKING or not packs
    assert can_pack(config.to_dict()) == packs

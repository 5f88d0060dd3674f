"""Rows of several contexts train as rows of their own would: no token sees one of another context."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engines.training.critic_trainer import CriticTrainer
from asyncrl.engines.training.micro_batches import lay_out_rows, micro_batches
from asyncrl.engines.training.models_with_heads import frozen_logprobs, load_causal_model
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import SampleRow, TrainRow, contexts_of, padded_sizes
from tests.instruction_count import counting
from tests.unit.engines.training.tiny_training import (
    assert_close,
    changed,
    gradients,
    make_config,
    make_episodes,
    make_rows,
    near,
)

CPU = torch.device("cpu")
SPANS = ([3, 2, 4, -5, 2, 1, 3, 0], [2, -3, 5, -1, 1, 0], [4, 0])
"""Two contexts, of two turns each; three, of one each; one."""
LONG_AND_SHORT = ([9, -2, 2, -1, 5, -3, 2, 4, 6, -2, 3, -4, 2, 0], [3, -6, 4, 2, 3, -1, 2, 0], [12, 0])
"""Six contexts of 5 to 19 tokens with their prompts, three, and one."""
BOUNDS = {"clip_low": 0.05, "clip_high": 0.05}
WHOLE_ROWS: dict[str, dict[str, Any]] = {
    "ratios of samples": {"loss": "gspo", "aggregation": "sequence_mean_token_mean", **BOUNDS},
    "geometric means": {"loss": "gmpo", "aggregation": "sequence_mean_token_mean", **BOUNDS},
    "a bound over all tokens": {"loss": "m2po", "second_moment": 1e-3, "aggregation": "token_mean"},
    "means of samples with entropy": {"aggregation": "sequence_mean_token_mean", "entropy_bonus": 0.01, "kl": 0.01},
    "weights of samples": {"old_logprobs": "recomputed", "correction_level": "sequence"},
    "rejected samples": {"rejection": "geometric", "rejection_low": 0.99, "rejection_high": 1.01},
}
"""Settings under which what one token adds to the gradient depends on the other tokens of its sample."""
TURNS = st.lists(st.tuples(st.integers(1, 4), st.integers(-4, 4)), min_size=1, max_size=6)


@given(TURNS)
def test_contexts_have_each_token_once_and_in_order(turns: list[tuple[int, int]]) -> None:
    turns[-1] = (turns[-1][0], max(0, turns[-1][1]))
    spans = np.array(turns, np.int32).flatten()
    prompt = np.arange(-3, 0)
    response = np.arange(int(np.abs(spans).sum()))
    row = SampleRow(prompt, response, spans=spans)
    found = contexts_of(row)
    assert len(found) == 1 + sum(given < 0 for _, given in turns)
    tokens = np.concatenate([part for each in found for part in (each.prompt, each.response)])
    np.testing.assert_array_equal(tokens, np.concatenate([prompt, response]))
    sampled = []
    place = 0
    for count, after in turns:
        sampled += range(place, place + count)
        place += count + abs(after)
    assert np.concatenate([each.response[each.sampled] for each in found]).tolist() == sampled
    sizes = [len(each.prompt) + len(each.response) for each in found]
    assert padded_sizes([row]) == ([max(sizes)], [len(found)])


def test_logprobs_are_those_of_each_context_alone(tiny: Path) -> None:
    rows = changed(make_episodes(3, spans=SPANS), temperature=0.7)
    model = load_causal_model(tiny, "cpu")
    for row, found in zip(rows, frozen_logprobs(model, rows, 1024), strict=True):
        alone = []
        for each in contexts_of(row):
            ids = torch.from_numpy(np.concatenate([each.prompt, each.response]))
            logprobs = (model.whole(input_ids=ids[None]).logits[0, :, : model.vocabulary] / 0.7).log_softmax(-1)
            places = len(each.prompt) + np.arange(len(each.response))[each.sampled]
            alone += [float(logprobs[place - 1, ids[place]].detach()) for place in places]
        np.testing.assert_allclose(found, alone, atol=1e-5)


def split(row: TrainRow) -> list[TrainRow]:
    """The contexts of a row, as rows."""
    found = []
    first = 0
    for member, each in enumerate(contexts_of(row)):
        own = slice(first, first + len(each.response[each.sampled]))
        first = own.stop
        places = np.arange(len(each.response))[each.sampled]
        turns = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
        ends = [*(turn[0] for turn in turns[1:]), len(each.response)]
        spans = [size for turn, end in zip(turns, ends, strict=True) for size in (len(turn), end - turn[-1] - 1)]
        changes = {"member": 100 * row.member + member, "prompt_ids": each.prompt, "response_ids": each.response}
        columns = ("logprobs", "versions", "values", "reference_logprobs")
        changes |= {name: getattr(row, name)[own] for name in columns} | {"spans": np.array(spans, np.int32)}
        found.append(dataclasses.replace(row, **changes))
    return found


@pytest.mark.parametrize("budget", [100_000, 60, 1])
def test_a_row_trains_as_its_contexts_do(budget: int, tiny: Path) -> None:
    """Under an average over tokens and without a group, it does not matter that they are one sample."""
    rows = make_episodes(6, spans=SPANS)
    limits = {"micro_batch_tokens": budget, "max_grad_norm": 1e9}
    config = make_config(algorithm={"preset": "grpo", "aggregation": "token_mean"}, training=limits)
    alone = [each for row in rows for each in split(row)]
    assert len(alone) == 12
    assert_close(*(gradients(PolicyTrainer(config, tiny), each)[1] for each in (rows, alone)))


def test_contexts_count_as_rows_of_a_micro_batch() -> None:
    lengths = [10, 10, 9, 9, 8]
    contexts = [1, 4, 1, 1, 7]
    parts = micro_batches(lengths, 50, contexts)
    assert parts == [[0, 1], [2, 3], [4]]
    assert all(sum(contexts[row] for row in part) * lengths[part[0]] <= 50 for part in parts[:2])


@given(st.lists(TURNS, min_size=1, max_size=3), st.integers(1, 60), st.booleans())
def test_passes_predict_the_same_tokens_from_the_same_states(
    episodes: list[list[tuple[int, int]]], budget: int, packs: bool
) -> None:
    spans = [np.array([*turns[:-1], (turns[-1][0], max(0, turns[-1][1]))], np.int32).flatten() for turns in episodes]
    prompts = [np.arange(1, 4)] * len(spans)
    first = 4
    responses = []
    for own in spans:  # Each token of a response is another number, and tells so what it follows.
        responses.append(np.arange(first, first + int(np.abs(own).sum())))
        first += len(responses[-1])
    rows = [SampleRow(*each[:2], spans=each[2]) for each in zip(prompts, responses, spans, strict=True)]
    whole = lay_out_rows(rows, CPU, packs)
    padded = lay_out_rows(rows, CPU, packs, budget)
    before = torch.cat([each.ids.flatten()[each.positions] for each in padded.passes])
    before = before if padded.order is None else before[padded.order]
    assert before.tolist() == whole.passes[0].ids.flatten()[whole.passes[0].positions].tolist()
    assert padded.targets.tolist() == whole.targets.tolist()
    for each in padded.passes:
        assert each.ids.numel() <= budget or len(each.ids) == 1


@pytest.mark.parametrize("name", WHOLE_ROWS)
def test_a_row_in_several_passes_trains_as_in_one(name: str, tiny: Path) -> None:
    rows = near(tiny, make_episodes(6, spans=LONG_AND_SHORT), 0.05)
    found = []
    for budget in (100_000, 40, 1):
        limits = {"micro_batch_tokens": budget, "max_grad_norm": 1e9, "gradient_checkpointing": budget == 40}
        config = make_config(algorithm=WHOLE_ROWS[name], training=limits)
        found.append(gradients(PolicyTrainer(config, tiny), rows)[1])
    for other in found[1:]:
        assert_close(other, found[0])


def test_a_critic_learns_a_row_in_several_passes_as_in_one(tiny: Path) -> None:
    rows = make_episodes(3, spans=LONG_AND_SHORT)
    found = []
    values = []
    for budget in (100_000, 40):
        critic = CriticTrainer(make_config(algorithm={"preset": "ppo"}, training={"micro_batch_tokens": budget}), tiny)
        with torch.no_grad():
            critic.model.head.weight.fill_(0.1)
        values.append(np.concatenate(critic.values(rows)))
        found.append(gradients(critic, rows)[1])
    np.testing.assert_allclose(*values, atol=1e-5)
    assert_close(*found)


def test_passes_and_what_they_keep_are_bounded(tiny: Path) -> None:
    """A row of six contexts takes six rows of 19 tokens in one pass. Forward and backward compute 40 tokens at once."""
    (row,) = make_episodes(1, spans=LONG_AND_SHORT)
    budget = 40
    trainer = PolicyTrainer(make_config(training={"micro_batch_tokens": budget}), tiny)
    computed: list[int] = []
    kept: list[torch.Size] = []

    def record(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    body = trainer.model.whole.base_model
    body.register_forward_pre_hook(
        lambda _, args, options: computed.append(options["input_ids"].numel()), with_kwargs=True
    )
    step = trainer.begin([row], 1, 5)
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        assert step.advance()
    passes = len(computed) // 2
    assert passes > 1
    assert sorted(computed[:passes]) == sorted(computed[passes:]), "the backward pass computes each pass again"
    assert max(computed) <= budget
    layers = [shape for shape in kept if len(shape) > 2]
    assert not layers, f"states of all tokens stay for the backward pass: {layers}"


INSTRUCTIONS = 150
"""Bytecode instructions that a row of one context may cost where it is padded; 107 before rows had contexts."""


def test_rows_of_one_context_cost_nothing_for_contexts() -> None:
    rows = make_rows(64)
    with counting() as count:
        lay_out_rows(rows, CPU)
    assert count.instructions <= INSTRUCTIONS * len(rows)

"""Rows of several contexts train as rows of their own would: no token sees one of another context."""

import dataclasses
from collections.abc import Callable
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
from asyncrl.engines.training.train_rows import TrainRow, contexts_of, padded_sizes
from asyncrl.engines.training.training_step import Trainer, run_step
from tests.instruction_count import counting

INCARNATION = 1
VERSION = 5
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
    found = contexts_of(prompt, response, spans)
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
    assert padded_sizes([3], [spans], [3 + len(response)]) == ([max(sizes)], [len(found)])


def test_logprobs_are_those_of_each_context_alone(tiny: Path, make_episodes: Callable) -> None:
    rows = make_episodes(3, spans=SPANS)
    model = load_causal_model(tiny, "cpu")
    together = frozen_logprobs(
        model, [r.prompt_ids for r in rows], [r.response_ids for r in rows], [0.7] * 3, 1024, [r.spans for r in rows]
    )
    for row, found in zip(rows, together, strict=True):
        alone = []
        for each in contexts_of(row.prompt_ids, row.response_ids, row.spans):
            ids = torch.from_numpy(np.concatenate([each.prompt, each.response]))
            logprobs = (model.whole(input_ids=ids[None]).logits[0, :, : model.vocabulary] / 0.7).log_softmax(-1)
            places = len(each.prompt) + np.arange(len(each.response))[each.sampled]
            alone += [float(logprobs[place - 1, ids[place]].detach()) for place in places]
        np.testing.assert_allclose(found, alone, atol=1e-5)


def gradients(trainer: Trainer, rows: list[TrainRow]) -> list[torch.Tensor]:
    found: dict[torch.nn.Parameter, torch.Tensor] = {}
    for parameter in trainer.optimizer.parameters:
        parameter.register_post_accumulate_grad_hook(lambda p: found.update({p: p.grad.clone()}))
    assert run_step(trainer, rows, INCARNATION, VERSION).updates == 1
    return [found[parameter] for parameter in trainer.optimizer.parameters]


def split(row: TrainRow) -> list[TrainRow]:
    """The contexts of a row, as rows."""
    found = []
    first = 0
    for member, each in enumerate(contexts_of(row.prompt_ids, row.response_ids, row.spans)):
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
def test_a_row_trains_as_its_contexts_do(
    budget: int, tiny: Path, make_episodes: Callable, make_config: Callable
) -> None:
    """Under an average over tokens and without a group, it does not matter that they are one sample."""
    rows = make_episodes(6, spans=SPANS)
    limits = {"micro_batch_tokens": budget, "max_grad_norm": 1e9}
    config = make_config(algorithm={"preset": "grpo", "aggregation": "token_mean"}, training=limits)
    alone = [each for row in rows for each in split(row)]
    assert len(alone) == 12
    for first, second in zip(*(gradients(PolicyTrainer(config, tiny), each) for each in (rows, alone)), strict=True):
        torch.testing.assert_close(first, second, atol=1e-6, rtol=1e-4)


def test_contexts_count_as_rows_of_a_micro_batch() -> None:
    lengths = [10, 10, 9, 9, 8]
    contexts = [1, 4, 1, 1, 7]
    parts = micro_batches(lengths, 50, contexts)
    assert parts == [[0, 1], [2, 3], [4]]
    assert all(sum(contexts[row] for row in part) * lengths[part[0]] <= 50 for part in parts[:2])


def drawn(make_episodes: Callable, folder: Path, count: int = 6) -> list[TrainRow]:
    """Rows of long and short contexts, whose log-probs are about those of the model."""
    rows = make_episodes(count, spans=LONG_AND_SHORT)
    noise = np.random.default_rng(1)
    model = load_causal_model(folder, "cpu")
    found = []
    for row in rows:
        (now,) = frozen_logprobs(model, [row.prompt_ids], [row.response_ids], [row.temperature], 1024, [row.spans])
        found.append(dataclasses.replace(row, logprobs=now + noise.normal(0, 0.05, len(now)).astype(np.float32)))
    return found


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
    whole = lay_out_rows(prompts, responses, 1.0, torch.device("cpu"), packs, spans)
    padded = lay_out_rows(prompts, responses, 1.0, torch.device("cpu"), packs, spans, budget)
    before = torch.cat([each.ids.flatten()[each.positions] for each in padded.passes])
    before = before if padded.order is None else before[padded.order]
    assert before.tolist() == whole.passes[0].ids.flatten()[whole.passes[0].positions].tolist()
    assert padded.targets.tolist() == whole.targets.tolist()
    for each in padded.passes:
        assert each.ids.numel() <= budget or len(each.ids) == 1


@pytest.mark.parametrize("name", WHOLE_ROWS)
def test_a_row_in_several_passes_trains_as_in_one(
    name: str, tiny: Path, make_episodes: Callable, make_config: Callable
) -> None:
    rows = drawn(make_episodes, tiny)
    found = []
    for budget in (100_000, 40, 1):
        limits = {"micro_batch_tokens": budget, "max_grad_norm": 1e9, "gradient_checkpointing": budget == 40}
        config = make_config(algorithm=WHOLE_ROWS[name], training=limits)
        found.append(torch.cat([each.flatten() for each in gradients(PolicyTrainer(config, tiny), rows)]))
    assert found[0].abs().max() > 1e-4
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-6, rtol=1e-4)


def test_a_critic_learns_a_row_in_several_passes_as_in_one(
    tiny: Path, make_episodes: Callable, make_config: Callable
) -> None:
    rows = make_episodes(3, spans=LONG_AND_SHORT)
    found = []
    values = []
    columns = [row.prompt_ids for row in rows], [row.response_ids for row in rows], [row.spans for row in rows]
    for budget in (100_000, 40):
        config = make_config(algorithm={"preset": "ppo"}, training={"micro_batch_tokens": budget})
        critic = CriticTrainer(config, tiny)
        with torch.no_grad():
            critic.model.head.weight.fill_(0.1)
        values.append(np.concatenate(critic.values(*columns)))
        found.append(torch.cat([each.flatten() for each in gradients(critic, rows)]))
    np.testing.assert_allclose(*values, atol=1e-5)
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-4)


def test_passes_and_what_they_keep_are_bounded(tiny: Path, make_episodes: Callable, make_config: Callable) -> None:
    """A row of six contexts takes six rows of 19 tokens in one pass. Forward and backward compute 40 tokens at once."""
    (row,), budget = make_episodes(1, spans=LONG_AND_SHORT), 40
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
    step = trainer.begin([row], INCARNATION, VERSION)
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


@pytest.mark.parametrize("spans", [None, [None] * 64])
def test_rows_of_one_context_cost_nothing_for_contexts(make_rows: Callable, spans: list[None] | None) -> None:
    rows = make_rows(64)
    prompts = [row.prompt_ids for row in rows]
    responses = [row.response_ids for row in rows]
    with counting() as count:
        lay_out_rows(prompts, responses, 1.0, torch.device("cpu"), spans=spans)
    assert count.instructions <= INSTRUCTIONS * len(rows)

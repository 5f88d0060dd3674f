"""Rows of several turns: what was given is seen, and is in no loss, metric or denominator; one turn is a plain row."""

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
from asyncrl.engines.training.micro_batches import forward_passes, lay_out_rows, mask_rows, spans_of, split_by_row
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow, columns_of, train_rows
from asyncrl.engines.training.training_step import StepOutcome, Trainer, run_step
from asyncrl.protocols.batch import Batch, BatchRef, Column, RowRef

INCARNATION = 1
VERSION = 5
AGGREGATIONS = ("token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "constant")
ENVIRONMENT = {"use": "guess.py:Guess", "max_tokens": 96}
TURNS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=5)


def updated(trainer: Trainer, rows: list[TrainRow]) -> tuple[StepOutcome, list[torch.Tensor]]:
    """Returns the outcome of a step, and the gradients of its last update."""
    found: dict[torch.nn.Parameter, torch.Tensor] = {}
    for parameter in trainer.optimizer.parameters:
        parameter.register_post_accumulate_grad_hook(lambda p: found.update({p: p.grad.clone()}))
    outcome = run_step(trainer, rows, INCARNATION, VERSION)
    return outcome, [found[parameter] for parameter in trainer.optimizer.parameters]


@given(st.lists(TURNS, min_size=1, max_size=4), st.integers(0, 2**32 - 1), st.booleans())
def test_padded_rows_predict_each_sampled_token_from_the_state_before_it(
    episodes: list[list[tuple[int, int]]], seed: int, shared: bool
) -> None:
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(0, 50, 9) for _ in episodes]
    if shared:
        prompts = [prompts[0]] * len(episodes)
    spans = [np.array(turns, np.int32).flatten() for turns in episodes]
    responses = [draw.integers(100, 200, int(own.sum())) for own in spans]
    padded = lay_out_rows(prompts, responses, 1.0, torch.device("cpu"), True, [own for own in spans])
    (only,) = padded.passes
    place = 0
    states = only.ids.flatten().tolist()
    for prompt, response, turns in zip(prompts, responses, episodes, strict=True):
        before = prompt[-1]
        at = 0
        for sampled, after in turns:
            for token in response[at : at + sampled]:
                assert int(padded.targets[place]) == token
                assert states[int(only.positions[place])] == before
                before = token
                place = place + 1
            at += sampled + after
            before = response[at - 1]
    assert place == len(padded.targets) == len(only.positions) == len(padded.temperatures)
    parts = split_by_row(padded.targets.float(), responses, [own for own in spans])
    assert [len(part) for part in parts] == [sum(sampled for sampled, _ in turns) for turns in episodes]


@pytest.mark.parametrize("preset", ["grpo", "ppo"])
def test_a_row_of_one_turn_trains_the_bits_of_a_plain_row(
    preset: str, tiny: Path, make_rows: Callable, make_config: Callable
) -> None:
    draw = np.random.default_rng(1)
    rows = make_rows(6)
    rows = [dataclasses.replace(r, values=draw.normal(0, 0.3, len(r.logprobs)).astype(np.float32)) for r in rows]
    one_turn = [dataclasses.replace(row, spans=np.array([len(row.logprobs), 0], np.int32)) for row in rows]
    config = make_config(algorithm={"preset": preset}, training={"updates": 2})
    trainers: list[Callable[..., Trainer]] = [PolicyTrainer, CriticTrainer] if preset == "ppo" else [PolicyTrainer]
    for make in trainers:
        (plain, expected), (turn, found) = (updated(make(config, tiny), each) for each in (rows, one_turn))
        assert plain == turn
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradients_do_not_depend_on_the_number_of_micro_batches(
    aggregation: str, tiny: Path, make_episodes: Callable, make_config: Callable
) -> None:
    rows = make_episodes(12)
    found = []
    passes = []
    for budget in (100_000, 150, 38):
        config = make_config(training={"micro_batch_tokens": budget}, algorithm={"aggregation": aggregation})
        step = PolicyTrainer(config, tiny).begin(rows, INCARNATION, VERSION)
        passes.append(sum(1 for _ in iter(step.advance, False)) - 1)
        found.append(updated(PolicyTrainer(config, tiny), rows))
    assert passes == [1, 2, 7]
    for outcome, gradients in found[1:]:
        assert outcome.metrics == pytest.approx(found[0][0].metrics, rel=1e-5, abs=1e-6)
        for first, second in zip(found[0][1], gradients, strict=True):
            torch.testing.assert_close(first, second, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_masking_a_stale_turn_leaves_the_gradients_of_the_others_unchanged(
    aggregation: str, tiny: Path, make_episodes: Callable, make_config: Callable
) -> None:
    """The middle turn is from older weights than the turns around it, as after the death of a generator."""
    rows = make_episodes(5)
    config = make_config(algorithm={"aggregation": aggregation})
    row = rows[1]
    assert row.spans.tolist() == [3, 2, 1, 4, 6, 0]
    middle = np.arange(10) == 3
    silent = [rows[0], dataclasses.replace(row, advantage=np.where(middle, 0.0, row.advantage)), *rows[2:]]
    stale = [rows[0], dataclasses.replace(row, versions=row.versions - 3 * middle), *rows[2:]]
    (_, expected), (outcome, found) = (updated(PolicyTrainer(config, tiny), each) for each in (silent, stale))
    assert [(sample.trained, sample.masked, sample.reason) for sample in outcome.samples][1] == (9, 1, "stale")
    for first, second in zip(expected, found, strict=True):
        torch.testing.assert_close(first, second, atol=1e-7, rtol=1e-4)


def test_nothing_counts_given_tokens_but_the_size_of_a_row(
    tiny: Path, make_episodes: Callable, make_config: Callable
) -> None:
    rows = make_episodes(5)
    sampled = [9, 10, 7, 7, 2]
    outcome = run_step(PolicyTrainer(make_config(environment=ENVIRONMENT), tiny), rows, INCARNATION, VERSION)
    assert [sample.trained for sample in outcome.samples] == sampled
    assert outcome.metrics["tokens/response"] == outcome.metrics["tokens/trained"] == sum(sampled)
    masked = mask_rows(rows, INCARNATION, VERSION, 2, "mask", False)
    assert [item.tokens - len(item.row.prompt_ids) for item in masked] == [12, 16, 7, 11, 3]


def stored(rows: list[TrainRow]) -> Batch:
    """The rows as services store them."""
    ids = np.dtype("<i4")
    numbers = np.dtype("<f4")
    columns: dict[str, tuple[list[Any], Any]] = {
        "prompt_ids": ([row.prompt_ids for row in rows], ids),
        "response_ids": ([row.response_ids for row in rows], ids),
        "logprobs": ([row.logprobs for row in rows], numbers),
        "versions": ([row.versions for row in rows], ids),
        "spans": ([row.spans for row in rows], ids),
    }
    return Batch({name: Column.of(values, dtype) for name, (values, dtype) in columns.items()})


def test_the_columns_of_an_episode_make_its_row(make_episodes: Callable) -> None:
    rows: list[TrainRow] = make_episodes(5)
    refs = BatchRef(
        tuple(
            RowRef(
                *row.key, INCARNATION, len(row.prompt_ids), len(row.logprobs), VERSION, VERSION, "stop", (), 1.0, 0.5
            )
            for row in rows
        )
    )
    batch = stored(rows)
    for row, joined in zip(rows, train_rows(refs, batch, 1.0), strict=True):
        np.testing.assert_array_equal(joined.spans, row.spans)
        np.testing.assert_array_equal(joined.response_ids, row.response_ids)
    for own, row in zip(spans_of(batch), rows, strict=True):
        np.testing.assert_array_equal(own, row.spans)


def test_what_turns_are_worth_is_spread_over_their_sampled_tokens(make_episodes: Callable) -> None:
    row: TrainRow = make_episodes(2)[1]
    assert row.spans.tolist() == [3, 2, 1, 4, 6, 0]
    ref = RowRef(*row.key, INCARNATION, len(row.prompt_ids), 10, VERSION, VERSION, "stop", (), 1.0, 0.5)
    batch = stored([row])
    (plain,) = train_rows(BatchRef((ref,)), batch, 1.0)
    assert (plain.advantage, plain.rewards) == (0.5, None)
    scored = ref.with_reward(1.0, None, (0.25, 0.5, 0.25))
    (with_critic,) = train_rows(BatchRef((scored,)), batch, 1.0)
    assert with_critic.advantage == 0.5
    assert with_critic.rewards.tolist() == [0, 0, 0.25, 0.5, 0, 0, 0, 0, 0, 0.25]
    (of_turns,) = train_rows(BatchRef((scored.with_advantage(0.5, (1.0, -2.0, 3.0)),)), batch, 1.0)
    assert of_turns.advantage.tolist() == [1.0] * 3 + [-2.0] + [3.0] * 6


def test_forward_passes_are_filled_with_sampled_and_given_tokens(
    make_episodes: Callable, make_config: Callable
) -> None:
    rows = make_episodes(6, spans=([1, 9, 1, 0],))
    rows = [dataclasses.replace(row, prompt_ids=np.arange(3)) for row in rows]
    config = make_config(training={"micro_batch_tokens": 28})
    assert forward_passes(stored(rows), config) == [[0, 1], [2, 3], [4, 5]]


def test_spans_are_read_only_where_the_config_has_an_environment(make_config: Callable) -> None:
    assert "spans" not in columns_of(make_config())
    assert "spans" in columns_of(make_config(environment=ENVIRONMENT))


@pytest.mark.parametrize("spans", [[2, 1], [0, 3], [4, 0]])
def test_spans_that_do_not_fit_their_row_are_refused(spans: list[int], make_rows: Callable) -> None:
    (row,) = make_rows(1)
    ids = np.arange(3)
    own = {"logprobs": np.zeros(3, np.float32), "versions": np.full(3, VERSION)}
    with pytest.raises(AssertionError, match=r"sample \(0, 0, 0\)"):
        dataclasses.replace(row, response_ids=ids, spans=np.array(spans, np.int32), **own)


@pytest.mark.parametrize("finish", ["stop", "environment", "turn_limit", "token_limit", "time_limit"])
@pytest.mark.parametrize("unfinished", [{}, {"cut": 1}, {"late": 1}, {"cut": 2, "late": 1}])
def test_an_answer_that_was_cut_off_truncates_an_episode_and_no_limit_of_its_own(
    finish: str, unfinished: dict[str, int]
) -> None:
    row = RowRef(0, 0, 0, 1, 2, 3, VERSION, VERSION, finish, (), 1.0, 0.5)._replace(**unfinished)
    ids = Column.of([np.arange(3, dtype=np.int32)])
    (joined,) = train_rows(
        BatchRef((row,)), Batch(dict.fromkeys(("prompt_ids", "response_ids", "logprobs", "versions"), ids)), 1.0
    )
    assert joined.truncated is bool(unfinished)
    assert row.truncated is ("cut" in unfinished)


TOKENS = [0.5, 0.0, -1.0, 0.25, 0.25]


@pytest.mark.parametrize(
    ("spans", "turn_rewards", "expected"),
    [
        (None, (), TOKENS),
        ([5, 0], (), TOKENS),
        ([3, 2, 2, 0], (1.0, 0.5), [0.5, 0.0, 0.5, 0.25, 0.25]),
        ([1, 0, 4, 0], (0.5, -0.5), TOKENS),
    ],
)
def test_rewards_of_tokens_stand_at_their_tokens_and_the_rest_of_a_turn_at_its_last(
    spans: list[int] | None, turn_rewards: tuple[float, ...], expected: list[float]
) -> None:
    columns = {
        "prompt_ids": [1],
        "response_ids": [2] * (5 if spans is None else sum(spans)),
        "logprobs": [-1.0] * 5,
        "versions": [0] * 5,
        "token_rewards": np.array(TOKENS, np.float32),
    } | ({} if spans is None else {"spans": np.array(spans, np.int32)})
    ref = RowRef(0, 0, 0, 1, 1, 5, 0, 0, "stop", (), 0.0, 2.0, turns=max(1, len(turn_rewards)))
    refs = BatchRef((ref._replace(turn_rewards=turn_rewards),))
    (row,) = train_rows(refs, Batch({name: Column.of([np.array(own)]) for name, own in columns.items()}), 1.0)
    np.testing.assert_allclose(row.rewards, expected)


@pytest.mark.parametrize(("preset", "reads"), [("ppo", True), ("grpo", False)])
def test_only_a_critic_makes_the_trainer_read_rewards_of_tokens(
    preset: str, reads: bool, make_config: Callable
) -> None:
    functions = [{"use": "mine.py:by_token", "by_token": True}]
    config = make_config(algorithm={"preset": preset}, reward={"functions": functions})
    assert ("token_rewards" in columns_of(config)) is reads

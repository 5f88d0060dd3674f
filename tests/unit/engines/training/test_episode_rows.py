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
from asyncrl.engines.training.micro_batches import forward_passes, lay_out_rows, split_by_row
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import (
    SampleRow,
    TrainRow,
    batch_digest,
    columns_of,
    model_rows,
    train_rows,
)
from asyncrl.engines.training.training_step import StepOutcome
from asyncrl.protocols.batch import Batch, BatchRef, Column, Cuts, RowRef
from tests.unit.engines.training.tiny_training import (
    INCARNATION,
    VERSION,
    assert_close,
    changed,
    drawn,
    gradients,
    make_config,
    make_episodes,
    make_rows,
)

AGGREGATIONS = ("token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "constant")
BY_TOKEN = {"functions": [{"use": "mine.py:by_token", "by_token": True}]}
ENVIRONMENT = {"use": "guess.py:Guess", "max_tokens": 96}
TURNS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=5)


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
    rows = [SampleRow(*each[:2], spans=each[2]) for each in zip(prompts, responses, spans, strict=True)]
    padded = lay_out_rows(rows, torch.device("cpu"), True)
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
    parts = split_by_row(padded.targets.float(), rows)
    assert [len(part) for part in parts] == [sum(sampled for sampled, _ in turns) for turns in episodes]


@pytest.mark.parametrize(("preset", "make"), [("grpo", PolicyTrainer), ("ppo", PolicyTrainer), ("ppo", CriticTrainer)])
def test_a_row_of_one_turn_trains_the_bits_of_a_plain_row(preset: str, make: Any, tiny: Path) -> None:
    rows = changed(make_rows(6), values=drawn(0, 0.3))
    one_turn = changed(rows, spans=lambda row: np.array([len(row.logprobs), 0], np.int32))
    config = make_config(algorithm={"preset": preset}, training={"updates": 2})
    (plain, expected), (turn, found) = (gradients(make(config, tiny), each) for each in (rows, one_turn))
    assert plain == turn
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradients_do_not_depend_on_the_number_of_micro_batches(aggregation: str, tiny: Path) -> None:
    rows = make_episodes(12)
    found = []
    passes = []
    for budget in (100_000, 150, 38):
        config = make_config(training={"micro_batch_tokens": budget}, algorithm={"aggregation": aggregation})
        run = PolicyTrainer(config, tiny).begin(rows, INCARNATION, VERSION)
        passes.append(sum(1 for _ in iter(run.advance, False)) - 1)
        found.append(gradients(PolicyTrainer(config, tiny), rows))
    assert passes == [1, 2, 7]
    for outcome, of_parameters in found[1:]:
        assert outcome.metrics == pytest.approx(found[0][0].metrics, rel=1e-5, abs=1e-6)
        assert_close(of_parameters, found[0][1])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_masking_a_stale_turn_leaves_the_gradients_of_the_others_unchanged(aggregation: str, tiny: Path) -> None:
    """The middle turn is from older weights than the turns around it, as after the death of a generator."""
    rows = make_episodes(5)
    config = make_config(algorithm={"aggregation": aggregation})
    row = rows[1]
    assert row.spans.tolist() == [3, 2, 1, 4, 6, 0]
    middle = np.arange(10) == 3
    silent = [rows[0], dataclasses.replace(row, advantage=np.where(middle, 0.0, row.advantage)), *rows[2:]]
    stale = [rows[0], dataclasses.replace(row, versions=row.versions - 3 * middle), *rows[2:]]
    (_, expected), (outcome, found) = (gradients(PolicyTrainer(config, tiny), each) for each in (silent, stale))
    assert [(sample.trained, sample.masked, sample.reason) for sample in outcome.samples][1] == (9, 1, "stale")
    assert_close(expected, found, atol=1e-7)


def test_nothing_counts_given_tokens(train: Callable[..., StepOutcome]) -> None:
    sampled = [9, 10, 7, 7, 2]
    outcome = train(make_episodes(5), environment=ENVIRONMENT)
    assert [sample.trained for sample in outcome.samples] == sampled
    assert outcome.metrics["tokens/response"] == outcome.metrics["tokens/trained"] == sum(sampled)


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


def test_the_columns_of_an_episode_make_its_row() -> None:
    rows = make_episodes(5)
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
    for read, row in zip(model_rows(batch), rows, strict=True):
        np.testing.assert_array_equal(read.spans, row.spans)


def test_what_turns_are_worth_is_spread_over_their_sampled_tokens() -> None:
    row = make_episodes(2)[1]
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


def test_forward_passes_are_filled_with_sampled_and_given_tokens() -> None:
    rows = make_episodes(6, spans=([1, 9, 1, 0],))
    rows = [dataclasses.replace(row, prompt_ids=np.arange(3)) for row in rows]
    config = make_config(training={"micro_batch_tokens": 28})
    assert forward_passes(stored(rows), config) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("column", "sections", "reads"),
    [
        ("spans", {}, False),
        ("spans", {"environment": ENVIRONMENT}, True),
        ("token_rewards", {"algorithm": {"preset": "ppo"}, "reward": BY_TOKEN}, True),
        ("token_rewards", {"algorithm": {"preset": "grpo"}, "reward": BY_TOKEN}, False),
    ],
)
def test_columns_are_read_only_where_the_config_needs_them(column: str, sections: dict[str, Any], reads: bool) -> None:
    """Spans with an environment, rewards of tokens with a critic."""
    assert (column in columns_of(make_config(**sections))) is reads


@pytest.mark.parametrize("spans", [[2, 1], [0, 3], [4, 0]])
def test_spans_that_do_not_fit_their_row_are_refused(spans: list[int]) -> None:
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


def referred(finish: str, cost: float | None = None) -> RowRef:
    return RowRef(0, 0, 0, 1, 2, 3, VERSION, VERSION, finish, (), 1.0, 0.5, cost)


@pytest.mark.parametrize(
    ("finish", "truncated"), [("stop", False), ("stop_string", False), ("abort", False), ("length", True)]
)
def test_only_an_answer_that_met_its_token_limit_is_truncated(finish: str, truncated: bool) -> None:
    ids = Column.of([np.arange(3, dtype=np.int32)])
    rows = Batch({"prompt_ids": ids, "response_ids": ids, "logprobs": ids, "versions": ids})
    (row,) = train_rows(BatchRef((referred(finish),)), rows, 1.0)
    assert row.truncated is truncated


def test_batches_that_differ_in_what_a_row_is_worth_have_different_digests() -> None:
    first = referred("stop", 0.25)
    of_turns = (first.with_advantage(0.5, (0.5, 0.25)), first.with_reward(1.0, 0.25, (0.5, 0.5)))
    others = (first, first.with_advantage(0.75), first.with_reward(1.0, 0.5), *of_turns)
    digests = {batch_digest(Cuts(1, 5, BatchRef((row,)), 3, 1)) for row in others}
    assert len(digests) == len(others)

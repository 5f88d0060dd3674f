"""What the engine records equals a plain forward, whatever shares its batch; bit for bit in deterministic mode."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engines.generation.engine_interface import SampleRequest
from asyncrl.engines.generation.torch_engine import (
    FEWEST_TOKENS,
    IDLE_BUDGETS,
    Prefill,
    TorchEngine,
    plan_chunks,
    step_budget,
)
from asyncrl.errors import ConfigError, WeightsError
from tests import golden
from tests.instruction_count import counting
from tests.unit.engines.generation.conftest import (
    EPISODES,
    KNOWN,
    Lab,
    at,
    drain,
    engine_config,
    going_on,
    group_of,
    make_model,
    requests,
    same,
)

FAMILIES = ["llama", "llama-tied", "qwen2", "qwen3", "smollm2"]


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *((family, {"deterministic": deterministic}) for family in FAMILIES for deterministic in (False, True)),
        *(("llama", {"slots": 12, "prefill_tokens": tokens}) for tokens in (1, 9, 50)),
    ],
    ids=str,
)
def test_logprobs_equal_a_plain_forward(lab: Lab, family: str, settings: dict[str, Any]) -> None:
    """Ragged prompts, 17 requests through few slots, rows refilled and moved, prompts in chunks of any size."""
    done = drain(lab.engine(family, **settings), requests(17))
    assert len(done) == 17
    lab.check(done, family)
    for completion in done.values():
        assert len(completion.tokens) <= completion.request.max_new_tokens
        assert completion.tokens.max() < KNOWN


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("deterministic", [False, True])
def test_logprobs_are_those_of_a_plain_forward_over_many_blocks(lab: Lab, deterministic: bool) -> None:
    wanted = [*requests(13), *(replace(each, key=(99, *each.key[1:])) for each in group_of(4, 33, 20))]
    lab.check(drain(lab.engine(deterministic=deterministic), wanted))


@pytest.mark.trap("tempered_logprobs")
def test_temperatures_may_differ_side_by_side(lab: Lab) -> None:
    mixed = [r for number, t in enumerate((0.0, 0.7, 2.0)) for r in requests(9, temperature=t)[3 * number :][:3]]
    done = drain(lab.engine(slots=9), mixed)
    lab.check(done)
    assert sorted(done) == [(number, 0, 0) for number in range(9)]


def test_temperature_zero_takes_the_likeliest(lab: Lab) -> None:
    (completion,) = drain(lab.engine(), requests(1, temperature=0.0, max_new_tokens=8)).values()
    prompt = completion.request.prompt
    ids = torch.from_numpy(np.concatenate([prompt, completion.tokens]).astype(np.int64))
    with torch.no_grad():
        best = lab.model()(ids[None]).logits[0, len(prompt) - 1 : -1, :KNOWN].argmax(-1)
    assert completion.tokens.tolist() == best.tolist()


CUT = {"top_p": 0.8, "top_k": 30, "min_p": 0.02}


@pytest.mark.parametrize(
    ("family", "settings"), [("llama", {}), ("qwen3", {}), ("smollm2", {}), ("llama", CUT)], ids=str
)
@pytest.mark.trap("seeds")
def test_a_sample_is_the_same_bits_alone_and_beside_any_neighbours(
    lab: Lab, family: str, settings: dict[str, Any]
) -> None:
    """Alone, in every slot, beside others, in any order of arrival, and when it arrives in the middle."""
    wanted = requests(9, seed=3)
    engine = lab.engine(family, deterministic=True, slots=6, **settings)
    together = drain(engine, wanted)
    backwards = drain(engine, wanted[::-1])
    last = wanted[-1]
    late = drain(engine, wanted[:-1], at(7, lambda: engine.submit(last)))
    assert same(late[last.key], together[last.key])
    for request in wanted:
        (alone,) = drain(engine, [request]).values()
        assert same(alone, together[request.key])
        assert same(alone, backwards[request.key])


@pytest.mark.parametrize("slots", [1, 4, 32])
@pytest.mark.trap("seeds")
def test_a_sample_is_the_same_bits_with_any_number_of_slots(tmp_path: Any, slots: int) -> None:
    """Neither does it depend on the replica: every engine here is another one. Products of so wide a model round
    differently over few rows, fewer than 4 or 11 by the processor."""
    folder = make_model("llama", tmp_path, hidden_size=256)
    shape = {"deterministic": True, "max_prompt_tokens": 40, "max_new_tokens": 24}
    expected, found = (
        drain(TorchEngine(folder, engine_config(slots=count, **shape), 0), requests(10, seed=8)) for count in (7, slots)
    )
    assert all(same(found[key], each) for key, each in expected.items())


def test_members_of_a_group_share_a_prompt_and_differ_in_draws(lab: Lab) -> None:
    group = group_of(6, 33, 12)
    engine = lab.engine(deterministic=True, slots=6)
    done = drain(engine, group)
    assert len({tuple(completion.tokens) for completion in done.values()}) == 6
    lab.check(done)
    for request in group:
        assert same(drain(engine, [request])[request.key], done[request.key])


@pytest.mark.parametrize(
    ("family", "kv", "share"),
    [
        *((family, kv, kv == "keep") for family in FAMILIES for kv in ("keep", "recompute")),
        ("llama-tied", "keep", False),
        ("llama-tied", "recompute", True),
    ],
)
@pytest.mark.trap("old_cache")
def test_new_weights_between_two_steps_end_no_sequence(lab: Lab, family: str, kv: str, share: bool) -> None:
    engine = lab.engine(family, kv=kv, slots=4)
    weights = lab.weights(family)
    done = drain(engine, requests(9, max_new_tokens=20), at(6, lambda: engine.load(weights, 1, share=share)))
    spanning = 0
    for completion in done.values():
        old = lab.plain(completion, family)
        new = lab.plain(completion, family, weights=weights)
        before = completion.versions == 0
        spanning += 0 < before.sum() < len(before)
        np.testing.assert_allclose(completion.logprobs[before], old[before], atol=1e-5, rtol=0)
        if kv == "recompute" or not before.any():
            np.testing.assert_allclose(completion.logprobs[~before], new[~before], atol=1e-5, rtol=0)
    assert spanning == 4
    assert len(done) == 9


@pytest.mark.trap("old_cache")
def test_kept_keys_are_the_old_ones(lab: Lab) -> None:
    """Under `keep` the tokens after a swap are not those of a full forward at the new weights: the switch is real."""
    engine = lab.engine(kv="keep")
    weights = lab.weights()
    done = drain(engine, requests(3, max_new_tokens=20), at(6, lambda: engine.load(weights, 1, share=True)))
    after = [
        np.abs(c.logprobs - lab.plain(c, weights=weights))[c.versions == 1].max()
        for c in done.values()
        if (c.versions == 1).any()
    ]
    assert max(after) > 1e-3


def test_swapped_weights_keep_the_bits_of_deterministic_mode(lab: Lab) -> None:
    weights = lab.weights()
    wanted = requests(5, max_new_tokens=20)
    results = []
    for group in (wanted, wanted[:1]):
        engine = lab.engine(deterministic=True, kv="recompute")
        swap = at(6, lambda engine=engine: engine.load(weights, 1, share=True))  # type: ignore[misc]
        results.append(drain(engine, group, swap)[wanted[0].key])
    assert same(*results)
    assert results[0].versions.tolist() == [0] * 6 + [1] * (len(results[0].versions) - 6)


def test_no_sequence_starts_with_weights_that_are_too_old_and_who_waits_keeps_the_place(lab: Lab) -> None:
    late, first, second = requests(3, max_new_tokens=4)
    late = replace(late, not_before=1)
    engine = lab.engine(slots=1)
    assert list(drain(engine, [late, replace(first, key=(8, 0, 0))])) == [(8, 0, 0)]
    assert engine.waiting == 1
    done = drain(engine, [first, second], at(3, lambda: engine.load(lab.weights(), 1, share=False)))
    assert list(done) == [first.key, late.key, second.key]
    assert set(done[late.key].versions) == {1}


def test_an_engine_without_weights_samples_nothing(lab: Lab) -> None:
    engine = lab.engine(version=-1)
    engine.submit(*requests(1, not_before=-3))
    assert not engine.active
    assert engine.step() == []


def test_end_answers_what_had_begun_and_forgets_the_rest(lab: Lab) -> None:
    engine = lab.engine(slots=3)
    wanted = requests(5, max_new_tokens=20)
    engine.submit(*wanted)
    for _ in range(4):
        assert engine.step() == []
    ended = engine.end([wanted[0].key, wanted[4].key], "length")
    assert [(c.request.key, c.finish, len(c.tokens)) for c in ended] == [((0, 0, 0), "length", 4)]
    rest = drain(engine)
    assert sorted(rest) == [(1, 0, 0), (2, 0, 0), (3, 0, 0)]
    lab.check(rest)


def test_a_step_takes_as_many_operations_however_many_requests_wait(lab: Lab) -> None:
    def operations(waiting: int) -> int:
        engine = lab.engine(slots=2)
        engine.submit(*requests(2 + waiting, max_new_tokens=20))
        engine.step()
        with counting() as count:
            engine.end([], "abort")
            engine.step()
        return count.instructions

    assert operations(500) <= 1.01 * operations(5)


@pytest.mark.trap("padded_vocabulary")
def test_weights_that_cannot_be_used_are_refused(lab: Lab) -> None:
    """Tied names with different values, and those that are missing, change nothing; damaged ones do not sample."""
    weights = lab.weights("llama-tied")
    engine = lab.engine("llama-tied")
    with golden.raises(WeightsError, match="are tied"):
        engine.load(weights | {"lm_head.weight": weights["lm_head.weight"] + 1}, 1, share=False)
    with golden.raises(WeightsError, match="model.norm.weight"):
        engine.load({n: t for n, t in weights.items() if n != "model.norm.weight"}, 1, share=False)
    assert engine.version == 0
    engine.load(weights | {"model.norm.weight": weights["model.norm.weight"] * torch.nan}, 1, share=False)
    engine.submit(*requests(1))
    with golden.raises(WeightsError):
        engine.step()


def test_what_does_not_fit_a_slot_is_refused(lab: Lab) -> None:
    """Also a turn that may pass the longest episode."""
    engine = lab.engine(**EPISODES)
    (first,) = drain(engine, requests(1)).values()
    left = 130 - len(first.request.prompt) - len(first.tokens)
    for request, tokens, key in (
        (SampleRequest((7, 0, 0), np.ones(41, np.int32), 0, 1.0, 3), 41, "task.max_prompt_tokens"),
        (SampleRequest((7, 0, 0), np.ones(4, np.int32), 0, 1.0, 25), 25, "generation.max_new_tokens"),
        (going_on(first, 1, [5] * left), 131, "environment.max_tokens"),
    ):
        with golden.raises(ConfigError, match=rf"{tokens} tokens where .*{key}"):
            engine.submit(request)


@pytest.mark.parametrize("deterministic", [False, True])
def test_turns_with_nothing_given_are_one_answer(lab: Lab, deterministic: bool) -> None:
    """Draws go on where they ended, so it does not matter where a sample is interrupted."""
    engine = lab.engine(deterministic=deterministic, **EPISODES)
    wanted = requests(7, max_new_tokens=24)
    whole = drain(engine, wanted)
    cut = drain(engine, [replace(request, max_new_tokens=7) for request in wanted])
    rest = drain(engine, [going_on(done, 17) for done in cut.values() if done.finish == "length"])
    assert len(rest) > 3
    for key, done in rest.items():
        assert [*cut[key].tokens, *done.tokens] == whole[key].tokens.tolist()
        np.testing.assert_allclose(done.logprobs, whole[key].logprobs[7:], atol=1e-5, rtol=0)


def test_stop_strings_and_ends_are_looked_for_in_the_newest_turn(lab: Lab) -> None:
    engine = lab.engine(stop=["zz"], **EPISODES)
    (first,) = drain(engine, requests(1, seed=2, max_new_tokens=5)).values()
    text = engine.tokenizer.text_ids("zz<eos>zz").tolist()
    (second,) = drain(engine, [going_on(first, 6, text)]).values()
    assert (second.finish, len(second.tokens)) == ("length", 6)
    assert second.text == engine.tokenizer.decode(second.tokens)


# Chunks of prompts fill the budget of a step and no more, and each step makes progress.


LENGTHS = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 5000)), min_size=1, max_size=8)


@given(LENGTHS, st.floats(1, 3000), st.floats(1e-6, 0.01))
def test_chunks_stay_within_the_budget_and_the_first_sequence_goes_on(
    lengths: list[tuple[int, int]], budget: float, position_cost: float
) -> None:
    prefills = [Prefill(row, held, held + left) for row, (held, left) in enumerate(lengths)]
    chunks = plan_chunks(prefills, budget, position_cost)
    assert chunks[0].row == 0
    assert chunks[0].end > chunks[0].first
    cost = sum(1 + position_cost * at for chunk in chunks for at in range(chunk.first, chunk.end))
    least = sum(1 + position_cost * (prefills[0].held + at) for at in range(FEWEST_TOKENS))
    assert cost <= max(budget, least) + FEWEST_TOKENS * position_cost
    for chunk, each in zip(chunks, prefills, strict=False):
        assert (chunk.row, chunk.first) == (each.row, each.held)
        assert chunk.last == (chunk.end == each.length)


def test_late_tokens_of_a_long_prompt_come_in_smaller_chunks() -> None:
    early, late = (plan_chunks([Prefill(0, held, 9000)], 100, 1e-3)[0] for held in (0, 4000))
    assert early.end - early.first > 4 * (late.end - late.first)


def test_a_short_prompt_shares_the_step_with_the_end_of_a_long_one() -> None:
    first, second = plan_chunks([Prefill(3, 990, 1000), Prefill(5, 0, 30)], 64, 0.0)
    assert (first.last, second.last) == (True, True)
    assert second.end == 30


def test_the_budget_rises_with_the_share_of_rows_that_wait() -> None:
    assert step_budget(100, 0, 5) == 100 * IDLE_BUDGETS
    assert 100 < step_budget(100, 31, 1) < 150
    assert step_budget(100, 16, 16) > 400

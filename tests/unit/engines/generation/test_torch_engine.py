"""What the engine records equals a plain forward, whatever shares its batch; bit for bit in deterministic mode."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from asyncrl.engines.generation.engine_interface import Completion, SampleRequest
from asyncrl.engines.generation.torch_engine import (
    FEWEST_TOKENS,
    IDLE_BUDGETS,
    Prefill,
    TorchEngine,
    plan_chunks,
    step_budget,
)
from asyncrl.errors import ConfigError, WeightsError
from tests.instruction_count import counting
from tests.unit.engines.generation.conftest import EPISODES, engine_config

Drain = Callable[..., dict[Any, Completion]]
MakeEngine = Callable[..., TorchEngine]
MakeRequests = Callable[..., list[SampleRequest]]
Plain = Callable[..., np.ndarray]
FAMILIES = ["llama", "llama-tied", "qwen2", "qwen3", "smollm2"]


def new_weights(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """The folder's parameters, moved by a few per cent; tied names share a tensor."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * parameter.std().nan_to_num(0.0) * torch.randn_like(parameter)
    return {name: tensor.detach() for name, tensor in model.named_parameters(remove_duplicate=False)}


def same(left: Completion, right: Completion) -> bool:
    return np.array_equal(left.tokens, right.tokens) and left.logprobs.tobytes() == right.logprobs.tobytes()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_logprobs_equal_a_plain_forward(
    make_engine: MakeEngine,
    requests: MakeRequests,
    drain: Drain,
    plain_logprobs: Plain,
    family: str,
    deterministic: bool,
) -> None:
    """Ragged prompts, 17 requests through 5 slots, rows refilled and moved."""
    done = drain(make_engine(family, deterministic=deterministic), requests(17))
    assert len(done) == 17
    for completion in done.values():
        expected = plain_logprobs(completion, family)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)
        assert len(completion.tokens) <= completion.request.max_new_tokens
        assert completion.tokens.max() < 261


@pytest.mark.parametrize("tokens", [1, 9, 50])
def test_prompts_are_computed_in_chunks(
    make_engine: MakeEngine, requests: MakeRequests, drain: Drain, plain_logprobs: Plain, tokens: int
) -> None:
    """Within any budget, samples are those of a plain forward."""
    engine = make_engine(slots=12, prefill_tokens=tokens)
    for completion in drain(engine, requests(14, max_new_tokens=6)).values():
        np.testing.assert_allclose(completion.logprobs, plain_logprobs(completion, "llama"), atol=1e-5, rtol=0)


@pytest.mark.trap("tempered_logprobs")
def test_temperatures_may_differ_side_by_side(
    make_engine: MakeEngine, requests: MakeRequests, drain: Drain, plain_logprobs: Plain
) -> None:
    mixed = [r for number, t in enumerate((0.0, 0.7, 2.0)) for r in requests(9, temperature=t)[3 * number :][:3]]
    done = drain(make_engine(slots=9), mixed)
    for completion in done.values():
        np.testing.assert_allclose(completion.logprobs, plain_logprobs(completion, "llama"), atol=1e-5, rtol=0)
    assert sorted(done) == [(number, 0, 0) for number in range(9)]


def test_temperature_zero_takes_the_likeliest(
    make_engine: MakeEngine, requests: MakeRequests, drain: Drain, model_folder: Callable[[str], Path]
) -> None:
    (request,) = requests(1, temperature=0.0, max_new_tokens=8)
    (completion,) = drain(make_engine(), [request]).values()
    model = AutoModelForCausalLM.from_pretrained(model_folder("llama"), dtype=torch.float32)
    ids = torch.from_numpy(np.concatenate([request.prompt, completion.tokens]).astype(np.int64))
    with torch.no_grad():
        best = model(ids[None]).logits[0, len(request.prompt) - 1 : -1, :261].argmax(-1)
    assert completion.tokens.tolist() == best.tolist()


@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm2"])
@pytest.mark.trap("seeds")
def test_a_sample_is_the_same_bits_alone_and_beside_any_neighbours(
    make_engine: MakeEngine, requests: MakeRequests, drain: Drain, family: str
) -> None:
    """Alone, in every slot, beside others, in any order of arrival."""
    wanted = requests(14, seed=3)
    together = drain(make_engine(family, deterministic=True, slots=6), wanted)
    backwards = drain(make_engine(family, deterministic=True, slots=6), wanted[::-1])
    engine = make_engine(family, deterministic=True, slots=6)
    for request in wanted:
        (alone,) = drain(engine, [request]).values()
        assert same(alone, together[request.key])
        assert same(alone, backwards[request.key])


@pytest.mark.trap("seeds")
def test_a_sample_is_the_same_bits_when_it_arrives_in_the_middle(
    make_engine: MakeEngine, requests: MakeRequests, drain: Drain
) -> None:
    first, *others = requests(9, seed=5, max_new_tokens=20)
    (alone,) = drain(make_engine(deterministic=True), [first]).values()
    engine = make_engine(deterministic=True)
    late = drain(engine, others, lambda step: engine.submit(first) if step == 7 else None)
    assert same(alone, late[first.key])


@pytest.mark.parametrize("slots", [1, 4, 32])
@pytest.mark.trap("seeds")
def test_a_sample_is_the_same_bits_with_any_number_of_slots(
    changed_model: Callable[..., Path], requests: MakeRequests, drain: Drain, slots: int
) -> None:
    """Neither does it depend on the replica: every engine here is another one. Products of so wide a model round
    differently over few rows, fewer than 4 or 11 by the processor."""
    folder = changed_model("llama", hidden_size=256)
    shape = {"deterministic": True, "max_prompt_tokens": 40, "max_new_tokens": 24}
    few, many = (TorchEngine(folder, engine_config(slots=count, **shape), 0) for count in (7, slots))
    wanted = requests(10, seed=8)
    expected = drain(few, wanted)
    for key, completion in drain(many, wanted).items():
        assert same(completion, expected[key])


def test_members_of_a_group_share_a_prompt_and_differ_in_draws(
    make_engine: MakeEngine, requests: MakeRequests, drain: Drain, plain_logprobs: Plain
) -> None:
    (first,) = requests(1, max_new_tokens=12)
    group = [SampleRequest((0, m, 0), first.prompt, first.seed + m, 1.0, 12) for m in range(6)]
    done = drain(make_engine(deterministic=True, slots=6), group)
    assert len({tuple(completion.tokens) for completion in done.values()}) == 6
    for request in group:
        (alone,) = drain(make_engine(deterministic=True, slots=6), [request]).values()
        assert same(alone, done[request.key])
        np.testing.assert_allclose(alone.logprobs, plain_logprobs(alone, "llama"), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv", ["keep", "recompute"])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.trap("old_cache")
def test_new_weights_between_two_steps_end_no_sequence(
    make_engine: MakeEngine,
    requests: MakeRequests,
    drain: Drain,
    plain_logprobs: Plain,
    model_folder: Callable[[str], Path],
    family: str,
    kv: str,
    share: bool,
) -> None:
    engine = make_engine(family, kv=kv, slots=4)
    weights = new_weights(model_folder(family), 1)
    swap = lambda step: engine.load(weights, 1, share=share) if step == 6 else None  # noqa: E731
    done = drain(engine, requests(9, max_new_tokens=20), swap)
    spanning = 0
    for completion in done.values():
        old, new = (plain_logprobs(completion, family, w) for w in (None, weights))
        before = completion.versions == 0
        spanning += 0 < before.sum() < len(before)
        np.testing.assert_allclose(completion.logprobs[before], old[before], atol=1e-5, rtol=0)
        if kv == "recompute" or not before.any():
            np.testing.assert_allclose(completion.logprobs[~before], new[~before], atol=1e-5, rtol=0)
    assert spanning == 4
    assert len(done) == 9


@pytest.mark.trap("old_cache")
def test_kept_keys_are_the_old_ones(
    make_engine: MakeEngine,
    requests: MakeRequests,
    drain: Drain,
    plain_logprobs: Plain,
    model_folder: Callable[[str], Path],
) -> None:
    """Under `keep` the tokens after a swap are not those of a full forward at the new weights: the switch is real."""
    engine = make_engine(kv="keep")
    weights = new_weights(model_folder("llama"), 1)
    done = drain(
        engine,
        requests(3, max_new_tokens=20),
        lambda step: engine.load(weights, 1, share=True) if step == 6 else None,
    )
    after = [
        np.abs(c.logprobs - plain_logprobs(c, "llama", weights))[c.versions == 1].max()
        for c in done.values()
        if (c.versions == 1).any()
    ]
    assert max(after) > 1e-3


def test_swapped_weights_keep_the_bits_of_deterministic_mode(
    make_engine: MakeEngine, requests: MakeRequests, drain: Drain, model_folder: Callable[[str], Path]
) -> None:
    weights = new_weights(model_folder("llama"), 1)
    wanted = requests(5, max_new_tokens=20)
    results = []
    for group in (wanted, wanted[:1]):
        engine = make_engine(deterministic=True, kv="recompute")
        swap = lambda step, engine=engine: engine.load(weights, 1, share=True) if step == 6 else None  # noqa: E731
        results.append(drain(engine, group, swap)[wanted[0].key])
    assert same(*results)
    assert results[0].versions.tolist() == [0] * 6 + [1] * (len(results[0].versions) - 6)


def test_no_sequence_starts_with_weights_that_are_too_old(
    make_engine: MakeEngine, requests: MakeRequests, drain: Drain, model_folder: Callable[[str], Path]
) -> None:
    weights = new_weights(model_folder("llama"), 1)
    early, late = requests(2, max_new_tokens=6)
    late = SampleRequest(late.key, late.prompt, late.seed, 1.0, 6, not_before=1)
    engine = make_engine()
    done = drain(engine, [late, early])
    assert list(done) == [early.key]
    assert engine.waiting == 1
    engine.load(weights, 1, share=False)
    done = drain(engine, [])
    assert set(done[late.key].versions) == {1}


def test_who_waits_for_newer_weights_keeps_the_place_in_the_queue(
    make_engine: MakeEngine, requests: MakeRequests, drain: Drain, model_folder: Callable[[str], Path]
) -> None:
    weights = new_weights(model_folder("llama"), 1)
    late, first, second = requests(3, max_new_tokens=4)
    late = SampleRequest(late.key, late.prompt, late.seed, 1.0, 4, not_before=1)
    engine = make_engine(slots=1)
    swap = lambda step: engine.load(weights, 1, share=False) if step == 3 else None  # noqa: E731
    assert list(drain(engine, [late, first, second], swap)) == [first.key, late.key, second.key]


def test_an_engine_without_weights_samples_nothing(make_engine: MakeEngine, requests: MakeRequests) -> None:
    engine = make_engine(version=-1)
    engine.submit(requests(1, not_before=-3)[0])
    assert not engine.active
    assert engine.step() == []


def test_end_answers_what_had_begun_and_forgets_the_rest(
    make_engine: MakeEngine, requests: MakeRequests, drain: Drain, plain_logprobs: Plain
) -> None:
    engine = make_engine(slots=3)
    wanted = requests(5, max_new_tokens=20)
    for request in wanted:
        engine.submit(request)
    for _ in range(4):
        assert engine.step() == []
    ended = engine.end([wanted[0].key, wanted[4].key], "length")
    assert [(c.request.key, c.finish, len(c.tokens)) for c in ended] == [((0, 0, 0), "length", 4)]
    rest = drain(engine, [])
    assert sorted(rest) == [(1, 0, 0), (2, 0, 0), (3, 0, 0)]
    for completion in rest.values():
        np.testing.assert_allclose(completion.logprobs, plain_logprobs(completion, "llama"), atol=1e-5, rtol=0)


def test_a_step_takes_as_many_operations_however_many_requests_wait(
    make_engine: MakeEngine, requests: MakeRequests
) -> None:
    def operations(waiting: int) -> int:
        engine = make_engine(slots=2)
        engine.submit(*requests(2 + waiting, max_new_tokens=20))
        engine.step()
        with counting() as count:
            engine.end([], "abort")
            engine.step()
        return count.instructions

    assert operations(500) <= 1.01 * operations(5)


@pytest.mark.trap("padded_vocabulary")
def test_tied_names_with_different_values_are_refused(
    make_engine: MakeEngine, model_folder: Callable[[str], Path]
) -> None:
    weights = new_weights(model_folder("llama-tied"), 1)
    engine = make_engine("llama-tied")
    with pytest.raises(WeightsError, match=r"lm_head.weight and model.embed_tokens.weight are tied"):
        engine.load(weights | {"lm_head.weight": weights["lm_head.weight"] + 1}, 1, share=False)
    with pytest.raises(WeightsError, match=r"lack model.norm.weight"):
        engine.load({n: t for n, t in weights.items() if n != "model.norm.weight"}, 1, share=False)
    assert engine.version == 0


def test_damaged_weights_do_not_sample(
    make_engine: MakeEngine, requests: MakeRequests, model_folder: Callable[[str], Path]
) -> None:
    engine = make_engine()
    weights = new_weights(model_folder("llama"), 1)
    engine.load(weights | {"model.norm.weight": weights["model.norm.weight"] * torch.nan}, 1, share=False)
    engine.submit(requests(1)[0])
    with pytest.raises(WeightsError, match="not finite"):
        engine.step()


def test_what_does_not_fit_a_slot_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(ConfigError, match=r"41 tokens where task.max_prompt_tokens is 40"):
        engine.submit(SampleRequest((7, 0, 0), np.ones(41, np.int32), 0, 1.0, 3))
    with pytest.raises(ConfigError, match=r"25 tokens where generation.max_new_tokens is 24"):
        engine.submit(SampleRequest((7, 0, 0), np.ones(4, np.int32), 0, 1.0, 25))


def next_turn(done: Completion, given: list[int], tokens: int) -> SampleRequest:
    request = done.request
    so_far = np.concatenate([request.prompt, done.tokens, np.array(given, np.int32)])
    drawn = request.drawn + len(done.tokens)
    return SampleRequest(request.key, so_far, request.seed, request.temperature, tokens, drawn=drawn)


@pytest.mark.parametrize("deterministic", [False, True])
def test_turns_with_nothing_given_are_one_answer(
    make_engine: MakeEngine, requests: MakeRequests, drain: Drain, deterministic: bool
) -> None:
    """Draws go on where they ended, so it does not matter where a sample is interrupted."""
    engine = make_engine(deterministic=deterministic, **EPISODES)
    wanted = requests(7, max_new_tokens=24)
    whole = drain(engine, wanted)
    cut = drain(engine, [replace(request, max_new_tokens=7) for request in wanted])
    rest = drain(engine, [next_turn(done, [], 17) for done in cut.values() if done.finish == "length"])
    assert len(rest) > 3
    for key, done in rest.items():
        assert [*cut[key].tokens, *done.tokens] == whole[key].tokens.tolist()
        np.testing.assert_allclose(done.logprobs, whole[key].logprobs[7:], atol=1e-5, rtol=0)


def test_stop_strings_and_ends_are_looked_for_in_the_newest_turn(
    make_engine: MakeEngine, requests: MakeRequests, drain: Drain
) -> None:
    engine = make_engine(stop=["zz"], **EPISODES)
    (first,) = drain(engine, requests(1, seed=2, max_new_tokens=5)).values()
    text = engine.tokenizer.text_ids("zz<eos>zz").tolist()
    (second,) = drain(engine, [next_turn(first, text, 6)]).values()
    assert (second.finish, len(second.tokens)) == ("length", 6)
    assert second.text == engine.tokenizer.decode(second.tokens)


def test_a_turn_that_may_pass_the_longest_episode_is_refused(
    make_engine: MakeEngine, requests: MakeRequests, drain: Drain
) -> None:
    engine = make_engine(**EPISODES)
    (first,) = drain(engine, requests(1)).values()
    with pytest.raises(ConfigError, match=r"131 tokens where task.max_prompt_tokens \+ environment.max_tokens is 130"):
        engine.submit(next_turn(first, [5] * (130 - len(first.request.prompt) - len(first.tokens)), 1))


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

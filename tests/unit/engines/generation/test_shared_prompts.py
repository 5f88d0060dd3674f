"""Members that share the prefill of a prompt: each has its own log-probs, at every length and after new weights."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.engines.generation.block_pool import KV_BLOCK
from asyncrl.engines.generation.engine_interface import Completion, SampleRequest
from asyncrl.engines.generation.torch_engine import TorchEngine
from tests.unit.engines.generation.lab import Lab

MakeEngine = Callable[..., TorchEngine]
Drain = Callable[..., dict[Any, Completion]]


def new_weights(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    return Lab(lambda family: folder).weights(seed=seed)


def group_of(members: int, length: int, tokens: int) -> list[SampleRequest]:
    """The members of one group, with one prompt between them."""
    prompt = np.random.default_rng(length).integers(5, 261, length).astype(np.int32)
    return [SampleRequest((0, member, 0), prompt, 100 + member, 1.0, tokens) for member in range(members)]


PLAIN_CASES = [(length, False) for length in (1, KV_BLOCK - 1, KV_BLOCK, KV_BLOCK + 1, 2 * KV_BLOCK + 1)]


@pytest.mark.parametrize(("length", "deterministic"), [*PLAIN_CASES, (KV_BLOCK + 1, True)])
def test_every_member_sees_the_whole_prompt(
    length: int,
    deterministic: bool,
    make_engine: MakeEngine,
    drain: Drain,
    plain_logprobs: Callable[..., np.ndarray],
) -> None:
    """A prompt of a whole number of blocks and one token more lies in one more block."""
    engine = make_engine(max_prompt_tokens=80, deterministic=deterministic)
    done = drain(engine, group_of(4, length, 6))
    assert len({tuple(each.tokens) for each in done.values()}) > 1
    for each in done.values():
        np.testing.assert_allclose(each.logprobs, plain_logprobs(each, "llama"), atol=2e-4)


@pytest.mark.parametrize("deterministic", [False, True])
def test_members_that_share_a_prompt_go_on_apart_when_their_keys_are_computed_anew(
    deterministic: bool,
    make_engine: MakeEngine,
    drain: Drain,
    model_folder: Callable,
    plain_logprobs: Callable[..., np.ndarray],
) -> None:
    """Also beside a member that begins with the new weights."""
    changed = AutoModelForCausalLM.from_pretrained(model_folder("llama"), dtype=torch.float32)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1.1)
    weights = dict(changed.named_parameters(remove_duplicate=False))
    engine = make_engine(kv="recompute", deterministic=deterministic)
    *members, last = group_of(4, 9, 12)

    def flip(step: int) -> None:
        if step == 4:
            engine.load(weights, 1, share=False)
            engine.submit(last)

    done = drain(engine, members, flip)
    assert len({tuple(done[each.key].tokens[:4]) for each in members}) > 1, "what they had sampled by the flip differs"
    assert done[last.key].versions[0] == 1
    for each in done.values():
        after = plain_logprobs(each, "llama", changed.state_dict())
        new = each.versions == 1
        assert new.any()
        np.testing.assert_allclose(each.logprobs[new], after[new], atol=2e-4)


class CountedPrompts:
    """Counts the prompt tokens that an engine computes."""

    def __init__(self, engine: TorchEngine) -> None:
        self.tokens = 0
        self._logits = engine._flat.logits
        engine._flat.logits = self._count  # type: ignore[method-assign]

    def _count(self, tokens: Any, positions: Any, prefill: Any = {}, *further: Any) -> torch.Tensor:  # noqa: B006
        self.tokens += sum(map(len, prefill.values()))
        return self._logits(tokens, positions, prefill, *further)


@pytest.mark.parametrize("length", [31, 32, 33, 65, 80])
def test_a_prompt_is_computed_once_whichever_step_its_members_start_in(
    length: int, make_engine: MakeEngine, drain: Drain, plain_logprobs: Callable[..., np.ndarray]
) -> None:
    """Three slots for eight members of different lengths."""
    engine = make_engine(slots=3, max_prompt_tokens=80)
    counted = CountedPrompts(engine)
    wanted = [replace(each, max_new_tokens=3 + 2 * each.key[1]) for each in group_of(8, length, 20)]
    done = drain(engine, wanted)
    assert len(done) == 8
    assert counted.tokens == length
    for each in done.values():
        np.testing.assert_allclose(each.logprobs, plain_logprobs(each, "llama"), atol=1e-5, rtol=0)
    assert not len(engine._memory.prompts)
    assert engine.cache_used == 0


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_members_that_start_after_new_weights_do_not_begin_with_the_old_prompt(
    kv: str,
    make_engine: MakeEngine,
    drain: Drain,
    model_folder: Callable[[str], Path],
    plain_logprobs: Callable[..., np.ndarray],
) -> None:
    weights = new_weights(model_folder("llama"), 1)
    engine = make_engine(slots=3, kv=kv, max_prompt_tokens=80, prefill_tokens=16)
    counted = CountedPrompts(engine)
    wanted = [replace(each, max_new_tokens=3 + 2 * each.key[1]) for each in group_of(8, 70, 20)]
    done = drain(engine, wanted, lambda step: engine.load(weights, 1, share=False) if step == 9 else None)
    late = [each for each in done.values() if set(each.versions) == {1}]
    assert len(late) > 1
    for each in late:
        np.testing.assert_allclose(each.logprobs, plain_logprobs(each, "llama", weights), atol=1e-5, rtol=0)
    if kv == "keep":
        assert counted.tokens == 2 * 70
    else:
        assert counted.tokens < 2 * 70 + 3 * 30, "rows share the prompt when it is computed again"


def test_a_prompt_that_is_computed_in_part_begins_again_with_new_weights(
    make_engine: MakeEngine,
    drain: Drain,
    model_folder: Callable[[str], Path],
    plain_logprobs: Callable[..., np.ndarray],
) -> None:
    weights = new_weights(model_folder("llama"), 1)
    engine = make_engine(kv="keep", max_prompt_tokens=80, prefill_tokens=1)
    beside = group_of(1, 5, 24)
    late = [replace(each, key=(1, each.key[1], 0)) for each in group_of(2, 70, 6)]

    def between(step: int) -> None:
        if step == 2:
            engine.submit(*late)
        if step == 5:
            assert 0 < engine._batch.held[1] < 70
            engine.load(weights, 1, share=False)

    done = drain(engine, beside, between)
    for each in late:
        expected = plain_logprobs(done[each.key], "llama", weights)
        np.testing.assert_allclose(done[each.key].logprobs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_prompt_starts_at_last_that_new_weights_interrupt_again_and_again(
    make_engine: MakeEngine, model_folder: Callable[[str], Path], kv: str
) -> None:
    """Weights that are new every second step, and a prompt that takes nine steps beside a sample."""
    weights = new_weights(model_folder("llama"), 1)
    engine = make_engine(kv=kv, max_prompt_tokens=80, prefill_tokens=8)
    (late,) = group_of(1, 70, 1)
    beside = SampleRequest((1, 0, 0), np.arange(5, 9, dtype=np.int32), 1, 1.0, 24)
    engine.submit(beside)
    engine.step()
    engine.submit(late)
    for step in range(20):
        if late.key in {done.request.key for done in engine.step()}:
            return
        assert engine._batch.requests[0] is beside, "a sample decodes, and the budget is that of a step with one"
        if step % 2:
            engine.load(weights, step, share=False)
    raise AssertionError("the prompt is never computed")

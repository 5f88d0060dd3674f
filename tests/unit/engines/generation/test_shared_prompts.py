"""Members that share the prefill of a prompt: each has its own log-probs, at every length and after new weights."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.engines.generation.engine_interface import SampleRequest
from asyncrl.engines.generation.torch_engine import TorchEngine
from tests.unit.engines.generation.conftest import Lab, at, drain, group_of


class CountedPrompts:
    """Counts the prompt tokens that an engine computes."""

    def __init__(self, engine: TorchEngine) -> None:
        self.tokens = 0
        self._logits = engine._flat.logits
        engine._flat.logits = self._count  # type: ignore[method-assign]

    def _count(self, tokens: Any, positions: Any, prefill: Any = {}, *further: Any) -> torch.Tensor:  # noqa: B006
        self.tokens += sum(map(len, prefill.values()))
        return self._logits(tokens, positions, prefill, *further)


def of_many_lengths(prompt: int) -> list[SampleRequest]:
    """Eight members, whose answers have different lengths."""
    return [replace(each, max_new_tokens=3 + 2 * each.key[1]) for each in group_of(8, prompt, 20)]


@pytest.mark.parametrize("length", [1, 31, 32, 33, 65])
def test_a_prompt_is_computed_once_whichever_step_its_members_start_in(length: int, lab: Lab) -> None:
    """Three slots for eight members of different lengths; a prompt of a whole number of blocks and one token more lies
    in one more block."""
    engine = lab.engine(slots=3, max_prompt_tokens=80)
    counted = CountedPrompts(engine)
    done = drain(engine, of_many_lengths(length))
    assert len({tuple(each.tokens[:3]) for each in done.values()}) > 1
    assert len(done) == 8
    assert counted.tokens == length
    lab.check(done)
    assert not len(engine._memory.prompts)
    assert engine.cache_used == 0


@pytest.mark.parametrize("deterministic", [False, True])
def test_members_that_share_a_prompt_go_on_apart_when_their_keys_are_computed_anew(
    deterministic: bool, lab: Lab
) -> None:
    """Also beside a member that begins with the new weights."""
    weights = lab.weights()
    engine = lab.engine(kv="recompute", deterministic=deterministic)
    *members, last = group_of(4, 9, 12)

    def flip() -> None:
        engine.load(weights, 1, share=False)
        engine.submit(last)

    done = drain(engine, members, at(4, flip))
    assert len({tuple(done[each.key].tokens[:4]) for each in members}) > 1, "what they had sampled by the flip differs"
    assert done[last.key].versions[0] == 1
    for each in done.values():
        new = each.versions == 1
        assert new.any()
        np.testing.assert_allclose(each.logprobs[new], lab.plain(each, weights=weights)[new], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_members_that_start_after_new_weights_do_not_begin_with_the_old_prompt(kv: str, lab: Lab) -> None:
    weights = lab.weights()
    engine = lab.engine(slots=3, kv=kv, max_prompt_tokens=80, prefill_tokens=16)
    counted = CountedPrompts(engine)
    done = drain(engine, of_many_lengths(70), at(9, lambda: engine.load(weights, 1, share=False)))
    late = {key: each for key, each in done.items() if set(each.versions) == {1}}
    assert len(late) > 1
    lab.check(late, weights=weights)
    if kv == "keep":
        assert counted.tokens == 2 * 70
    else:
        assert counted.tokens < 2 * 70 + 3 * 30, "rows share the prompt when it is computed again"


def test_a_prompt_that_is_computed_in_part_begins_again_with_new_weights(lab: Lab) -> None:
    weights = lab.weights()
    engine = lab.engine(kv="keep", max_prompt_tokens=80, prefill_tokens=1)
    late = [replace(each, key=(1, each.key[1], 0)) for each in group_of(2, 70, 6)]

    def between(step: int) -> None:
        if step == 2:
            engine.submit(*late)
        if step == 5:
            assert 0 < engine._batch.held[1] < 70
            engine.load(weights, 1, share=False)

    done = drain(engine, group_of(1, 5, 24), between)
    lab.check({each.key: done[each.key] for each in late}, weights=weights)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_prompt_starts_at_last_that_new_weights_interrupt_again_and_again(lab: Lab, kv: str) -> None:
    """Weights that are new every second step, and a prompt that takes nine steps beside a sample."""
    weights = lab.weights()
    engine = lab.engine(kv=kv, max_prompt_tokens=80, prefill_tokens=8)
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

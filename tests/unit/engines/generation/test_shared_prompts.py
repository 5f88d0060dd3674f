"""Members that share the prefill of a prompt: each has its own log-probs, at every length and after new weights."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.engines.generation.forward.kv_cache import KV_BLOCK
from asyncrl.engines.generation.sample_requests import Completion, SampleRequest
from asyncrl.engines.generation.torch_engine import TorchEngine

MakeEngine = Callable[..., TorchEngine]
Drain = Callable[..., dict[Any, Completion]]


def group_of(members: int, length: int, tokens: int) -> list[SampleRequest]:
    """The members of one group, with one prompt between them."""
    prompt = np.random.default_rng(length).integers(5, 261, length).astype(np.int32)
    return [SampleRequest((0, member, 0), prompt, 100 + member, 1.0, tokens) for member in range(members)]


@pytest.mark.parametrize("length", [1, KV_BLOCK - 1, KV_BLOCK, KV_BLOCK + 1, 2 * KV_BLOCK + 1])
def test_every_member_sees_the_whole_prompt(
    length: int, make_engine: MakeEngine, drain: Drain, plain_logprobs: Callable[..., np.ndarray]
) -> None:
    """A prompt of a whole number of blocks and one token more lies in one more block."""
    done = drain(make_engine(max_prompt_tokens=80), group_of(4, length, 6))
    assert len({tuple(each.tokens) for each in done.values()}) > 1
    for each in done.values():
        np.testing.assert_allclose(each.logprobs, plain_logprobs(each, "llama"), atol=2e-4)


def test_members_that_share_a_prompt_go_on_apart_when_their_keys_are_computed_anew(
    make_engine: MakeEngine, drain: Drain, model_folder: Callable, plain_logprobs: Callable[..., np.ndarray]
) -> None:
    changed = AutoModelForCausalLM.from_pretrained(model_folder("llama"), dtype=torch.float32)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1.1)
    weights = dict(changed.named_parameters(remove_duplicate=False))
    engine = make_engine(kv="recompute")

    def flip(step: int) -> None:
        if step == 4:
            engine.load(weights, 1, share=False)

    done = drain(engine, group_of(4, 9, 12), flip)
    assert len({tuple(each.tokens[:4]) for each in done.values()}) > 1, "what they had sampled by the flip differs"
    for each in done.values():
        after = plain_logprobs(each, "llama", changed.state_dict())
        new = each.versions == 1
        assert new.any()
        np.testing.assert_allclose(each.logprobs[new], after[new], atol=2e-4)

"""Samples of an engine under top-p, top-k and min-p."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.engines.generation.sampling.truncation import Truncation
from asyncrl.engines.generation.scheduling.sample_requests import Completion, SampleRequest
from asyncrl.engines.generation.torch_engine import TorchEngine
from tests.unit.engines.generation.test_sampling import plainly_truncated
from tests.unit.engines.generation.test_torch_engine import same

Drain = Callable[..., dict[Any, Completion]]
MakeEngine = Callable[..., TorchEngine]
MakeRequests = Callable[..., list[SampleRequest]]
CUT = {"top_p": 0.8, "top_k": 30, "min_p": 0.02}


@pytest.mark.trap("restricted_sampling")
def test_logprobs_are_those_of_the_tokens_that_may_be_sampled(
    make_engine: MakeEngine, requests: MakeRequests, drain: Drain, model_folder: Callable[[str], Path]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder("llama"), dtype=torch.float32)
    for completion in drain(make_engine(slots=6, **CUT), requests(5, temperature=0.7, max_new_tokens=5)).values():
        prompt = completion.request.prompt
        with torch.no_grad():
            ids = torch.from_numpy(np.concatenate([prompt, completion.tokens]).astype(np.int64))
            logits = model(ids[None]).logits[0, len(prompt) - 1 : -1, :261].tolist()
        expected = [plainly_truncated(each, 0.7, Truncation(**CUT)) for each in logits]
        found = [each[token] for each, token in zip(expected, completion.tokens.tolist(), strict=True)]
        np.testing.assert_allclose(completion.logprobs, found, atol=1e-5, rtol=0)


def test_a_truncated_sample_is_the_same_bits_beside_any_neighbours(
    make_engine: MakeEngine, requests: MakeRequests, drain: Drain
) -> None:
    wanted = requests(9, seed=3)
    together = drain(make_engine(deterministic=True, slots=6, **CUT), wanted)
    for request in wanted[:3]:
        (alone,) = drain(make_engine(deterministic=True, slots=2, **CUT), [request]).values()
        assert same(alone, together[request.key])

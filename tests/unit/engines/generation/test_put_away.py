"""An engine whose weights, keys and values are freed while a trainer needs the memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.engines.generation.scheduling.sample_requests import Completion, SampleRequest
from asyncrl.engines.generation.torch_engine import TorchEngine

INTERRUPTED = (3, 4, 11)
"""Decode steps after which the engine is put away, some of them within prompts or shortly after them."""


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: tensor.detach() for name, tensor in model.named_parameters(remove_duplicate=False)}


def held_bytes(engine: TorchEngine) -> int:
    """Bytes of weights, of the head's copy, and of keys and values."""
    head = engine._flat._head
    parameters = [*engine._flat.model.parameters(), *(head.parameters() if head is not None else ())]
    return sum(parameter.nbytes for parameter in parameters) + engine._flat.cache.bytes


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"float32_head": True, "cache_gb": 1e-4}])
def test_samples_go_on_after_the_engine_was_put_away(
    make_engine: Callable[..., TorchEngine],
    requests: Callable[..., list[SampleRequest]],
    drain: Callable[..., dict[Any, Completion]],
    model_folder: Callable[[str], Path],
    family: str,
    settings: dict[str, Any],
) -> None:
    weights, expected = weights_of(model_folder(family)), drain(make_engine(family, **settings), requests(9))
    engine = make_engine(family, **settings)
    held = []

    def interrupt(step: int) -> None:
        if step in INTERRUPTED:
            held.append(held_bytes(engine))
            engine.put_away()
            assert (held_bytes(engine), engine.active, engine.running > 0) == (0, False, True)
            engine.load(weights, 0, share=True)

    done = drain(engine, requests(9), interrupt)
    assert len(held) == len(INTERRUPTED)
    assert min(held) > 0
    assert done.keys() == expected.keys()
    for key, completion in done.items():
        assert completion.tokens.tolist() == expected[key].tokens.tolist()
        assert completion.logprobs == pytest.approx(expected[key].logprobs, abs=1e-5)
    assert all(engine._flat.model.get_parameter(name).data_ptr() == weights[name].data_ptr() for name in weights)


@pytest.mark.parametrize("shared_before", [False, True])
@pytest.mark.parametrize("is_put_away", [False, True])
def test_weights_that_are_copied_are_the_engines_own_whatever_it_had_before(
    make_engine: Callable[..., TorchEngine],
    requests: Callable[..., list[SampleRequest]],
    drain: Callable[..., dict[Any, Completion]],
    model_folder: Callable[[str], Path],
    shared_before: bool,
    is_put_away: bool,
) -> None:
    engine, weights = make_engine(), weights_of(model_folder("llama"))
    if shared_before:
        lent = {name: tensor.clone() for name, tensor in weights.items()}
        engine.load(lent, 0, share=True)
    if is_put_away:
        engine.put_away()
    others = {name: tensor * 1.5 for name, tensor in weights.items()}
    engine.load(others, 1, share=False)
    if shared_before:
        assert all(torch.equal(lent[name], weights[name]) for name in weights), "a copy never writes into lent tensors"
    for name, tensor in others.items():
        assert torch.equal(engine._flat.model.get_parameter(name), tensor)
        tensor.zero_()
    engine.load(weights, 2, share=False)
    done, expected = drain(engine, requests(3)), drain(make_engine(), requests(3))
    assert all(done[key].tokens.tolist() == expected[key].tokens.tolist() for key in expected)


def test_what_arrives_meanwhile_is_sampled_later(
    make_engine: Callable[..., TorchEngine],
    requests: Callable[..., list[SampleRequest]],
    model_folder: Callable[[str], Path],
) -> None:
    engine = make_engine()
    engine.put_away()
    engine.submit(*requests(2))
    assert (engine.active, engine.waiting) == (False, 2)
    engine.load(weights_of(model_folder("llama")), 1, share=True)
    assert engine.active

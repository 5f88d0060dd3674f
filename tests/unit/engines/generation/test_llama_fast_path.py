"""The forward that is written out gives what the modules give; a model with anything else in it is left to them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.engines.canary_logprobs import PROBE_TOKENS
from asyncrl.engines.generation.forward import llama_fast_path
from asyncrl.engines.generation.forward.flat_model import NOTHING, FlatModel, load_model, probe_logprobs
from asyncrl.engines.generation.scheduling.sample_requests import Completion, SampleRequest
from asyncrl.engines.generation.torch_engine import TorchEngine

ModelFolder = Callable[[str], Path]
WRITTEN_OUT = ["llama", "llama-tied", "llama-biased", "llama-scaled", "mistral", "qwen2", "qwen3", "smollm2"]
PROMPTS = (7, 1, 30)
PROBED = np.arange(PROBE_TOKENS)


def steps(flat: FlatModel) -> torch.Tensor:
    """Log-probs of prompts together, of a step of all of them, and of one in which another prompt joins."""
    random = np.random.default_rng(0)
    prompts = [random.integers(5, 261, length) for length in PROMPTS]
    found = [flat.logits(NOTHING, NOTHING, dict(enumerate(prompts)))]
    found.append(flat.logits(random.integers(5, 261, 3), np.array(PROMPTS)))
    joining = {3: random.integers(5, 261, 12)}
    found.append(flat.logits(random.integers(5, 261, 3), np.array(PROMPTS) + 1, joining))
    return torch.cat(found).float().log_softmax(-1)


@pytest.mark.parametrize("family", WRITTEN_OUT)
def test_logprobs_equal_those_of_the_modules(model_folder: ModelFolder, family: str) -> None:
    flat = FlatModel(load_model(model_folder(family), torch.float32, "cpu"), 4, 64, 261)
    assert flat.fast
    found = steps(flat)
    flat.fast = False
    torch.testing.assert_close(found, steps(flat), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bfloat16_is_as_near_to_float32_as_the_modules_are(model_folder: ModelFolder, family: str) -> None:
    exact = steps(FlatModel(load_model(model_folder(family), torch.float32, "cpu"), 4, 64, 261))[:, :261]
    flat = FlatModel(load_model(model_folder(family), torch.bfloat16, "cpu"), 4, 64, 261)
    ours = (steps(flat)[:, :261] - exact).abs().mean()
    flat.fast = False
    assert ours < 1.3 * (steps(flat)[:, :261] - exact).abs().mean()


@pytest.mark.trap("engines_disagree")
@pytest.mark.parametrize("family", ["llama", "llama-gelu", "qwen2"])
def test_a_float32_head_multiplies_the_rounded_states_with_the_rounded_weights_and_rounds_no_more(
    model_folder: ModelFolder, family: str
) -> None:
    """By the written out forward and by the modules; a head with a bias, too; after new weights, with these."""
    model = load_model(model_folder(family), torch.bfloat16, "cpu")
    model.get_output_embeddings().bias = torch.nn.Parameter(torch.randn(288).bfloat16())
    flat = FlatModel(model, 4, 64, 261, float32_head=True)
    assert flat.fast == (family != "llama-gelu")
    ids = np.arange(5, 25)
    for _ in range(2):
        found = flat.logits(NOTHING, NOTHING, {0: ids})[0, :261]
        weight, bias = model.get_output_embeddings().weight.double(), model.get_output_embeddings().bias.double()
        states = last_states(flat, ids)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), (states @ weight.T + bias)[:261], atol=1e-4, rtol=1e-5)
        assert not torch.equal(found, found.bfloat16().float())
        model.get_output_embeddings().weight.data = torch.randn_like(model.get_output_embeddings().weight)
        flat.weights_changed()


def last_states(flat: FlatModel, ids: np.ndarray) -> torch.Tensor:
    """float64 [width]: what a head sees of the last token."""
    seen: list[torch.Tensor] = []
    given = FlatModel._states

    def states(self: FlatModel, *arguments: Any) -> torch.Tensor:
        seen.append(given(self, *arguments))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatModel, "_states", states)
        flat.logits(NOTHING, NOTHING, {0: ids})
    return seen[0][0].double()


def test_a_layer_of_another_kind_is_left_to_the_modules(model_folder: ModelFolder) -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(states)

    model = load_model(model_folder("llama"), torch.float32, "cpu")
    assert llama_fast_path.is_llama_like(model)
    model.model.layers[1].mlp.up_proj.__class__ = Doubled
    assert not llama_fast_path.is_llama_like(model)
    assert not llama_fast_path.is_llama_like(load_model(model_folder("llama-gelu"), torch.float32, "cpu"))


def test_one_that_differs_gives_way(model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a later version of transformers changes what a model computes."""
    model = load_model(model_folder("llama"), torch.float32, "cpu")
    expected = probe_logprobs(model, PROBED)
    flat = FlatModel(model, 2, 32, 261)
    flat.verify(PROBED, expected)
    assert flat.fast
    monkeypatch.setattr(llama_fast_path, "_rotate", lambda states, cosine, sine: states)
    flat.verify(PROBED, expected)
    assert not flat.fast


def test_what_is_not_written_out_is_sampled_by_the_modules(
    make_engine: Callable[..., TorchEngine],
    requests: Callable[..., list[SampleRequest]],
    drain: Callable[..., dict[object, Completion]],
    plain_logprobs: Callable[..., np.ndarray],
) -> None:
    engine = make_engine("llama-gelu")
    assert not engine._flat.fast
    for completion in drain(engine, requests(17)).values():
        expected = plain_logprobs(completion, "llama-gelu")
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)

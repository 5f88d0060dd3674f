"""Models whose attention this engine would get wrong are refused by name, known or not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from asyncrl.engines.canary_logprobs import PROBE_TEXT, PROBE_TOKENS, probe_tokens
from asyncrl.engines.generation import flat_model
from asyncrl.engines.generation.attention import flat_attention
from asyncrl.engines.generation.flat_model import NOTHING, FlatModel, load_model, probe_logprobs
from asyncrl.errors import ConfigError

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def test_what_no_setting_tells_is_found_by_comparing(model_folder: Callable[[str], Path]) -> None:
    """In either dtype, by the measure of its rounding."""
    ids = probe_tokens(AutoTokenizer.from_pretrained(model_folder("llama")), Qwen2Config(**SMALL), 64)
    for dtype, changed in ((torch.float32, slice(1, 2)), (torch.bfloat16, slice(None))):
        model = load_model(model_folder("llama"), dtype, "cpu")
        expected = probe_logprobs(model, ids)
        FlatModel(model, 2, 32, 261).verify(ids, expected)
        for layer in model.model.layers[changed]:
            layer.self_attn.scaling *= 3
        with pytest.raises(ConfigError, match="differ by"):
            FlatModel(model, 2, 32, 261).verify(ids, expected)


def test_a_sentence_is_looked_at_and_where_there_are_no_words_different_tokens(
    model_folder: Callable[[str], Path],
) -> None:
    """Over equal tokens any attention gives the same; special tokens in a row are none that a model has learnt."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder("llama"))
    assert tokenizer.decode(probe_tokens(tokenizer, Qwen2Config(**SMALL), 64)) == PROBE_TEXT[:PROBE_TOKENS]
    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"?": 0, **{f"w{i}": i for i in range(1, 9)}}, unk_token="?"))
    )
    assert list(probe_tokens(words, Qwen2Config(**SMALL), 64)) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2]


def test_attention_names_what_it_does_not_do() -> None:
    layer = torch.nn.Linear(1, 1)
    token = torch.zeros(1, 1, 1, 4)
    with pytest.raises(ConfigError, match="does not pass keyword arguments"):
        flat_attention(layer, token, token, token, None)


# The forward that is written out gives what the modules give; a model with anything else in it is left to them.
ModelFolder = Callable[[str], Path]
WRITTEN_OUT = ["llama-tied", "llama-biased", "llama-scaled", "mistral", "qwen3"]
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


@pytest.mark.parametrize("family", ["llama", "qwen3"])
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
        weight = model.get_output_embeddings().weight.double()
        bias = model.get_output_embeddings().bias.double()
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
    assert flat_model.is_llama_like(model)
    model.model.layers[1].mlp.up_proj.__class__ = Doubled
    assert not flat_model.is_llama_like(model)
    assert not flat_model.is_llama_like(load_model(model_folder("llama-gelu"), torch.float32, "cpu"))


def test_one_that_differs_gives_way(model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later version of transformers may change what a model computes."""
    model = load_model(model_folder("llama"), torch.float32, "cpu")
    expected = probe_logprobs(model, PROBED)
    flat = FlatModel(model, 2, 32, 261)
    flat.verify(PROBED, expected)
    assert flat.fast
    monkeypatch.setattr(flat_model, "_rotate", lambda states, cosine, sine: states)
    flat.verify(PROBED, expected)
    assert not flat.fast

"""Models whose attention this engine would get wrong are refused by name, known or not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from asyncrl.engines.canary_logprobs import PROBE_TEXT, PROBE_TOKENS, probe_tokens
from asyncrl.engines.generation.forward.attention import flat_attention
from asyncrl.engines.generation.forward.flat_model import FlatModel, load_model, probe_logprobs
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


def test_other_plain_families_run_too() -> None:
    """Learned positions, no shared heads, biases: nothing here is Llama's."""
    shape = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0)
    model = AutoModelForCausalLM.from_config(shape).eval()
    ids = np.arange(PROBE_TOKENS)
    expected = probe_logprobs(model, ids)
    FlatModel(model, 2, 32, 64).verify(ids, expected)


def test_attention_names_what_it_does_not_do() -> None:
    layer = torch.nn.Linear(1, 1)
    token = torch.zeros(1, 1, 1, 4)
    with pytest.raises(ConfigError, match="does not pass keyword arguments"):
        flat_attention(layer, token, token, token, None)

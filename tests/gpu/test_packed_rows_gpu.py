"""Packed rows on a CUDA device, by FlexAttention: the log-probs and gradients of padded rows."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.bench.benchmark_model import VOCABULARY, make_tokenizer
from asyncrl.engines.training.micro_batches import lay_out_rows
from asyncrl.engines.training.models_with_heads import CausalModel, load_causal_model, token_logprobs
from asyncrl.engines.training.packed_rows import can_compile
from asyncrl.engines.training.train_rows import SampleRow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(2)
    path = tmp_path_factory.mktemp("grouped")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads)).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def found(model: CausalModel, *, packs: bool, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns log-probs of samples of five prompts, three of which are shared, and the gradients of their weighted sum;
    the number of tokens is another one for each seed."""
    draw = np.random.default_rng(seed)
    own = [draw.integers(4, VOCABULARY, int(size)) for size in draw.integers(2, 90, 5)]
    prompts = [own[index] for index in (0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 4)]
    responses = [draw.integers(4, VOCABULARY, int(size)) for size in draw.integers(1, 120, len(prompts))]
    weights = torch.from_numpy(draw.normal(size=sum(map(len, responses))).astype(np.float32)).to(model.device)
    given = [SampleRow(*ids, temperature=0.8) for ids in zip(prompts, responses, strict=True)]
    rows = lay_out_rows(given, model.device, packs)
    assert (rows.passes[0].attention is not None) == packs
    logprobs, _ = token_logprobs(model, rows, 512)
    gradients = torch.autograd.grad((logprobs * weights).sum(), [*model.whole.parameters()])
    return logprobs.detach(), list(gradients)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_packed_rows_are_padded_ones(device: str, folder: Path, seed: int) -> None:
    assert device == "cpu" or can_compile(), "FlexAttention is compiled"
    model = load_causal_model(folder, device)
    packed, padded = (found(model, packs=packs, seed=seed) for packs in (True, False))
    torch.testing.assert_close(packed[0], padded[0], atol=1e-4, rtol=1e-4)
    for ours, theirs in zip(packed[1], padded[1], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_packed_rows_in_bfloat16_are_as_near_to_float32_as_padded_ones(device: str, folder: Path) -> None:
    exact, _ = found(load_causal_model(folder, device), packs=False, seed=3)
    rough = load_causal_model(folder, device, "bfloat16")
    packed, padded = (found(rough, packs=packs, seed=3)[0] for packs in (True, False))
    errors = [float((each - exact).abs().mean()) for each in (packed, padded)]
    assert errors[0] < 1.5 * errors[1] + 1e-4

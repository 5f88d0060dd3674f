"""Log-probs of sampled tokens, by trainer and reference: those of a row alone, tempered, over the known vocabulary, in
chunks."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from asyncrl.engines.training.micro_batches import lay_out_rows, micro_batches
from asyncrl.engines.training.models_with_heads import frozen_logprobs, load_causal_model, token_logprobs
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.errors import ConfigError
from tests.unit.engines.training.tiny_training import KNOWN, make_rows

CPU = torch.device("cpu")


def plain_logits(folder: Path, row: TrainRow) -> torch.Tensor:
    """Tempered logits of a row alone through transformers' own forward, float64 over what the tokenizer knows."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    known = len(AutoTokenizer.from_pretrained(folder))
    ids = torch.tensor(np.concatenate([row.prompt_ids, row.response_ids]))[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1, :known].double()
    return logits / row.temperature


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.trap("packing")
def test_rows_together_equal_rows_alone(family: str, make_model: Callable[..., Path]) -> None:
    """Their gradients too. Every token weighs something else, the first of each row included, so that no two errors
    cancel."""
    folder = make_model(family)
    rows = make_rows(9, temperature=0.7)
    assert min(len(row.response_ids) for row in rows) == 1
    together, alone, in_chunks = (load_causal_model(folder, "cpu") for _ in range(3))
    for found, row in zip(frozen_logprobs(together, rows, 1024), rows, strict=True):
        expected = plain_logits(folder, row).log_softmax(-1).gather(-1, torch.tensor(row.response_ids)[:, None])
        np.testing.assert_allclose(found, expected[:, 0].numpy(), atol=1e-5)
    weights = [torch.from_numpy(np.random.default_rng(i).normal(size=len(r.response_ids))) for i, r in enumerate(rows)]
    whole = torch.cat(weights)
    parts = [(together, rows, whole, 1024), (in_chunks, rows, whole, 7)]
    parts += [(alone, [row], weight, 1024) for row, weight in zip(rows, weights, strict=True)]
    for model, part, weight, chunk in parts:
        (token_logprobs(model, lay_out_rows(part, CPU), chunk)[0] * weight.float()).sum().backward()
    for model in (together, in_chunks):
        for ours, expected in zip(model.whole.parameters(), alone.whole.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.trap("padded_vocabulary")
def test_ids_beyond_the_tokenizer_have_probability_zero(tiny: Path) -> None:
    model = load_causal_model(tiny, "cpu")
    logits = model.logits(model.hidden(torch.tensor([[1, 2, 3]])))
    assert model.whole.config.vocab_size == 64
    assert logits.shape[-1] == model.vocabulary == KNOWN


def test_no_tensor_of_all_logits_is_kept_for_the_backward_pass(tiny: Path) -> None:
    chunk = 16
    model = load_causal_model(tiny, "cpu")
    padded = lay_out_rows(make_rows(12), CPU)
    assert len(padded.targets) > 4 * chunk
    kept: list[tuple[int, ...]] = []

    def record(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        token_logprobs(model, padded, chunk)
    assert kept
    assert not [shape for shape in kept if shape[-1:] == (KNOWN,) or shape == (len(padded.targets), 64)]


def test_entropy_is_that_of_the_tempered_distribution(tiny: Path) -> None:
    (row,) = make_rows(1, temperature=0.7)
    with torch.no_grad():
        found = token_logprobs(load_causal_model(tiny, "cpu"), lay_out_rows([row], CPU), 1024)[1]
    expected = torch.distributions.Categorical(logits=plain_logits(tiny, row)).entropy()
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_model_that_scales_its_logits_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LlamaForCausalLM.forward

    def scaled(self: LlamaForCausalLM, *args: object, **kwargs: object) -> object:
        output = plain(self, *args, **kwargs)
        output.logits = output.logits * 0.5
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    with pytest.raises(ConfigError, match="changes its output around the last layer"):
        load_causal_model(tiny, "cpu")


def test_micro_batches_hold_every_row_once_within_the_budget() -> None:
    lengths = [5, 40, 7, 7, 100, 3, 22, 40]
    parts = micro_batches(lengths, 80)
    assert sorted(row for part in parts for row in part) == list(range(8))
    assert parts[0] == [4], "a row over the budget is alone"
    assert all(len(part) * max(lengths[row] for row in part) <= 80 for part in parts[1:])
    assert parts[1] == [1, 7], "rows of like length go together"


def test_padding_stays_small_where_micro_batches_are_filled() -> None:
    lengths = [int(length) for length in np.random.default_rng(0).integers(5, 200, 400)]
    parts = micro_batches(lengths, 4000)
    padded = sum(len(part) * max(lengths[row] for row in part) for part in parts)
    assert padded < 1.15 * sum(lengths)
    assert len(parts) < 2 * sum(lengths) / 4000

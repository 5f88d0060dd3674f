"""Log-probs of trainer and reference: padded equal to alone, tempered, over the known vocabulary, in chunks."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.schema import Config
from asyncrl.config.sections.algorithm_config import PRESETS, AlgorithmConfig
from asyncrl.engines.training.micro_batches import lay_out_rows, mask_rows, micro_batch, micro_batches
from asyncrl.engines.training.models_with_heads import frozen_logprobs, load_causal_model, token_logprobs
from asyncrl.engines.training.policy_loss import policy_loss_terms
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import run_step
from asyncrl.errors import ConfigError

KNOWN = 50


def all_logprobs(folder: Path, rows: list[TrainRow], temperature: float = 1.0, chunk: int = 1024) -> list[np.ndarray]:
    model = load_causal_model(folder, "cpu")
    prompts = [row.prompt_ids for row in rows]
    responses = [row.response_ids for row in rows]
    return frozen_logprobs(model, prompts, responses, [temperature] * len(rows), chunk)


def plain_logprobs(folder: Path, row: TrainRow, temperature: float) -> np.ndarray:
    """A row alone through transformers' own forward, float64 softmax over what the tokenizer knows."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    known = len(AutoTokenizer.from_pretrained(folder))
    ids = torch.tensor(np.concatenate([row.prompt_ids, row.response_ids]))[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1, :known].double()
    everything = (logits / temperature).log_softmax(-1)
    return everything.gather(-1, torch.tensor(row.response_ids)[:, None]).squeeze(-1).numpy()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.trap("packing")
def test_rows_together_equal_rows_alone(family: str, make_model: Callable, make_rows: Callable) -> None:
    folder = make_model(family)
    rows = make_rows()
    for found, row in zip(all_logprobs(folder, rows), rows, strict=True):
        np.testing.assert_allclose(found, plain_logprobs(folder, row, 1.0), atol=1e-5)


@pytest.mark.trap("packing")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gradients_of_rows_together_are_those_of_rows_alone(
    family: str, make_model: Callable, make_rows: Callable
) -> None:
    """Every token weighs something else, the first of each row included, so that no two errors cancel."""
    folder = make_model(family)
    rows = make_rows(9)
    assert min(len(row.response_ids) for row in rows) == 1
    weights = [torch.from_numpy(np.random.default_rng(i).normal(size=len(r.response_ids))) for i, r in enumerate(rows)]
    together = load_causal_model(folder, "cpu")
    alone = load_causal_model(folder, "cpu")
    parts = [(together, rows, torch.cat(weights)), *((alone, [r], w) for r, w in zip(rows, weights, strict=True))]
    for model, part, weight in parts:
        prompts = [row.prompt_ids for row in part]
        responses = [row.response_ids for row in part]
        padded = lay_out_rows(prompts, responses, [0.7] * len(part), model.device)
        (token_logprobs(model, padded, 1024)[0] * weight.float()).sum().backward()
    for ours, expected in zip(together.whole.parameters(), alone.whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.trap("padded_vocabulary")
def test_ids_beyond_the_tokenizer_have_probability_zero(tiny: Path) -> None:
    model = load_causal_model(tiny, "cpu")
    logits = model.logits(model.hidden(torch.tensor([[1, 2, 3]])))
    assert model.whole.config.vocab_size == 64
    assert logits.shape[-1] == model.vocabulary == KNOWN


@pytest.mark.trap("packing")
def test_chunks_change_no_log_prob_and_no_gradient(tiny: Path, make_rows: Callable) -> None:
    rows = make_rows()
    gradients = []
    for chunk in (7, 1024):
        model = load_causal_model(tiny, "cpu")
        padded = lay_out_rows(
            [row.prompt_ids for row in rows], [row.response_ids for row in rows], [0.7] * len(rows), model.device
        )
        token_logprobs(model, padded, chunk)[0].sum().backward()
        gradients.append([p.grad.clone() for p in model.whole.parameters()])
    for small, whole in zip(*gradients, strict=True):
        torch.testing.assert_close(small, whole, rtol=1e-4, atol=1e-5)


def test_no_tensor_of_all_logits_is_kept_for_the_backward_pass(tiny: Path, make_rows: Callable) -> None:
    rows = make_rows(12)
    chunk = 16
    model = load_causal_model(tiny, "cpu")
    padded = lay_out_rows([r.prompt_ids for r in rows], [r.response_ids for r in rows], [1.0] * len(rows), model.device)
    assert len(padded.targets) > 4 * chunk
    kept: list[tuple[int, ...]] = []

    def record(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        token_logprobs(model, padded, chunk)
    assert kept
    assert not [shape for shape in kept if shape[-1:] == (KNOWN,) or shape == (len(padded.targets), 64)]


def test_entropy_is_that_of_the_tempered_distribution(tiny: Path, make_rows: Callable) -> None:
    (row,) = make_rows(1)
    model = load_causal_model(tiny, "cpu")
    padded = lay_out_rows([row.prompt_ids], [row.response_ids], [0.7], model.device)
    ids = torch.tensor(np.concatenate([row.prompt_ids, row.response_ids]))[None]
    with torch.no_grad():
        found = token_logprobs(model, padded, 1024)[1]
        logits = model.whole(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1, :KNOWN]
    expected = torch.distributions.Categorical(logits=logits / 0.7).entropy()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_model_that_scales_its_logits_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

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


# One stale token far from the policy that sampled it is never the whole step, and never skips it.
def gradient_of(algorithm: AlgorithmConfig, log_ratio: float, advantage: float) -> float:
    """Returns the gradient of the log-prob of a single token in the loss."""
    one = np.ones(1, np.int64)
    row = TrainRow(0, 0, 0, 1, one, one, np.full(1, -log_ratio - 1, np.float32), 5 * one, advantage)
    masked = mask_rows([row], 1, 5, 2, "mask", False)
    masked[0].weight = 1.0
    current = torch.tensor([-1.0], requires_grad=True)
    terms = policy_loss_terms(algorithm, 0.0, 1e9, current, torch.zeros(1), micro_batch(masked, torch.device("cpu")))
    (gradient,) = torch.autograd.grad(terms.policy.sum() + terms.kl.sum(), current)
    return float(gradient)


@pytest.mark.parametrize("log_ratio", [1.2, 5.0, 20.0, 60.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_the_default_gradient_of_a_token_is_at_most_three_times_that_of_a_fresh_one(
    log_ratio: float, advantage: float
) -> None:
    assert abs(gradient_of(AlgorithmConfig(), 0.0, advantage)) == pytest.approx(1)
    assert abs(gradient_of(AlgorithmConfig(), log_ratio, advantage)) <= 3
    assert abs(gradient_of(AlgorithmConfig(), np.log(2.9), -1.0)) == pytest.approx(2.9, rel=1e-5), "held from 3 on"


def test_without_the_dual_clip_that_gradient_is_as_large_as_the_ratio() -> None:
    assert gradient_of(AlgorithmConfig(dual_clip=1e9), 19.9, -1.0) == pytest.approx(np.exp(19.9), rel=1e-4)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_other_presets_have_the_objective_of_their_paper(preset: str) -> None:
    assert AlgorithmConfig(preset=preset).dual_clip == (3.0 if preset == "grpo" else None)


@pytest.mark.parametrize(("clip_high", "dual_clip"), [(0.28, 3.0), ("0.28", 3.0), (2.5, None), ("2.5", None)])
def test_the_default_lies_beyond_the_bound_of_the_ratio_however_that_is_written(
    clip_high: float | str, dual_clip: float | None
) -> None:
    assert AlgorithmConfig.model_validate({"clip_high": clip_high}).dual_clip == dual_clip


@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"ppo", "safe_rlhf"}))
@pytest.mark.parametrize("log_ratio", [-200.0, -90.0, 90.0, 200.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_no_objective_overflows(preset: str, log_ratio: float, advantage: float) -> None:
    assert np.isfinite(gradient_of(AlgorithmConfig(preset=preset), log_ratio, advantage))


@pytest.mark.parametrize("preset", ["grpo", "dapo", "sapo"])
def test_a_token_that_was_all_but_impossible_skips_no_step(preset: str, tiny: Path, make_rows: Callable) -> None:
    rows = make_rows(4)
    far = dataclasses.replace(rows[1], logprobs=rows[1].logprobs - 120, advantage=-1.0)
    sections = {"model": {"name": "tiny"}, "task": {"prompts": "none"}, "algorithm": {"preset": preset}}
    outcome = run_step(PolicyTrainer(Config.model_validate(sections), tiny), [rows[0], far, *rows[2:]], 1, 5)
    assert (outcome.updates, outcome.skipped, len(outcome.trained)) == (1, "", 4)
    assert all(np.isfinite(value) for value in outcome.metrics.values())

"""Inverse-CDF sampling: right distribution, right log-probs, nothing impossible drawn."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from asyncrl.engines.generation.torch_engine import BLOCK, WHOLE, Truncation, sample
from asyncrl.errors import WeightsError
from asyncrl.protocols.seeds import draws, member_seed
from tests.unit.engines.generation.conftest import KNOWN, Lab, drain, requests

ROWS = 20_000


def drawn(
    logits: torch.Tensor, temperature: float, rows: int = ROWS, truncation: Truncation = WHOLE
) -> tuple[torch.Tensor, torch.Tensor]:
    seeds = np.array([member_seed(3, row) for row in range(rows)], np.uint64)
    uniforms = torch.from_numpy(draws(seeds, np.zeros(rows, np.uint64)))
    return sample(logits.expand(rows, -1), torch.full((rows,), temperature), uniforms, truncation)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_frequencies_are_those_of_the_tempered_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, -1.0, 0.5, 0.0, 1.0, -3.0])
    tokens, logprobs = drawn(logits, temperature)
    expected = (logits / temperature).softmax(-1)
    counts = torch.bincount(tokens, minlength=6)
    chi_square = ((counts - ROWS * expected) ** 2 / (ROWS * expected)).sum()
    assert chi_square < 22  # 5 degrees of freedom, p about 5e-4
    torch.testing.assert_close(logprobs, expected.log()[tokens], atol=1e-6, rtol=0)


def test_impossible_tokens_are_never_drawn_at_either_end() -> None:
    logits = torch.full((40,), -torch.inf)
    logits[[7, 20]] = torch.tensor([0.0, 1.0])
    ends = torch.tensor([2.0**-49, 1 - 2.0**-49], dtype=torch.float64)
    tokens, logprobs = sample(logits.expand(2, -1), torch.ones(2), ends)
    assert tokens.tolist() == [7, 20]
    assert torch.isfinite(logprobs).all()


def test_small_probabilities_survive_a_large_vocabulary() -> None:
    """Near 1 float32 has steps of 6e-8; here each of 150,000 tokens behind the first has 5.6e-9."""
    logits = torch.full((150_000,), -19.0)
    logits[0] = 0.0
    numbers = 1 - 4e-4 + 1e-8 * torch.arange(100, dtype=torch.float64)
    tokens, _ = sample(logits.expand(100, -1), torch.ones(100), numbers)
    assert len(tokens.unique()) > 98
    assert (tokens > 0).all()


def test_temperature_zero_is_greedy_beside_others() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.9], [0.0, 3.0, 2.9]])
    uniforms = torch.tensor([0.999, 0.999], dtype=torch.float64)
    tokens, logprobs = sample(logits, torch.tensor([0.0, 1.0]), uniforms)
    assert tokens.tolist() == [1, 2]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[[0, 1], [1, 2]], atol=1e-6, rtol=0)


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits = torch.randn(4, 5000).bfloat16()
    tokens, logprobs = sample(logits, torch.full((4,), 0.7), torch.full((4,), 0.4, dtype=torch.float64))
    expected = (logits.float() / 0.7).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("vocabulary", [1, BLOCK, 3 * BLOCK, 5 * BLOCK + 17])
def test_blocks_draw_what_one_cumulated_sum_draws(vocabulary: int) -> None:
    """Also where whole blocks, their first or their last tokens cannot be drawn."""
    torch.manual_seed(0)
    rows = 4000
    logits = 3 * torch.randn(rows, vocabulary)
    logits[torch.rand(rows, vocabulary) < 0.4] = -torch.inf
    logits[: rows // 2, BLOCK : 2 * BLOCK] = -torch.inf
    logits[:, vocabulary // 2] = 0.0
    numbers = torch.rand(rows, dtype=torch.float64).clamp(2.0**-49, 1 - 2.0**-49)
    tokens, logprobs = sample(logits, torch.ones(rows), numbers)
    exact = logits.double().softmax(-1)
    below = (exact.cumsum(-1) - exact).gather(-1, tokens[:, None])[:, 0]
    assert (numbers > below - 1e-6).all()
    assert (numbers < below + exact.gather(-1, tokens[:, None])[:, 0] + 1e-6).all()
    torch.testing.assert_close(logprobs.double(), exact.gather(-1, tokens[:, None])[:, 0].log(), atol=2e-6, rtol=0)


def test_a_number_at_the_seam_of_two_blocks_draws_what_has_mass() -> None:
    """Sums of a block in float32 and in float64 differ: the rest may lie a rounding outside the block."""
    torch.manual_seed(0)
    logits = torch.randn(1, 3 * BLOCK)
    logits[:, BLOCK - 9 : BLOCK + 9] = -torch.inf
    logits[:, -9:] = -torch.inf
    seam = logits.exp().view(3, BLOCK).sum(-1).double().cumsum(0) / logits.exp().view(3, BLOCK).sum(-1).double().sum()
    numbers = (seam[:, None] + 1e-8 * torch.linspace(-20, 20, 4001, dtype=torch.float64)).flatten()
    numbers = numbers.clamp(max=1 - 2.0**-49)
    tokens, logprobs = sample(logits.expand(len(numbers), -1), torch.ones(len(numbers)), numbers)
    assert torch.isfinite(logprobs).all()
    assert set(tokens.tolist()) == {BLOCK - 10, BLOCK + 9, 2 * BLOCK - 1, 2 * BLOCK, 3 * BLOCK - 10}


def plainly_truncated(logits: Sequence[float], temperature: float, bounds: Truncation) -> dict[int, float]:
    """Returns the log-probs of the tokens that may be sampled, by the definitions and one token at a time."""
    weights = {token: math.exp(each / temperature) for token, each in enumerate(logits)}
    largest = max(weights.values())
    left = {token: each for token, each in weights.items() if each >= bounds.min_p * largest}
    if bounds.top_k:
        least = sorted(left.values(), reverse=True)[: bounds.top_k][-1]
        left = {token: each for token, each in left.items() if each >= least}
    total = sum(left.values())
    mass = 0.0
    nucleus = dict[int, float]()
    for token, each in sorted(left.items(), key=lambda entry: (-entry[1], entry[0])):
        if mass >= bounds.top_p * total:
            break
        nucleus[token] = each
        mass += each
    return {token: math.log(each / mass) for token, each in nucleus.items()}


BOUNDS = [
    Truncation(top_p=0.7),
    Truncation(top_p=1e-9),
    Truncation(top_k=1),
    Truncation(top_k=5),
    Truncation(top_k=10**6),
    Truncation(min_p=0.3),
    Truncation(0.8, 6, 0.05),
    Truncation(0.5, 3, 0.4),
]


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("temperature", [0.6, 1.4])
def test_log_probs_are_those_of_the_truncated_distribution(bounds: Truncation, temperature: float) -> None:
    """By a plain reference: the tokens that are drawn are those that may be, as often as they should."""
    logits = torch.randn(60, generator=torch.Generator().manual_seed(5)) * 2
    expected = plainly_truncated(logits.tolist(), temperature, bounds)
    tokens, logprobs = drawn(logits, temperature, truncation=bounds)
    assert set(tokens.tolist()) <= set(expected)
    counts = torch.bincount(tokens, minlength=60)
    for token, logprob in expected.items():
        spread = 5 * math.sqrt(ROWS * math.exp(logprob)) + 1
        assert abs(int(counts[token]) - ROWS * math.exp(logprob)) < spread
    for token, logprob in zip(tokens[:200].tolist(), logprobs[:200].tolist(), strict=True):
        assert logprob == pytest.approx(expected[token], abs=2e-6)


def test_of_equal_tokens_top_k_keeps_all_and_top_p_the_first() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0]])
    assert torch.isfinite(Truncation(top_k=1)(logits)).tolist() == [[False, True, True, True]]
    assert torch.isfinite(Truncation(top_p=0.4)(logits)).tolist() == [[False, True, True, False]]


def test_without_bounds_the_bits_are_those_of_before() -> None:
    logits = torch.randn(8, 3000, generator=torch.Generator().manual_seed(1))
    numbers = torch.linspace(0.01, 0.99, 8, dtype=torch.float64)
    plain = sample(logits, torch.full((8,), 0.7), numbers)
    for bounds in (WHOLE, Truncation(top_k=3000), Truncation(top_p=1.0, min_p=0.0)):
        same = sample(logits, torch.full((8,), 0.7), numbers, bounds)
        assert all(torch.equal(one, other) for one, other in zip(plain, same, strict=True))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_an_error_under_bounds_too(bad: float) -> None:
    logits = torch.zeros(2, 9)
    logits[1, 4] = bad
    for bounds in (WHOLE, *BOUNDS) if bad != torch.inf else (WHOLE,):
        with pytest.raises(WeightsError, match="not finite"):
            sample(logits, torch.ones(2), torch.full((2,), 0.5, dtype=torch.float64), bounds)


@pytest.mark.trap("restricted_sampling")
def test_an_engine_records_log_probs_of_the_tokens_that_may_be_sampled(lab: Lab) -> None:
    cut = {"top_p": 0.8, "top_k": 30, "min_p": 0.02}
    for done in drain(lab.engine(slots=6, **cut), requests(5, temperature=0.7, max_new_tokens=5)).values():
        ids = torch.from_numpy(np.concatenate([done.request.prompt, done.tokens]).astype(np.int64))
        with torch.no_grad():
            logits = lab.model()(ids[None]).logits[0, len(done.request.prompt) - 1 : -1, :KNOWN].tolist()
        expected = [plainly_truncated(each, 0.7, Truncation(**cut)) for each in logits]
        found = [each[token] for each, token in zip(expected, done.tokens.tolist(), strict=True)]
        np.testing.assert_allclose(done.logprobs, found, atol=1e-5, rtol=0)

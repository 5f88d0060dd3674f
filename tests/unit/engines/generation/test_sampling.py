"""Inverse-CDF sampling: right distribution, right log-probs, nothing impossible drawn."""

import numpy as np
import pytest
import torch

from asyncrl.engines.generation.sampling import BLOCK, sample
from asyncrl.errors import WeightsError
from asyncrl.protocols.seeds import draws, member_seed

ROWS = 20_000


def drawn(logits: torch.Tensor, temperature: float, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    seeds = np.array([member_seed(3, row) for row in range(rows)], np.uint64)
    uniforms = torch.from_numpy(draws(seeds, np.zeros(rows, np.uint64)))
    return sample(logits.expand(rows, -1), torch.full((rows,), temperature), uniforms)


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


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    logits = torch.zeros(2, 5)
    logits[1, 3] = bad
    with pytest.raises(WeightsError, match="not finite"):
        sample(logits, torch.ones(2), torch.full((2,), 0.5, dtype=torch.float64))


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

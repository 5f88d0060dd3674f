"""Samples tokens, with their log-probs, from logits and one uniform number per row."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from asyncrl.engines.generation.sampling.truncation import Truncation
from asyncrl.errors import WeightsError

BLOCK = 128  # tokens per block; a cumulative sum over a large vocabulary would take twice the time of the rest
WHOLE = Truncation()  # leaves every token
BELOW = 1 - 2.0**-50  # keeps a number that was rounded up to the sum of a block inside the block


def sample(
    logits: Tensor, temperatures: Tensor, uniforms: Tensor, truncation: Truncation = WHOLE
) -> tuple[Tensor, Tensor]:
    """Samples by inverse CDF: takes the first token whose cumulative probability exceeds the number of the row.

    logits: [rows, vocabulary]; -inf for a token that must not be sampled. temperatures: float32 [rows]; 0 takes the
    likeliest token. uniforms: float64 [rows] in (0, 1). Returns tokens, int64 [rows], and their
    log-softmax(truncation(logits / temperature)), float32 [rows]; temperature 0 counts as 1.

    The cumulative sums are float64, over blocks and then inside one block: float32 would lose the small ones of 150,000
    probabilities. Raises WeightsError when the logits of a row are not finite.
    """
    greedy = temperatures == 0
    scaled = logits.float() / temperatures.masked_fill(greedy, 1.0)[:, None]
    if truncation:
        scaled = truncation(scaled)
    peak = scaled.amax(-1, keepdim=True)
    # pad and view: [rows, vocabulary] -> [rows, blocks, BLOCK]
    blocks = pad((scaled - peak).exp_(), (0, -scaled.shape[-1] % BLOCK)).view(len(scaled), -1, BLOCK)
    sums = blocks.sum(-1).double()
    ends = sums.cumsum(-1)
    total = ends[:, -1:].contiguous()
    if not bool(torch.isfinite(total).all()):
        raise WeightsError("the model's logits are not finite: its weights are damaged or its precision is too small")
    target = uniforms[:, None] * total
    block = torch.searchsorted(ends, target, right=True)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0].cumsum(-1, dtype=torch.float64)
    # Rounding may have moved the rest outside the block; clamped, it never finds a token without mass.
    rest = torch.minimum((target - (ends - sums).gather(1, block)).clamp(min=0), BELOW * inside[:, -1:])
    tokens = block * BLOCK + torch.searchsorted(inside, rest, right=True)
    if bool(greedy.any()):
        tokens = torch.where(greedy[:, None], scaled.argmax(-1, keepdim=True), tokens)
    logprobs = (scaled.gather(-1, tokens) - peak).double() - total.log()
    return tokens[:, 0], logprobs[:, 0].float()

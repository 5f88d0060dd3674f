"""Tokens and their log-probabilities from logits and one uniform number a row."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from asyncrl.errors import WeightsError

BLOCK = 128  # tokens summed at once; cumulating all of a large vocabulary takes twice as long as all else here
BELOW = 1 - 2.0**-50  # keeps a number that was rounded up to a block's whole sum inside the block


def sample(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw by inverse CDF: the first token whose cumulated probability exceeds the row's number.

    Cumulated in float64, by blocks and then inside one: 150,000 probabilities in float32 would lose the small ones.

    Args:
        logits: [rows, vocabulary]; -inf where a token may not be drawn.
        temperatures: float32 [rows]; 0 takes the likeliest token.
        uniforms: float64 [rows] in (0, 1).

    Returns:
        Tokens int64 [rows] and their log-softmax(logits / temperature), float32 [rows] (temperature 1 where it is 0).

    Raises:
        WeightsError: the logits of a row are not finite.
    """
    greedy = temperatures == 0
    scaled = logits.float() / temperatures.masked_fill(greedy, 1.0)[:, None]
    peak = scaled.amax(-1, keepdim=True)
    blocks = _blocks((scaled - peak).exp_())
    sums = blocks.sum(-1).double()
    ends = sums.cumsum(-1)
    total = ends[:, -1:].contiguous()
    if not bool(torch.isfinite(total).all()):
        raise WeightsError("the model's logits are not finite: its weights are damaged or its precision is too small")
    target = uniforms[:, None] * total
    block = torch.searchsorted(ends, target, right=True)
    tokens = block * BLOCK + _inside(blocks, block, target - (ends - sums).gather(1, block))
    if bool(greedy.any()):
        tokens = torch.where(greedy[:, None], scaled.argmax(-1, keepdim=True), tokens)
    logprobs = (scaled.gather(-1, tokens) - peak).double() - total.log()
    return tokens[:, 0], logprobs[:, 0].float()


def _blocks(mass: Tensor) -> Tensor:
    """[rows, vocabulary] -> [rows, blocks, BLOCK], filled up with zeros."""
    missing = -mass.shape[-1] % BLOCK
    return (pad(mass, (0, missing)) if missing else mass).view(len(mass), -1, BLOCK)


def _inside(blocks: Tensor, block: Tensor, rest: Tensor) -> Tensor:
    """The first token of each row's block whose cumulated mass exceeds `rest`; all but blocks [rows, 1]. A rest that
    rounding put outside is moved in: a token without mass is never the first."""
    ends = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0].cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(ends, torch.minimum(rest.clamp(min=0), BELOW * ends[:, -1:]), right=True)

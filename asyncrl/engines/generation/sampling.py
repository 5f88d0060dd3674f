"""Tokens and their log-probabilities from logits and one uniform number a row."""

import torch
from torch import Tensor

from asyncrl.errors import WeightsError


def sample(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw by inverse CDF: the first token whose cumulated probability exceeds the row's number.

    Cumulated in float64: 150,000 probabilities in float32 would lose the small ones.

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
    mass = (scaled - peak).exp_().cumsum(-1, dtype=torch.float64)
    total = mass[:, -1:].contiguous()
    if not bool(torch.isfinite(total).all()):
        raise WeightsError("the model's logits are not finite: its weights are damaged or its precision is too small")
    tokens = torch.searchsorted(mass, uniforms[:, None] * total, right=True)
    if bool(greedy.any()):
        tokens = torch.where(greedy[:, None], scaled.argmax(-1, keepdim=True), tokens)
    logprobs = (scaled.gather(-1, tokens) - peak).double() - total.log()
    return tokens[:, 0], logprobs[:, 0].float()

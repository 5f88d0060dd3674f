"""What one token counts in the loss of an optimizer step."""

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "constant"]


def row_weights(aggregation: Aggregation, lengths: Tensor, tokens: int, samples: int, divisor: int) -> Tensor:
    """Weight of each token of each row: the loss of an optimizer step is the plain sum of weight x term over its live
    tokens, on all ranks and in all micro-batches.

    token_mean: 1 / tokens (DAPO, arXiv 2503.14476, section 3.3). sequence_mean_token_sum: 1 / samples, the sum over a
    whole answer as in REINFORCE (RLOO, arXiv 2402.14740). sequence_mean_token_mean: 1 / (samples x length),
    GRPO's original average (arXiv 2402.03300, eq. 3). constant: 1 / (samples x divisor), Dr.GRPO (arXiv 2503.20783,
    section 3.2).
    lengths: response tokens of each row [rows], masked ones included, so that masking a token removes its
    term and never changes the weight of another. tokens, samples: of the whole step. Returns float32 [rows].
    """
    if aggregation == "sequence_mean_token_mean":
        return 1.0 / (samples * lengths.to(torch.float32))
    weight = {
        "token_mean": 1.0 / tokens,
        "sequence_mean_token_sum": 1.0 / samples,
        "constant": 1.0 / (samples * divisor),
    }[aggregation]
    return torch.full(lengths.shape, weight, device=lengths.device)

"""Aggregation of the loss: the weight of each token in the loss of an optimizer step."""

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "constant"]


def row_weights(aggregation: Aggregation, lengths: Tensor, tokens: int, samples: int, divisor: int) -> Tensor:
    """Returns the weight of every token of each row, float32 [rows].

    The loss of an optimizer step is the sum of weight x loss term over the live tokens of all micro-batches and ranks.

    - token_mean: 1 / tokens (DAPO, arXiv 2503.14476, section 3.3).
    - sequence_mean_token_sum: 1 / samples, a sum over the answer as in REINFORCE (RLOO, arXiv 2402.14740).
    - sequence_mean_token_mean: 1 / (samples x length), the average of GRPO (arXiv 2402.03300, eq. 3).
    - constant: 1 / (samples x divisor), Dr. GRPO (arXiv 2503.20783, section 3.2).

    lengths: [rows] response tokens of each row. Masked tokens count, so that masking a token removes its loss term and
    changes no other weight. tokens, samples: of the whole optimizer step.
    """
    if aggregation == "sequence_mean_token_mean":
        return 1.0 / (samples * lengths.to(torch.float32))
    weight = {
        "token_mean": 1.0 / tokens,
        "sequence_mean_token_sum": 1.0 / samples,
        "constant": 1.0 / (samples * divisor),
    }[aggregation]
    return torch.full(lengths.shape, weight, device=lengths.device)

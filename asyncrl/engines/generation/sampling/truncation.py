"""Truncates the distribution that tokens are sampled from: min-p, then top-k, then top-p, as vLLM does."""

from dataclasses import dataclass

import torch
from torch import Tensor

NEVER = -torch.inf
"""Logit of a token that cannot be sampled."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """Bounds of the tokens that may be sampled. top_p: smallest mass of the likeliest tokens (nucleus sampling, arXiv
    1904.09751); 1: all. top_k: number of the likeliest tokens; 0: all. min_p: least probability, as a share of the
    largest one (arXiv 2407.01082); 0: all."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __bool__(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def __call__(self, logits: Tensor) -> Tensor:
        """Returns logits [rows, vocabulary] with -inf for what is cut off; at least the likeliest token stays. Each
        bound counts in what the one before left. Of equal tokens at a bound, top-k and min-p keep all, and top-p those
        with smaller ids."""
        if self.min_p:
            probabilities = logits.softmax(-1)
            logits = logits.masked_fill(probabilities < self.min_p * probabilities.amax(-1, keepdim=True), NEVER)
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, -1).values[:, -1:]
            logits = logits.masked_fill(logits < least, NEVER)
        return self._nucleus(logits) if self.top_p < 1 else logits

    def _nucleus(self, logits: Tensor) -> Tensor:
        """Cuts off each token before which likelier ones have the mass `top_p` already. float64 sums of float32
        probabilities, as in sampling."""
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(-1).double()
        before = probabilities.cumsum(-1) - probabilities
        ordered = ordered.masked_fill(before >= self.top_p, NEVER)
        return torch.empty_like(logits).scatter_(-1, order, ordered)

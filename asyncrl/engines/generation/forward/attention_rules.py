"""Windows, soft caps and sinks: the rules of some families for attention scores beside the causal mask."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Holds the rule of one layer. window: a token sees so many positions, itself among them; None: all before it.
    cap: scores s become cap x tanh(s / cap) (Gemma 2, arXiv 2408.00118). sinks: [heads], a further score of each head
    that takes a share of the attention and has no value (gpt-oss, arXiv 2508.10925)."""

    window: int | None = None
    cap: float | None = None
    sinks: Tensor | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any], limit: int) -> "AttentionRule":
        """Reads what a layer of transformers gives its attention function. limit: positions of the longest sequence,
        none of which a larger window hides."""
        window, cap, sinks = (settings.get(name) for name in ("sliding_window", "softcap", "s_aux"))
        if window is not None and window >= limit:
            window = None
        return PLAIN if window is None and cap is None and sinks is None else cls(window, cap, sinks)

    def capped(self, scores: Tensor, unit: float = 1.0) -> Tensor:
        """Applies the soft cap to scores that were multiplied with `unit`, in place."""
        if self.cap is None:
            return scores
        return scores.div_(self.cap * unit).tanh_().mul_(self.cap * unit)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
        """Computes attention: query [..., heads, tokens, size], key and value [..., heads, positions, size] -> as the
        query. mask: 0 where a token sees a position, within its window too, else -inf, [..., tokens, positions]."""
        if self.cap is None and self.sinks is None:
            return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = self.capped((query.float() * scale) @ key.float().transpose(-1, -2)) + mask
        if self.sinks is not None:
            heads, tokens = scores.shape[-3:-1]
            # Heads that share keys may be one head of several times the tokens.
            sinks = self.sinks.float().view(heads, -1, 1).expand(heads, -1, tokens * heads // len(self.sinks))
            sink = sinks.reshape(heads, tokens, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sink), -1)
        weights = scores.softmax(-1)[..., : key.shape[-2]]
        return (weights @ value.float()).to(query.dtype)


PLAIN = AttentionRule()

"""Attention between ranks that each compute a slice of the tokens of the same rows.

    layer        tokens 0:8, all heads          tokens 8:16, all heads
                        └────── all-to-all of queries, keys, values ──────┘
    attention    all tokens, heads 0:2          all tokens, heads 2:4
                        └────── all-to-all of the output ─────────────────┘
    layer        tokens 0:8, all heads          tokens 8:16, all heads

So no rank keeps more than its share of activations. Source: DeepSpeed-Ulysses (arXiv 2309.14509). Both exchanges are
made in the other direction in the backward pass, so that all ranks run the same passes in the same order.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from asyncrl.engines.rank_limits import refusal_of_slicing
from asyncrl.engines.training.ranks.rank_group import Ranks
from asyncrl.errors import ConfigError

NAME = "asyncrl_sequence_parallel"
SEQUENCE = "sequence_ranks"
"""Keyword of a model's forward pass for the ranks that have the other slices; without it a rank attends alone."""


def attend_in_slices(whole: Any, size: int) -> None:
    """Lets a transformers model attend with other ranks where its forward pass is given them. Raises ConfigError for
    attention that is not plain and causal, or whose heads cannot be shared out."""
    if refusal := refusal_of_slicing(whole.config.to_dict(), size):
        raise ConfigError(f"training.layout: {refusal}")
    whole.set_attn_implementation(NAME)


def sequence_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Computes attention for transformers. query [rows, heads, own tokens, size], key and value [rows, kv heads, own
    tokens, size] -> [rows, own tokens, heads, size]."""
    ranks: Ranks | None = settings.pop(SEQUENCE, None)
    if ranks is None:
        alone: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, **settings)[0]
        return alone, None
    given = [_parts(each.to(value.dtype), ranks) for each in (query, key, value)]
    found = _to_each(torch.cat(given, 2), ranks).permute(1, 2, 0, 3, 4).flatten(2, 3)
    own = torch.split(found, [each.shape[2] for each in given], 1)
    output: Tensor = sdpa_attention_forward(module, *own, None, **settings)[0]
    return _to_each(_parts(output, ranks), ranks).permute(1, 2, 0, 3, 4).flatten(2, 3), None


def joined(found: Sequence[Tensor], chosen: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Returns log-probs and entropies of all tokens from those that each rank computed of its own, with the same bits
    on all ranks. chosen: which tokens are this rank's. All ranks compute one loss of them, of which each takes the
    gradient of its own tokens."""
    logprobs, entropy = _Join.apply(torch.stack([*found], 1), chosen, ranks).unbind(1)  # type: ignore[no-untyped-call]
    return logprobs, entropy


def _parts(values: Tensor, ranks: Ranks) -> Tensor:
    """Returns the tensor [rows, heads or tokens, ...] cut into the parts of the ranks, [ranks, rows, ...]."""
    return values.reshape(len(values), ranks.size, -1, *values.shape[2:]).movedim(1, 0)


def _to_each(parts: Tensor, ranks: Ranks) -> Tensor:
    exchanged: Tensor = _Exchanged.apply(parts, ranks)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchanged(torch.autograd.Function):
    """Gives part i to rank i, and the gradient of each part back to the rank that it came from."""

    @staticmethod
    def forward(context: Any, parts: Tensor, ranks: Ranks) -> Tensor:
        context.ranks = ranks
        return ranks.to_each(parts)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return context.ranks.to_each(gradients[0]), None


class _Join(torch.autograd.Function):
    """Puts the values [own tokens, 2] of all ranks together."""

    @staticmethod
    def forward(context: Any, own: Tensor, chosen: Tensor, ranks: Ranks) -> Tensor:
        context.save_for_backward(chosen)
        whole = own.new_zeros((len(chosen), own.shape[1]))
        whole[chosen] = own
        return ranks.sum(whole)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (chosen,) = context.saved_tensors
        return gradients[0][chosen], None, None


AttentionInterface.register(NAME, sequence_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)

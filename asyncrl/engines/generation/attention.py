"""Attention over a flat row of tokens: one of each decoding sequence, then whole sequences.

    tokens      d0 d1 d2 | a0 a1 a2 a3 b0 b1        d: one new token of the sequences in slots 0, 1, 2
    slots        0  1  2 |  3  3  3  3  4  4        a, b: sequences whose keys are not cached yet

Registered with transformers under a name, so that models stay as they are; positions and masks are ours.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from asyncrl.engines.generation.cache import KVCache
from asyncrl.errors import ConfigError

NAME = "asyncrl_flat"


@dataclass(frozen=True, slots=True)
class Padding:
    """How whole sequences lie in the flat row. index: int64 [sequences, longest], a token of the flat row each;
    real: bool of the same shape, False behind a sequence's end."""

    index: Tensor
    real: Tensor

    @classmethod
    def of(cls, lengths: list[int], start: int, device: torch.device) -> "Padding":
        """Sequences of these lengths, one behind the other from token `start` on."""
        sizes = torch.tensor(lengths)
        offsets = start + sizes.cumsum(0) - sizes
        steps = torch.arange(max(lengths))
        index = offsets[:, None] + torch.minimum(steps, sizes[:, None] - 1)
        return cls(index.to(device), (steps < sizes[:, None]).to(device))


@dataclass(frozen=True, slots=True)
class FlatTokens:
    """What attention needs to know of one forward.

    rows, positions: int64 [tokens], slot and position of each token. decoding: how many tokens at the front are single
    ones; token i of those belongs to slot i. mask: [decoding, 1, 1, cached positions], 0 or -inf. whole: the others.
    """

    cache: KVCache
    rows: Tensor
    positions: Tensor
    decoding: int
    mask: Tensor | None
    whole: Padding | None


def flat_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    flat: FlatTokens | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, tokens, size], key and value [1, kv heads, tokens, size] -> [1, tokens, heads, size].

    Raises:
        ConfigError: the layer asks for attention that is not plain causal, or the model kept `flat` to itself.
    """
    _refuse_unknown(module, settings, flat)
    assert flat is not None
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    return attend(layer, query, key, value, flat, scaling)[None], None


def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, flat: FlatTokens, scaling: float | None) -> Tensor:
    """query [tokens, heads, size], key and value [tokens, kv heads, size] -> [tokens, heads, size]."""
    keys, values = flat.cache.write(layer, flat.rows, flat.positions, key, value)
    parts = []
    if flat.decoding:
        parts.append(_one_token_each(query[: flat.decoding], keys, values, flat, scaling))
    if flat.whole is not None:
        parts.append(_whole_sequences(query, key, value, flat.whole, scaling))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _one_token_each(query: Tensor, keys: Tensor, values: Tensor, flat: FlatTokens, scaling: float | None) -> Tensor:
    """query [rows, heads, size] against the cache, the heads that share keys as one query of several tokens."""
    assert flat.mask is not None
    rows, heads, size = query.shape
    length = flat.mask.shape[-1]
    grouped = query.reshape(rows, keys.shape[1], heads // keys.shape[1], size)
    cached = keys[:rows, :, :length], values[:rows, :, :length]
    mixed = scaled_dot_product_attention(grouped, *cached, attn_mask=flat.mask, scale=scaling)
    return mixed.reshape(rows, heads, values.shape[-1])


def _whole_sequences(query: Tensor, key: Tensor, value: Tensor, whole: Padding, scaling: float | None) -> Tensor:
    """Causal attention inside each sequence; padding stands behind, where no real token looks."""
    group = query.shape[1] // key.shape[1]
    padded = [tokens[whole.index].transpose(1, 2) for tokens in (query, key, value)]
    queries, keys, values = padded[0], *(tokens.repeat_interleave(group, dim=1) for tokens in padded[1:])
    mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling)
    return mixed.transpose(1, 2)[whole.real]


def _refuse_unknown(module: nn.Module, settings: dict[str, Any], flat: FlatTokens | None) -> None:
    if flat is None:
        raise ConfigError(f"{type(module).__name__} does not pass keyword arguments on to its attention function")
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if settings.get(name) is not None:
            raise ConfigError(f"{type(module).__name__} uses {name}; this engine does plain causal attention only")
    if not getattr(module, "is_causal", True):
        raise ConfigError(f"{type(module).__name__} is not causal")


AttentionInterface.register(NAME, flat_attention)

"""Attention over a flat row of tokens: one of each decoding sequence, then whole sequences.

    tokens      d0 d1 d2 | a0 a1 a2 a3 b0 b1        d: one new token of the sequences in slots 0, 1, 2
    slots        0  1  2 |  3  3  3  3  4  4        a, b: sequences whose keys are not cached yet

A single token attends to each chunk of its sequence by itself; the sums of the chunks are put together per sequence.
Products of all chunks are one call, and no position is computed that only a longer neighbour has.

Registered with transformers under a name, so that models stay as they are; positions and masks are ours.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, scaled_dot_product_attention
from transformers import AttentionInterface

from asyncrl.engines.generation.cache import CHUNK, Ints, KVCache
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
class Chunks:
    """The chunks at the front of the cache, and whose they are. Some may be nobody's, or of sequences that do not
    decode: they are computed along with row 0 and all masked, so that the others need not be picked out.

    rows: int64 [chunks], the row whose query a chunk meets. mask: float32 [chunks, 1, CHUNK], 0 or -inf.
    order: int64, the chunks of row 0, then those of row 1, and so on; starts: int64 [rows], where each row's begin.
    """

    rows: Tensor
    mask: Tensor
    order: Tensor
    starts: Tensor

    @classmethod
    def of(cls, cache: KVCache, positions: Ints, device: torch.device) -> "Chunks":
        """Row i sees positions 0 to positions[i] of slot i."""
        total = cache.pack()
        order, counts = cache.owned(positions)
        starts = counts.cumsum() - counts
        owners = np.repeat(np.arange(len(counts)), counts)
        seen, rows = np.zeros(total, np.int64), np.zeros(total, np.int64)
        seen[order] = positions[owners] + 1 - CHUNK * (np.arange(len(order)) - starts[owners])
        rows[order] = owners
        mask = np.where(np.arange(CHUNK) < seen[:, None, None], np.float32(0), np.float32(-np.inf))
        return cls(*(torch.from_numpy(each).to(device) for each in (rows, mask, order, starts)))


@dataclass(frozen=True, slots=True)
class FlatTokens:
    """What attention needs to know of one forward.

    places: chunk and offset of each token in the cache, int64 [tokens] both. positions: int64 [tokens]. decoding: how
    many tokens at the front are single ones; token i of those belongs to slot i. chunks: theirs. whole: the others.
    """

    cache: KVCache
    places: tuple[Tensor, Tensor]
    positions: Tensor
    decoding: int
    chunks: Chunks | None
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
    keys, values = flat.cache.write(layer, flat.places, key, value)
    parts = []
    if flat.chunks is not None:
        parts.append(_one_token_each(query[: flat.decoding], keys, values, flat.chunks, scaling))
    if flat.whole is not None:
        parts.append(_whole_sequences(query, key, value, flat.whole, scaling))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _one_token_each(query: Tensor, keys: Tensor, values: Tensor, chunks: Chunks, scaling: float | None) -> Tensor:
    """query [rows, heads, size] against the cache, in float32; heads that share keys are one query of several tokens.

    With s the scores of a row and m their largest: the chunks' sums of exp(s - m) v, over those of exp(s - m).
    """
    rows, heads, size = query.shape
    count, kv_heads = len(chunks.rows), keys.shape[1]
    scaled = (query.float() * (size**-0.5 if scaling is None else scaling)).flatten(1)
    queries = scaled.index_select(0, chunks.rows).view(count * kv_heads, -1, size)
    scores = torch.bmm(queries, keys[:count].float().flatten(0, 1).transpose(1, 2)).view(count, heads, CHUNK)
    scores += chunks.mask
    peaks = scaled.new_full((rows, heads), -torch.inf)
    peaks.scatter_reduce_(0, chunks.rows[:, None].expand(-1, heads), scores.amax(-1), "amax")
    weights = scores.sub_(peaks.index_select(0, chunks.rows)[:, :, None]).exp_()
    mixed = torch.bmm(weights.view(*queries.shape[:2], CHUNK), values[:count].float().flatten(0, 1))
    sums = embedding_bag(chunks.order, mixed.view(count, -1), chunks.starts, mode="sum").view(rows, heads, -1)
    totals = embedding_bag(chunks.order, weights.sum(-1), chunks.starts, mode="sum")
    return sums.div_(totals[:, :, None]).to(query.dtype)


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

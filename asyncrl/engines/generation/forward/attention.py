"""Attention over a flat row of tokens: first one token of each decoding sequence, then sequences in prefill.

    tokens      d0 d1 d2 | a0 a1 a2 a3 b0 b1 | c7 c8    d: one new token of the sequences in slots 0, 1, 2
    slots        0  1  2 |  3  3  3  3  4  4 |  5  5    a, b: sequences whose keys are not cached yet
                                                        c: one that goes on, with the keys of c0 to c6 in the cache

A decoding token attends to each KV block of its sequence separately; the partial sums are then combined per sequence.
One batched product covers all blocks, and short sequences compute nothing for positions that only a longer one has.

The function is registered with transformers under a name, so that models need no change.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface

from asyncrl.engines.generation.forward.kv_cache import KV_BLOCK, Ints, KVCache
from asyncrl.errors import ConfigError

NAME = "asyncrl_flat"


@dataclass(frozen=True, slots=True)
class DecodeBlocks:
    """Describes the leading KV blocks of the cache for decode attention.

    Blocks that no decoding sequence owns are computed with the query of row 0 and fully masked, which is cheaper than
    selecting the others. rows: int64 [blocks], the row whose query a block meets. mask: float32 [blocks, 1, KV_BLOCK],
    0 or -inf. order: int64, the blocks of row 0, then those of row 1, and so on. starts: int64 [rows], the first entry
    of each row.
    """

    rows: Tensor
    mask: Tensor
    order: Tensor
    starts: Tensor

    @classmethod
    def of(cls, cache: KVCache, positions: Ints, device: torch.device) -> "DecodeBlocks":
        """Builds the description for rows i that see positions 0 to positions[i] of slot i."""
        total = cache.compact()
        order, counts = cache.blocks_up_to(positions)
        starts = counts.cumsum() - counts
        owners = np.repeat(np.arange(len(counts)), counts)
        seen, rows = np.zeros(total, np.int64), np.zeros(total, np.int64)
        seen[order] = positions[owners] + 1 - KV_BLOCK * (np.arange(len(order)) - starts[owners])
        rows[order] = owners
        mask = np.where(np.arange(KV_BLOCK) < seen[:, None, None], np.float32(0), np.float32(-np.inf))
        return cls(*(torch.from_numpy(each).to(device) for each in (rows, mask, order, starts)))


@dataclass(frozen=True, slots=True)
class CachedBeginnings:
    """Describes sequences that go on: several new tokens each, after keys that are cached.

    lengths: new tokens of each. blocks: int64 [sequences, blocks], those of each sequence, and then any. mask:
    [sequences, 1, tokens, positions], 0 where a new token sees a position, else -inf, in the dtype of the model.
    """

    lengths: list[int]
    blocks: Tensor
    mask: Tensor

    @classmethod
    def of(cls, cache: KVCache, held: dict[int, int], lengths: list[int], like: Tensor) -> "CachedBeginnings":
        """Builds the description. held: cached positions by slot. like: a tensor of the model."""
        ends = [first + length for first, length in zip(held.values(), lengths, strict=True)]
        blocks = cache.first_blocks(list(held), max(ends))
        newest = np.array(list(held.values()))[:, None] + np.arange(max(lengths))
        seen = np.arange(blocks.shape[1] * KV_BLOCK) <= newest[:, None, :, None]
        mask = torch.zeros(seen.shape, dtype=like.dtype).masked_fill_(torch.from_numpy(~seen), -torch.inf)
        return cls(lengths, torch.from_numpy(blocks).to(like.device), mask.to(like.device))


@dataclass(frozen=True, slots=True)
class FlatTokens:
    """Holds what attention needs to know of one forward: tokens that decode, then sequences in prefill.

    locations: block and offset of each token in the cache, two int64 [tokens]. positions: int64 [tokens]. blocks: the
    KV blocks of the tokens that decode; token i of those belongs to slot i. lengths: of each sequence in prefill.
    beginnings: of sequences behind those, whose first keys are cached.
    """

    cache: KVCache
    locations: tuple[Tensor, Tensor]
    positions: Tensor
    blocks: DecodeBlocks | None
    lengths: list[int]
    beginnings: CachedBeginnings | None = None


def flat_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Computes attention for transformers, with `flat` (FlatTokens) and `scaling` among the settings.

    query [1, heads, tokens, size], key and value [1, kv heads, tokens, size] -> [1, tokens, heads, size].

    Raises:
        ConfigError: the layer asks for attention that is not plain and causal, or the model did not pass on `flat`.
    """
    flat: FlatTokens | None = settings.get("flat")
    if flat is None:
        raise ConfigError(f"{type(module).__name__} does not pass keyword arguments on to its attention function")
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if settings.get(name) is not None:
            raise ConfigError(f"{type(module).__name__} uses {name}; this engine does plain causal attention only")
    if not getattr(module, "is_causal", True):
        raise ConfigError(f"{type(module).__name__} is not causal")
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    layer: Any = module.layer_idx
    return attend(layer, query, key, value, flat, settings.get("scaling"))[None], None


def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, flat: FlatTokens, scaling: float | None) -> Tensor:
    """Computes attention: query [tokens, heads, size], key and value [tokens, kv heads, size] -> as the query."""
    keys, values = flat.cache.write(layer, flat.locations, key, value)
    end = len(query) - (0 if flat.beginnings is None else sum(flat.beginnings.lengths))
    parts, first = [], end - sum(flat.lengths)
    if flat.blocks is not None:
        parts.append(_decode_attention(query[:first], keys, values, flat.blocks, scaling))
    if flat.lengths:
        parts.append(_prefill_attention(query[first:end], key[first:end], value[first:end], flat.lengths, scaling))
    if flat.beginnings is not None:
        parts.append(_later_attention(query[end:], keys, values, flat.beginnings, scaling))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _decode_attention(
    query: Tensor, keys: Tensor, values: Tensor, blocks: DecodeBlocks, scaling: float | None
) -> Tensor:
    """Computes the attention of query [rows, heads, size] to the cache, in float32.

    Heads that share keys are one query of several tokens. With s the scores of a row and m their maximum, the result is
    the sum over blocks of exp(s - m) v, divided by the sum over blocks of exp(s - m).
    """
    rows, heads, size = query.shape
    count, kv_heads = len(blocks.rows), keys.shape[1]
    scaled = (query.float() * (size**-0.5 if scaling is None else scaling)).flatten(1)
    queries = scaled.index_select(0, blocks.rows).view(count * kv_heads, -1, size)
    scores = torch.bmm(queries, keys[:count].float().flatten(0, 1).transpose(1, 2)).view(count, heads, KV_BLOCK)
    scores += blocks.mask
    peaks = scaled.new_full((rows, heads), -torch.inf)
    peaks.scatter_reduce_(0, blocks.rows[:, None].expand(-1, heads), scores.amax(-1), "amax")
    weights = scores.sub_(peaks.index_select(0, blocks.rows)[:, :, None]).exp_()
    mixed = torch.bmm(weights.view(*queries.shape[:2], KV_BLOCK), values[:count].float().flatten(0, 1))
    sums = embedding_bag(blocks.order, mixed.view(count, -1), blocks.starts, mode="sum").view(rows, heads, -1)
    totals = embedding_bag(blocks.order, weights.sum(-1), blocks.starts, mode="sum")
    return sums.div_(totals[:, :, None]).to(query.dtype)


def _prefill_attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scaling: float | None) -> Tensor:
    # Padding follows the real tokens of each sequence, which do not see it, because attention is causal.
    padded = [
        pad_sequence(list(torch.split(each, lengths)), batch_first=True).transpose(1, 2) for each in (query, key, value)
    ]
    queries, keys, values = (
        padded[0],
        *(each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in padded[1:]),
    )
    mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling).transpose(1, 2)
    return torch.cat([sequence[:length] for sequence, length in zip(mixed, lengths, strict=True)])


def _later_attention(
    query: Tensor, keys: Tensor, values: Tensor, beginnings: CachedBeginnings, scaling: float | None
) -> Tensor:
    """Computes the attention of the new tokens of sequences that go on to all their keys, which the cache has."""
    queries = pad_sequence(list(torch.split(query, beginnings.lengths)), batch_first=True).transpose(1, 2)
    # [sequences, blocks, kv heads, KV_BLOCK, size] -> [sequences, heads, positions, size]
    every_key, every_value = (
        each[beginnings.blocks].transpose(1, 2).flatten(2, 3).repeat_interleave(query.shape[1] // each.shape[1], 1)
        for each in (keys, values)
    )
    mask = beginnings.mask
    mixed = scaled_dot_product_attention(queries, every_key, every_value, attn_mask=mask, scale=scaling).transpose(1, 2)
    return torch.cat([sequence[:length] for sequence, length in zip(mixed, beginnings.lengths, strict=True)])


AttentionInterface.register(NAME, flat_attention)

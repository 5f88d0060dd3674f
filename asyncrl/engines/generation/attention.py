"""Attention over a flat row of tokens: first one token of each decoding sequence, then sequences in prefill.

    tokens      d0 d1 d2 | a0 a1 a2 a3 b0 b1 | c7 c8    d: one new token of the sequences in slots 0, 1, 2
    slots        0  1  2 |  3  3  3  3  4  4 |  5  5    a, b: sequences whose keys are not cached yet
                                                        c: one that goes on, with the keys of c0 to c6 in the cache

A decoding token attends to each KV block of its sequence separately; the partial sums are then combined per sequence.
One batched product covers all blocks, and short sequences compute nothing for positions that only a longer one has.
Blocks that several sequences share are read once for all of them, in a second product.

The function is registered with transformers under a name, so that models need no change.
"""

import math
import mmap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface

from asyncrl.engines.generation.block_pool import KV_BLOCK, BlockTables, Ints, blocks_for
from asyncrl.errors import ConfigError

# The memory of the paged KV cache: keys and values of all layers in blocks of positions, in the model's precision.
#
# Which sequence owns which block is decided by `block_pool.py`. All memory is reserved at the first write
# and never moved or doubled. On CPUs the system provides a page when a block is first written, so the cache takes
# what the blocks in `BlockPool.touched` need.


class KVCache:
    """Holds per layer keys [blocks, kv heads, head size, KV_BLOCK], values [blocks, kv heads, KV_BLOCK, head size], the
    experts of each position where they are recorded, and the tables of who owns the blocks. Decode attention multiplies
    by keys in this order in half the time.

    Memory is zero at first, because attention multiplies masked positions by 0, and 0 times an uninitialised NaN is
    NaN.

    Args:
        limit: positions of the longest sequence.
        blocks: of all sequences together; None has room for the longest one in every slot.
        fixed: every slot owns blocks for `limit` positions from the start, so that shapes never change.
    """

    def __init__(
        self,
        slots: int,
        limit: int,
        *,
        blocks: int | None = None,
        fixed: bool = False,
    ) -> None:
        self.limit = limit
        self._experts: list[Tensor] = []  # At most one, [blocks, KV_BLOCK, numbers of a token].
        most = blocks_for(limit)
        self.tables = BlockTables(slots, most, slots * most if blocks is None else blocks, fixed=fixed)
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._by_location: list[tuple[Tensor, Tensor]] = []  # views [blocks, KV_BLOCK, kv heads, head size]

    @property
    def used(self) -> float:
        """Returns the share of the blocks that are in use."""
        return 1.0 - self.tables.pool.room / len(self.tables.pool)

    @property
    def bytes(self) -> int:
        """Returns the bytes of all blocks that were ever used."""
        each = sum(tensor[0].nbytes for tensor in self._all()) if self._layers else 0
        return self.tables.pool.touched * each

    def free_memory(self) -> None:
        """Frees all memory until the next write, and forgets what was written."""
        self._layers.clear()
        self._experts.clear()
        self._by_location.clear()

    def locations(self, slots: Ints, positions: Ints) -> tuple[Ints, Ints]:
        """Returns block and offset of these positions."""
        return self.tables.owned[slots, positions // KV_BLOCK], positions % KV_BLOCK

    def copy_block(self, source: int, slots: list[int], index: int) -> None:
        """Copies a block to the block `index` of these slots."""
        self._copy(np.full(len(slots), source), self.tables.owned[slots, index])

    def copy(self, source: int, slots: list[int], length: int) -> None:
        """Copies the first `length` positions of one slot to other slots."""
        count = blocks_for(length)
        for slot in slots:
            self.tables.allocate(slot, length)
        self._copy(np.tile(self.tables.owned[source, :count], len(slots)), self.tables.owned[slots, :count].ravel())

    def compact(self, slots: Ints) -> int:
        """Moves blocks of these slots to the front if they are scattered; returns how many leading blocks have them."""
        count, holes, strays = self.tables.compact(slots)
        if len(holes):
            self._copy(np.concatenate([strays, holes]), np.concatenate([holes, strays]))
        return count

    def write(
        self, layer: int, locations: tuple[Tensor, Tensor], keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Stores keys and values [tokens, kv heads, head size] at these blocks and offsets, int64 [tokens] each.

        Returns the keys and values of the whole layer.
        """
        if layer == len(self._layers):
            blocks_and_heads = (len(self.tables.pool), keys.shape[1])
            size = keys.shape[2]
            shapes = (*blocks_and_heads, size, KV_BLOCK), (*blocks_and_heads, KV_BLOCK, size)
            cached_keys = _reserve(shapes[0], keys)
            cached_values = _reserve(shapes[1], values)
            self._layers.append((cached_keys, cached_values))
            self._by_location.append((cached_keys.permute(0, 3, 1, 2), cached_values.transpose(1, 2)))
        for by_location, new in zip(self._by_location[layer], (keys, values), strict=True):
            by_location.index_put_(locations, new)
        return self._layers[layer]

    def remember(self, locations: tuple[Tensor, Tensor], experts: Tensor) -> None:
        """Stores the experts [tokens, numbers of a token] of what stands at these blocks and offsets."""
        if not self._experts:
            self._experts.append(experts.new_zeros((len(self.tables.pool), KV_BLOCK, experts.shape[1])))
        self._experts[0].index_put_(locations, experts)

    def recall(self, slots: Ints, positions: Ints) -> NDArray[Any]:
        """Returns the experts of these positions."""
        blocks, offsets = (
            torch.from_numpy(each).to(self._experts[0].device) for each in self.locations(slots, positions)
        )
        found: NDArray[Any] = self._experts[0][blocks, offsets].cpu().numpy()
        return found

    def _all(self) -> Iterator[Tensor]:
        return chain(chain.from_iterable(self._layers), self._experts)

    def _copy(self, sources: Ints, targets: Ints) -> None:
        for cached in self._all():
            cached[targets] = cached[sources]


def _reserve(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Returns zeros. On CPUs their pages are provided at the first write, and are small: huge ones would add up to
    2 MiB for the keys and for the values of each layer, and gain nothing."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    size = int(np.prod(shape)) * like.element_size()
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # A kernel without huge pages refuses it.
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=like.dtype).view(shape)


# Windows, soft caps and sinks: the rules of some families for attention scores beside the causal mask.


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

NAME = "asyncrl_flat"
SHARERS = 8  # rows that one product of a shared block computes at most; with fewer, the rest is padding
TILE_NUMBERS = (2**26, 2**20)
"""Numbers of a cache in 16 bit that are float32 at one time, on other devices and on CPUs: 256 MiB, and 4 MiB, which
stay in a core's cache."""


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    """Describes KV blocks that several decoding sequences share, for all of these sequences but the first.

    blocks: int64 [entries], a block that more than SHARERS others share has several entries. rows: int64 [entries,
    sharers], the rows whose queries a block meets; entries are filled up with `rows` of all sequences, a row that does
    not exist. seen: int64 [entries, sharers], as in DecodeBlocks.
    """

    blocks: Tensor
    rows: Tensor
    seen: Tensor


@dataclass(frozen=True, slots=True)
class DecodeBlocks:
    """Describes the leading KV blocks of the cache for decode attention.

    Blocks that no decoding sequence owns are computed with the query of row 0 and fully masked, which is cheaper than
    selecting the others. A block that several sequences share meets the query of the first here, those of the others
    in `shared`. rows: int64 [blocks], the row whose query a block meets. seen: int64 [blocks], offsets of the block
    below it are not behind the row's token, which is at `seen` - 1. mask: float32 [blocks, 1, KV_BLOCK], 0 or -inf.
    order: int64, the partial sums of row 0, then those of row 1, and so on; those of `shared` are numbered behind
    those of the blocks. starts: int64 [rows], the first entry of each row.
    """

    rows: Tensor
    seen: Tensor
    mask: Tensor
    order: Tensor
    starts: Tensor
    shared: SharedBlocks | None

    @classmethod
    def of(cls, cache: KVCache, slots: Ints, positions: Ints, device: torch.device) -> "DecodeBlocks":
        """Builds the description for rows i that see positions 0 to positions[i] of slots[i]."""
        total = cache.compact(slots)
        tables = cache.tables
        counts = tables.counts[slots] if tables.fixed else positions // KV_BLOCK + 1
        blocks = tables.owned[slots][np.arange(tables.owned.shape[1]) < counts[:, None]]
        starts = counts.cumsum() - counts
        owners = np.repeat(np.arange(len(counts)), counts)
        seen = np.zeros(total, np.int64)
        rows = np.zeros(total, np.int64)
        visible = positions[owners] + 1 - KV_BLOCK * (np.arange(len(blocks)) - starts[owners])
        rows[blocks[::-1]], seen[blocks[::-1]] = owners[::-1], visible[::-1]  # The first of several owners comes last.
        mask = np.where(np.arange(KV_BLOCK) < seen[:, None, None], np.float32(0), np.float32(-np.inf))
        order = blocks
        shared = None
        if np.count_nonzero(rows[blocks] != owners):
            order, shared = _shared_blocks(blocks, owners, visible, rows, total, device)
        row, see, masked, entry, start = (
            torch.from_numpy(each).to(device) for each in (rows, seen, mask, order, starts)
        )
        return cls(row, see, masked, entry, start, shared)


def _shared_blocks(
    blocks: Ints, owners: Ints, visible: Ints, first: Ints, total: int, device: torch.device
) -> tuple[Ints, SharedBlocks]:
    """Returns the numbers of all partial sums, and the blocks with the rows that share them with their first row."""
    others = np.flatnonzero(first[blocks] != owners)
    by_block = others[np.argsort(blocks[others], kind="stable")]
    unique, starts, counts = np.unique(blocks[by_block], return_index=True, return_counts=True)
    width = min(int(counts.max()), SHARERS)
    rank = np.arange(len(by_block)) - np.repeat(starts, counts)
    entries_of_block = -(-counts // width)
    entry = np.repeat(entries_of_block.cumsum() - entries_of_block, counts) + rank // width
    rows = np.full((int(entries_of_block.sum()), width), owners.max() + 1)
    rows[entry, rank % width] = owners[by_block]
    seen = np.full_like(rows, KV_BLOCK)  # A row that does not exist sees a block whole.
    seen[entry, rank % width] = visible[by_block]
    order = blocks.copy()
    order[by_block] = total + entry * width + rank % width
    arrays = np.repeat(unique, entries_of_block), rows, seen
    return order, SharedBlocks(*(torch.from_numpy(each).to(device) for each in arrays))


@dataclass(frozen=True, slots=True)
class CachedBeginnings:
    """Describes sequences that go on: several new tokens each, after keys that are cached.

    lengths: new tokens of each. newest: int64 [sequences, tokens], the position of each. blocks: int64 [sequences,
    blocks], those of each sequence, and then any. mask: [sequences, 1, tokens, positions], 0 where a new token sees a
    position, else -inf, in the dtype of the model.
    """

    lengths: list[int]
    newest: Tensor
    blocks: Tensor
    mask: Tensor

    @classmethod
    def of(cls, cache: KVCache, held: dict[int, int], lengths: list[int], like: Tensor) -> "CachedBeginnings":
        """Builds the description. held: cached positions by slot. like: a tensor of the model."""
        ends = [first + length for first, length in zip(held.values(), lengths, strict=True)]
        blocks = cache.tables.owned[list(held), : blocks_for(max(ends))]
        newest = np.array(list(held.values()))[:, None] + np.arange(max(lengths))
        seen = np.arange(blocks.shape[1] * KV_BLOCK) <= newest[:, None, :, None]
        mask = torch.zeros(seen.shape, dtype=like.dtype).masked_fill_(torch.from_numpy(~seen), -torch.inf)
        positions, owned = (torch.from_numpy(each).to(like.device) for each in (newest, blocks))
        return cls(lengths, positions, owned, mask.to(like.device))


@dataclass(frozen=True, slots=True)
class FlatTokens:
    """Holds what attention needs to know of one forward: tokens that decode, then sequences in prefill.

    locations: block and offset of each token in the cache, two int64 [tokens]. positions: int64 [tokens]. blocks: the
    KV blocks of the tokens that decode. lengths: of each sequence in prefill. beginnings: of sequences behind those,
    whose first keys are cached, in parts that are padded to about the same length.
    """

    cache: KVCache
    locations: tuple[Tensor, Tensor]
    positions: Tensor
    blocks: DecodeBlocks | None
    lengths: list[int]
    beginnings: tuple[CachedBeginnings, ...] = ()


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
    if settings.get("position_bias") is not None:
        raise ConfigError(f"{type(module).__name__} uses position_bias, which this engine does not compute")
    if not getattr(module, "is_causal", True):
        raise ConfigError(f"{type(module).__name__} is not causal")
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    layer: Any = module.layer_idx
    rule = AttentionRule.of(settings, flat.cache.limit)
    return attend(layer, query, key, value, flat, settings.get("scaling"), rule)[None], None


def attend(
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    flat: FlatTokens,
    scaling: float | None,
    rule: AttentionRule = PLAIN,
) -> Tensor:
    """Computes attention: query [tokens, heads, size], key and value [tokens, kv heads, size] -> as the query."""
    keys, values = flat.cache.write(layer, flat.locations, key, value)
    end = len(query) - sum(sum(each.lengths) for each in flat.beginnings)
    parts = []
    first = end - sum(flat.lengths)
    if flat.blocks is not None:
        parts.append(_decode_attention(query[:first], keys, values, flat.blocks, scaling, rule))
    if flat.lengths:
        fresh = slice(first, end)
        parts.append(_prefill_attention(query[fresh], key[fresh], value[fresh], flat.lengths, scaling, rule))
    for each in flat.beginnings:
        first = end
        end = end + sum(each.lengths)
        parts.append(_later_attention(query[first:end], keys, values, each, scaling, rule))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _decode_attention(
    query: Tensor, keys: Tensor, values: Tensor, blocks: DecodeBlocks, scaling: float | None, rule: AttentionRule
) -> Tensor:
    """Computes the attention of query [rows, heads, size] to the cache, in float32.

    Heads that share keys are one query of several tokens, and so are rows that share a block. With s the scores of a
    row, to base 2, and m their maximum, the result is the sum over blocks of 2^(s - m) v, divided by the sum over
    blocks of 2^(s - m). On CPUs torch takes twenty times as long for exp of -inf as of other numbers, but not for exp2.
    """
    rows, heads, size = query.shape
    count = len(blocks.rows)
    shared = blocks.shared
    scaled = (query.float() * (LOG2_E * (size**-0.5 if scaling is None else scaling))).flatten(1)
    scores = _block_scores(scaled.index_select(0, blocks.rows).view(count, 1, heads, size), keys)
    scores = rule.capped(scores, LOG2_E).add_(blocks.mask[:, :, None])
    _hide(scores, blocks.seen[:, None], rule)
    peaks = scaled.new_full((rows + 1, heads), -torch.inf)
    if rule.sinks is not None:
        peaks[:rows] = LOG2_E * rule.sinks.float()
    peaks.scatter_reduce_(0, blocks.rows[:, None].expand(-1, heads), scores.amax(-1)[:, 0], "amax")
    everything = [(scores, blocks.rows, values)]
    if shared is not None:
        queries = torch.cat((scaled, scaled.new_zeros(1, scaled.shape[1])))[shared.rows]
        others = _block_scores(queries.view(*shared.rows.shape, heads, size), keys[shared.blocks])
        _hide(rule.capped(others, LOG2_E), shared.seen, rule)
        flat_rows = shared.rows.flatten()
        peaks.scatter_reduce_(0, flat_rows[:, None].expand(-1, heads), others.amax(-1).flatten(0, 1), "amax")
        everything.append((others, flat_rows, values[shared.blocks]))
    return _mixed_blocks(everything, blocks, peaks, rule).to(query.dtype)


def _hide(scores: Tensor, seen: Tensor, rule: AttentionRule) -> None:
    """Hides from scores [blocks, sharers, heads, KV_BLOCK] what is outside of the window, in place. seen: [blocks,
    sharers]."""
    if rule.window is not None:
        offsets = torch.arange(scores.shape[-1], device=scores.device)
        scores.masked_fill_((offsets < (seen - rule.window)[..., None])[:, :, None], -torch.inf)


def _mixed_blocks(
    everything: list[tuple[Tensor, Tensor, Tensor]], blocks: DecodeBlocks, peaks: Tensor, rule: AttentionRule
) -> Tensor:
    """Returns the weighted sums [rows, heads, size] of values. everything: scores, their rows, and values of blocks.
    peaks: the largest score of each row and head."""
    rows = len(blocks.starts)
    heads = peaks.shape[1]
    mixed = []
    totals = []
    for each, owners, block_values in everything:
        weights = each.sub_(peaks.index_select(0, owners).view(each.shape[:3])[..., None]).exp2_()
        mixed.append(_mix(weights, block_values).flatten(0, 1))
        totals.append(weights.sum(-1).flatten(0, 1))
    sums = embedding_bag(blocks.order, _joined(mixed).flatten(1), blocks.starts, mode="sum").view(rows, heads, -1)
    total = embedding_bag(blocks.order, _joined(totals), blocks.starts, mode="sum")
    if rule.sinks is not None:
        total += (LOG2_E * rule.sinks.float() - peaks[:rows]).exp2_()
    return sums.div_(total[:, :, None])


def _block_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """Computes scores [blocks, sharers, heads, KV_BLOCK] of queries [blocks, sharers, heads, size] to their blocks."""
    count, sharers, heads, _ = queries.shape
    kv_heads = keys.shape[1]
    grouped = _by_kv_head(queries, kv_heads)
    found = [torch.bmm(part, each.flatten(0, 1)) for part, each in _tiles(grouped, keys[:count])]
    return _by_sharer(_joined(found), count, sharers, heads)


def _mix(weights: Tensor, values: Tensor) -> Tensor:
    """Computes the sums [blocks, sharers, heads, size] of the values of each block."""
    count, sharers, heads, _ = weights.shape
    grouped = _by_kv_head(weights, values.shape[1])
    found = [torch.bmm(part, each.flatten(0, 1)) for part, each in _tiles(grouped, values[:count])]
    return _by_sharer(_joined(found), count, sharers, heads)


def _by_kv_head(states: Tensor, kv_heads: int) -> Tensor:
    """Returns [blocks * kv heads, sharers * heads of one kv head, numbers] of [blocks, sharers, heads, numbers]."""
    count, sharers, _, numbers = states.shape
    if sharers > 1:
        states = states.view(count, sharers, kv_heads, -1, numbers).transpose(1, 2)
    return states.reshape(count * kv_heads, -1, numbers)


def _by_sharer(states: Tensor, count: int, sharers: int, heads: int) -> Tensor:
    """Undoes `_by_kv_head`."""
    if sharers > 1:
        group = states.shape[1] // sharers
        states = states.view(count, heads // group, sharers, group, -1).transpose(1, 2)
    return states.reshape(count, sharers, heads, -1)


def _tiles(queries: Tensor, cached: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Returns queries with their part of the cache in float32, of which there is never more than one tile at a time."""
    if cached.dtype == torch.float32:
        yield queries, cached
        return
    blocks = max(1, TILE_NUMBERS[cached.device.type == "cpu"] // cached[0].numel()) if len(cached) else 1
    for part, each in zip(torch.split(queries, blocks * cached.shape[1]), torch.split(cached, blocks), strict=True):
        yield part, each.float()


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _prefill_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scaling: float | None, rule: AttentionRule
) -> Tensor:
    # Padding follows the real tokens of each sequence, which do not see it, because attention is causal.
    padded = [
        pad_sequence(list(torch.split(each, lengths)), batch_first=True).transpose(1, 2) for each in (query, key, value)
    ]
    queries, keys, values = (
        padded[0],
        *(each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in padded[1:]),
    )
    if rule is PLAIN:
        mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling)
    else:
        hidden = query.new_ones(2 * [max(lengths)], dtype=torch.bool).triu(1)
        if rule.window is not None:
            hidden |= ~hidden.new_ones(hidden.shape).triu(1 - rule.window)
        mask = query.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        mixed = rule.attend(queries, keys, values, mask, scaling)
    return torch.cat([sequence[:length] for sequence, length in zip(mixed.transpose(1, 2), lengths, strict=True)])


def _later_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    beginnings: CachedBeginnings,
    scaling: float | None,
    rule: AttentionRule,
) -> Tensor:
    """Computes the attention of the new tokens of sequences that go on to all their keys, which the cache has.

    Heads that share keys are one sequence of queries, so that keys are not repeated.
    """
    padded = pad_sequence(list(torch.split(query, beginnings.lengths)), batch_first=True)
    sequences, tokens, heads, size = padded.shape
    kv_heads = keys.shape[1]
    # [sequences, tokens, heads, size] -> [sequences, kv heads, heads of one kv head * tokens, size]
    queries = padded.view(sequences, tokens, kv_heads, -1, size).permute(0, 2, 3, 1, 4).flatten(2, 3)
    # [sequences, blocks, kv heads, size, KV_BLOCK], of values [..., KV_BLOCK, size], -> [sequences, kv heads,
    # positions, size]
    every_key = keys[beginnings.blocks].permute(0, 2, 1, 4, 3).flatten(2, 3)
    every_value = values[beginnings.blocks].transpose(1, 2).flatten(2, 3)
    mask = beginnings.mask
    if rule.window is not None:
        oldest = beginnings.newest[:, None, :, None] - rule.window
        mask = mask.masked_fill(torch.arange(mask.shape[-1], device=mask.device) <= oldest, -torch.inf)
    mask = mask.repeat(1, 1, heads // kv_heads, 1)
    mixed = rule.attend(queries, every_key, every_value, mask, scaling)
    by_token = mixed.view(sequences, kv_heads, -1, tokens, size).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return torch.cat([sequence[:length] for sequence, length in zip(by_token, beginnings.lengths, strict=True)])


AttentionInterface.register(NAME, flat_attention)

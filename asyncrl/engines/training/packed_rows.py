"""Packed rows: samples one after the other in one row of the model, without padding, prompts that samples share
computed once, and the attention of both.

    row of the model     prompt A | answer 1 | answer 2 | prompt B and answer 3 | prompt C | answer 4 | answer 5

A segment is what stands between two bars. A token sees the earlier tokens of its own segment and, in an answer whose
prompt is a segment, that prompt; it has the position of its own sample. States differ from those of padded rows in
their last bits.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from asyncrl.engines.models.model_families import WORTH, is_shared
from asyncrl.engines.training.train_rows import Ids

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Block: TypeAlias = list[int]
"""Indices of the samples of one prompt."""


@dataclass(frozen=True, slots=True)
class RowSegment:
    """Holds places of tokens in the packed row. begin, length: of the segment; given_begin, given: of the prompt that
    it sees, of no tokens where the prompt is part of the segment or is the segment."""

    begin: int
    length: int
    given_begin: int = 0
    given: int = 0

    @property
    def own(self) -> slice:
        """Returns the places of its tokens."""
        return slice(self.begin, self.begin + self.length)

    @property
    def prompt(self) -> slice:
        """Returns the places of the prompt that it sees."""
        return slice(self.given_begin, self.given_begin + self.given)


@dataclass(frozen=True, slots=True)
class PackedSamples:
    """Holds the samples in one row of the model. ids, position_ids: [tokens]. segments: in the order of their tokens,
    which they cover. states: of each sample the indices [tokens] of the states that predict its response."""

    ids: Ids
    position_ids: Ids
    segments: tuple[RowSegment, ...]
    states: list[Ids]


def pack_rows(
    prompts: Sequence[Ids], responses: Sequence[Ids], budget: float, shared_from: float = 0.0
) -> PackedSamples | None:
    """Packs samples. Returns None where it saves too little, and padded rows are within the budget of tokens.
    shared_from: least length of a prompt, over the mean of its answers, that samples share."""
    blocks = list(_blocks(prompts, responses, shared_from))
    tokens = sum(len(prompts[block[0]]) for block in blocks) + sum(len(each) - 1 for each in responses)
    padded = len(prompts) * max(len(prompt) + len(each) - 1 for prompt, each in zip(prompts, responses, strict=True))
    if padded <= budget and tokens > WORTH * padded:
        return None
    parts: list[Ids] = []
    positions: list[Ids] = []
    segments: list[RowSegment] = []
    states = [np.zeros(0, np.int64)] * len(prompts)
    begin = 0
    for block in blocks:
        prompt = prompts[block[0]]
        inputs = [responses[index][:-1] for index in block]
        last = begin + len(prompt) - 1
        parts += [prompt, *inputs]
        positions += [np.arange(len(prompt)), *(len(prompt) + np.arange(len(tokens)) for tokens in inputs)]
        places = np.cumsum([begin, len(prompt), *map(len, inputs)]).tolist()
        for index, (first, end) in zip(block, pairwise(places[1:]), strict=True):
            states[index] = np.concatenate([[last], np.arange(first, end)])
        segments += _segments(places)
        begin = places[-1]
    return PackedSamples(np.concatenate(parts), np.concatenate(positions), tuple(segments), states)


def _blocks(prompts: Sequence[Ids], responses: Sequence[Ids], shared_from: float) -> Iterator[Block]:
    """Yields the samples that share a prompt, and the others alone."""
    found: dict[bytes, Block] = {}
    for index, prompt in enumerate(prompts):
        found.setdefault(prompt.tobytes(), []).append(index)
    for block in found.values():
        answers = sum(len(responses[index]) for index in block)
        if is_shared(len(prompts[block[0]]), answers, len(block), shared_from):
            yield block
        else:
            yield from ([index] for index in block)


def _segments(places: Sequence[int]) -> list[RowSegment]:
    """Returns the segments of a prompt and its answers. places: where each begins, and the end of the last one."""
    begin, first, *_ = places
    if len(places) == 3:
        return [RowSegment(begin, places[-1] - begin)]
    answers = [RowSegment(at, end - at, begin, first - begin) for at, end in pairwise(places[1:]) if end > at]
    return [RowSegment(begin, first - begin), *answers]


# Attention of packed rows: segments of different lengths, whose tokens see one segment and the prompt that it names.
#
# Segments of similar shape are computed together, as rows of a batch with little padding. On a CUDA device
# FlexAttention (arXiv 2412.05496) computes the packed row as it is, where torch can compile it.


NAME = "asyncrl_packed_rows"
PACKED = "packed_attention"
"""Keyword of a model's forward pass for the attention of a packed row; without it rows are padded."""
PADDED = 1.25
"""Pairs of query and key that a batch of segments may compute, over those of its segments."""
LEAST_HEAD = 16
"""Size of a head from which FlexAttention computes it."""
FEW = 65_536
"""Pairs of a batch that may be computed anyway, because many small products cost more."""


@dataclass(frozen=True, slots=True)
class SegmentBatch:
    """Holds segments of a packed row that are computed together. queries: indices of tokens, [segments, longest].
    keys: of the tokens that they may see, [segments, longest prompt + longest]. Padding has index 0. mask: which key a
    query sees, bool [segments or 1, 1, longest, keys]; None where keys are queries, and each sees all up to its own
    place."""

    queries: Tensor
    keys: Tensor
    mask: Tensor | None

    @classmethod
    def causal(cls, segments: Sequence[RowSegment], device: torch.device) -> "SegmentBatch":
        """Begins each row with the prompt, so that a causal kernel computes it."""
        longest = max(each.given + each.length for each in segments)
        places = np.zeros((len(segments), longest), np.int64)
        for row, each in enumerate(segments):
            places[row, : each.given] = _indices(each.prompt)
            places[row, each.given : each.given + each.length] = _indices(each.own)
        tensor = torch.from_numpy(places).to(device)
        return cls(tensor, tensor, None)

    @classmethod
    def masked(cls, segments: Sequence[RowSegment], device: torch.device) -> "SegmentBatch":
        """Gives answers the keys of their prompt."""
        longest = max(each.length for each in segments)
        given = max(each.given for each in segments)
        queries = np.zeros((len(segments), longest), np.int64)
        prompts = np.zeros((len(segments), given), np.int64)
        for row, each in enumerate(segments):
            queries[row, : each.length], prompts[row, : each.given] = _indices(each.own), _indices(each.prompt)
        sizes = np.unique([each.given for each in segments])
        seen = np.arange(given) < (sizes if len(sizes) == 1 else np.array([each.given for each in segments]))[:, None]
        inside = np.tri(longest, dtype=bool)
        parts = [np.broadcast_to(each, (len(seen), longest, each.shape[-1])) for each in (seen[:, None], inside)]
        mask = np.concatenate(parts, 2)
        keys = np.concatenate([prompts, queries], 1)
        return cls(*(torch.from_numpy(each).to(device) for each in (queries, keys, mask[:, None])))


def _indices(places: slice) -> NDArray[np.int64]:
    return np.arange(places.start, places.stop)


class PackedAttention:
    """Computes attention in all layers of one pass. queries [1, heads, tokens, size], keys and values [1, kv heads,
    tokens, size] -> [1, tokens, heads, size].

    A mask for all pairs of tokens never exists: what is computed grows with the sum of the squares of the segments, and
    not with the square of their sum."""

    def __init__(self, segments: Sequence[RowSegment], device: torch.device) -> None:
        self._segments = segments
        self._device = device

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
        """Computes one layer. settings: what transformers gives its attention functions."""
        query = query.to(value.dtype)
        key = key.to(value.dtype)
        if self._device.type == "cuda" and value.shape[-1] >= LEAST_HEAD and can_compile():
            return self._visibility.attend(query, key, value, settings.get("scaling"))
        flat = [each[0].transpose(0, 1).flatten(1) for each in (query, key, value)]
        found, (batches, order) = [], self.batches
        for batch in batches:
            places = (batch.queries, batch.keys, batch.keys)
            # The backward pass of an embedding is the fastest sum over equal indices that torch has on CPUs.
            given = [
                embedding(at, each).view(*at.shape, -1, query.shape[-1]).transpose(1, 2)
                for at, each in zip(places, flat, strict=True)
            ]
            output = sdpa_attention_forward(module, *given, batch.mask, **settings)[0]
            found.append(output.flatten(2).flatten(0, 1))
        return embedding(order, torch.cat(found)).view(1, *order.shape, -1, value.shape[-1])

    @cached_property
    def batches(self) -> tuple[list[SegmentBatch], Tensor]:
        """Returns batches of segments, and where the output of each token is among the flattened outputs of all."""
        order = np.zeros(sum(each.length for each in self._segments), np.int64)
        batches: list[SegmentBatch] = []
        begin = 0
        for part in _similar(self._segments):
            causal = _shape(part[0])[1] == 0
            batch = SegmentBatch.causal(part, self._device) if causal else SegmentBatch.masked(part, self._device)
            for row, each in enumerate(part):
                first = begin + row * batch.queries.shape[1] + (each.given if causal else 0)
                order[each.own] = np.arange(first, first + each.length)
            begin += batch.queries.numel()
            batches.append(batch)
        return batches, torch.from_numpy(order).to(self._device)

    @cached_property
    def _visibility(self) -> "SegmentVisibility":
        return SegmentVisibility.of(self._segments, self._device)


@cache
def can_compile() -> bool:
    """Returns whether torch can compile FlexAttention here, for which it needs Triton and a C compiler."""
    compilers = (os.environ.get("CC", "cc"), "cc", "gcc", "clang")
    return find_spec("triton") is not None and any(shutil.which(name) for name in compilers)


def _shape(segment: RowSegment) -> tuple[int, int]:
    """Returns how many tokens of a segment are computed, and how many of its prompt they see beside them. A causal
    kernel computes half of all pairs of prompt and segment, which costs less where the prompt is the shorter one."""
    given = segment.given
    length = segment.length
    return (given + length, 0) if given <= length else (length, given)


def _similar(segments: Sequence[RowSegment]) -> Iterator[list[RowSegment]]:
    """Yields segments that little padding makes equal in shape, those with the longest prompts first."""
    part: list[RowSegment] = []
    pairs = longest = beside = 0
    for each in sorted(segments, key=lambda each: (_shape(each)[::-1], -each.begin), reverse=True):
        queries, prompt = _shape(each)
        own = queries * (queries + prompt)
        longest = max(longest, queries)
        computed = (len(part) + 1) * longest * (longest + beside)
        alike = (prompt > 0) == (beside > 0) and (computed <= PADDED * (pairs + own) or computed <= FEW)
        if part and not alike:
            yield part
            part = []
            pairs = 0
            longest = queries
        beside = beside if part else prompt
        part.append(each)
        pairs += own
    if part:
        yield part


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Computes attention for transformers, of packed rows where the pass has any, else plain and causal."""
    packed: PackedAttention | None = settings.pop(PACKED, None)
    if packed is None:
        plain: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, **settings)[0]
        return plain, None
    return packed.attend(module, query, key, value, **settings), None


AttentionInterface.register(NAME, packed_attention)


# Which tokens of a packed row see which, for FlexAttention on a CUDA device. Importing FlexAttention imports torch's
# compiler, which a process on a CPU has no use for: so that its functions import it.


TILE = 128
"""Tokens of a tile. FlexAttention leaves out pairs of tiles in which no token sees another one."""
PADDING = -1


@cache
def _computation(device: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention


class SegmentVisibility:
    """Holds the pairs of tokens that see each other. tokens: of the packed row, which is padded to whole tiles; padding
    sees padding. mask: of tiles, and of tokens inside of those that see each other in part."""

    def __init__(self, tokens: int, mask: "BlockMask") -> None:
        self.tokens = tokens
        self.mask = mask

    @classmethod
    def of(cls, segments: Sequence[RowSegment], device: torch.device) -> "SegmentVisibility":
        tokens = sum(each.length for each in segments)
        own, prompts = (np.full(-(-tokens // TILE) * TILE, PADDING) for _ in range(2))
        numbers = {each.begin: number for number, each in enumerate(segments)}
        for number, each in enumerate(segments):
            own[each.own], prompts[each.own] = number, numbers[each.given_begin] if each.given else number
        first, second = (torch.from_numpy(each.astype(np.int32)).to(device) for each in (own, prompts))

        def sees(_: Any, __: Any, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & ((first[query] == first[key]) | (second[query] == first[key]))

        from torch.nn.attention.flex_attention import BlockMask

        some, whole = tiles(segments)
        in_part = _lists(some & ~whole, device)
        full = _lists(whole, device)
        return cls(tokens, BlockMask.from_kv_blocks(*in_part, *full, BLOCK_SIZE=TILE, mask_mod=sees))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Computes attention, shapes as in PackedAttention."""
        room = -self.tokens % TILE
        given = [torch.nn.functional.pad(each, (0, 0, 0, room)).contiguous() for each in (query, key, value)]
        grouped = query.shape[1] != key.shape[1]
        compute = _computation(query.device.type)
        output: Tensor = compute(*given, block_mask=self.mask, scale=scaling, enable_gqa=grouped)
        return output[:, :, : self.tokens].transpose(1, 2)


def tiles(segments: Sequence[RowSegment]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Returns in which pairs of a tile of queries and one of keys, [tiles, tiles], any token sees another one, and in
    which each sees all, where the keys are of one segment. The answers that see a prompt follow it."""
    tokens = segments[-1].own.stop
    count = -(-tokens // TILE)
    some, whole = (np.zeros((count, count), bool) for _ in range(2))
    seen_until = {each.begin: each.own.stop for each in segments}
    seen_until |= {each.given_begin: each.own.stop for each in segments if each.given}
    for each in segments:
        end = seen_until[each.begin]
        some[_touched(each.begin, end), _touched(each.begin, each.own.stop)] = True
        whole[_filled(each.begin, end), _filled(each.begin, each.own.stop)] = True
    some[-1, -1] = True
    return np.tril(some), np.tril(whole, -1)


def _touched(begin: int, end: int) -> slice:
    """Returns the tiles that hold any of these tokens."""
    return slice(begin // TILE, -(-end // TILE))


def _filled(begin: int, end: int) -> slice:
    """Returns the tiles that hold no other tokens than these."""
    return slice(-(-begin // TILE), end // TILE)


def _lists(part: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns how many tiles of keys each tile of queries has, [1, 1, tiles], and which, in front of others."""
    found = (part.sum(1), np.argsort(~part, axis=1, kind="stable"))
    numbers, indices = (torch.from_numpy(each.astype(np.int32))[None, None].to(device) for each in found)
    return numbers, indices

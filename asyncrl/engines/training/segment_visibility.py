"""Describes which tokens of a packed row see which, for FlexAttention on a CUDA device."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from asyncrl.engines.training.packed_rows import RowSegment

TILE = 128
"""Tokens of a tile. FlexAttention leaves out pairs of tiles in which no token sees another one."""
PADDING = -1


@cache
def _computation(device: str) -> Any:
    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention


class SegmentVisibility:
    """Holds the pairs of tokens that see each other. tokens: of the packed row, which is padded to whole tiles; padding
    sees padding. mask: of tiles, and of tokens inside of those that see each other in part."""

    def __init__(self, tokens: int, mask: BlockMask) -> None:
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

"""Describes which tokens of a packed row see which, for FlexAttention on a CUDA device."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from asyncrl.engines.training.batch.packed_rows import RowSegment

TILE = 128
"""Tokens of a tile, all pairs of which FlexAttention computes or leaves out."""


@cache
def _computation(device: str) -> Any:
    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention


class SegmentVisibility:
    """Holds the pairs of tokens that see each other. segments: number of the segment of each token; prompts: that of
    the prompt which it sees too, or its own. Both [tokens, padded to whole tiles]; padding sees padding."""

    def __init__(self, tokens: int, segments: Tensor, prompts: Tensor, mask: BlockMask) -> None:
        self.tokens = tokens
        self.segments = segments
        self.prompts = prompts
        self.mask = mask

    @classmethod
    def of(cls, segments: Sequence[RowSegment], device: torch.device) -> "SegmentVisibility":
        tokens = sum(each.length for each in segments)
        padded = -(-tokens // TILE) * TILE
        own, prompts = np.full(padded, -1, np.int32), np.full(padded, -1, np.int32)
        numbers = {each.begin: number for number, each in enumerate(segments)}
        for number, each in enumerate(segments):
            own[each.own], prompts[each.own] = number, numbers[each.given_begin] if each.given else number
        first, second = torch.from_numpy(own).to(device), torch.from_numpy(prompts).to(device)

        def sees(_: Any, __: Any, query: Tensor, key: Tensor) -> Tensor:
            earlier = query >= key
            return earlier & ((first[query] == first[key]) | (second[query] == first[key]))

        mask = create_block_mask(sees, None, None, padded, padded, device=device.type, BLOCK_SIZE=TILE)
        return cls(tokens, first, second, mask)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Computes attention, shapes as in PackedAttention."""
        room = len(self.segments) - self.tokens
        given = [torch.nn.functional.pad(each, (0, 0, 0, room)).contiguous() for each in (query, key, value)]
        compute = _computation(query.device.type)
        grouped = query.shape[1] != key.shape[1]
        output: Tensor = compute(*given, block_mask=self.mask, scale=scaling, enable_gqa=grouped)
        return output[:, :, : self.tokens].transpose(1, 2)

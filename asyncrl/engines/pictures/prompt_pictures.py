"""The pictures of a prompt as a model sees them: pixels by patch, and the positions of all tokens in three dimensions.

A picture of t x h x w patches takes t x h x w / merge^2 tokens. A text token has the same position in all dimensions;
the tokens of a picture have those of their patches, and the text behind it goes on after the largest (M-RoPE, Qwen2-VL,
arXiv 2409.12191). So a prompt with pictures is shorter in positions than in tokens.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from asyncrl.protocols.batch import Columns

Ints = NDArray[np.int64]
Pixels = NDArray[np.float32]

WITH_PICTURES = ("qwen2_5_vl",)
"""Families that read pictures in prompts, by `model_type` in config.json."""
PROCESSOR = "preprocessor_config.json"
"""The file of a model folder that describes its image processor."""
PIXELS, GRID, PLACES = COLUMNS = ("pixel_values", "image_grid_thw", "picture_places")
"""Columns of the row that has the pictures of a group: patches, one after the other; their numbers in t, h and w of
each picture; and the indices of the tokens of pictures in the prompt."""


def picture_columns(tokens: int, patch: int, merge: int) -> Columns:
    """Returns what the row of the pictures of a prompt takes, of so many tokens and at most as many pictures. patch:
    numbers of a patch. merge: patches of a token in width and in height."""
    dtypes = {PIXELS: ("<f4", tokens * merge**2 * patch), GRID: ("<i8", 3 * tokens), PLACES: ("<i8", tokens)}
    return {name: (np.dtype(dtype), length) for name, (dtype, length) in dtypes.items()}


@dataclass(frozen=True)
class Pictures:
    """Holds the pictures of a prompt. pixels: [patches, numbers]. grid: [pictures, 3], patches in t, h and w."""

    pixels: Pixels
    grid: Ints

    @cached_property
    def digest(self) -> bytes:
        found = hashlib.blake2b(self.grid.tobytes(), digest_size=16)
        found.update(np.ascontiguousarray(self.pixels).data)
        return found.digest()

    def tokens(self, merge: int) -> Ints:
        """Returns the number of tokens of each picture."""
        return np.asarray(self.grid.prod(1) // merge**2)


@dataclass(frozen=True)
class PromptPictures:
    """Holds the pictures of a prompt, and where its tokens are. places: indices of the tokens that are pictures.
    positions: [3, tokens of the prompt]."""

    pictures: Pictures
    places: Ints
    positions: Ints

    @classmethod
    def of(cls, pictures: Pictures, ids: NDArray[Any], token: int, merge: int) -> Self:
        """Finds the tokens of pictures in a prompt. token: the id that all of them have."""
        places = np.flatnonzero(ids == token)
        counts = pictures.tokens(merge)
        assert len(places) == counts.sum(), f"{len(places)} tokens of pictures are not {counts} of {len(counts)}"
        return cls(pictures, places, _positions(places, counts, pictures.grid, merge, len(ids)))

    @classmethod
    def of_columns(cls, columns: Mapping[str, NDArray[Any]], tokens: int) -> Self:
        """Returns what `columns` gave. tokens: of the prompt."""
        grid = columns[GRID].reshape(-1, 3)
        places = columns[PLACES]
        patches = int(grid.prod(1).sum())
        pictures = Pictures(columns[PIXELS].reshape(patches, -1), grid)
        merge = math.isqrt(patches // len(places))
        return cls(pictures, places, _positions(places, pictures.tokens(merge), grid, merge, tokens))

    def columns(self) -> dict[str, NDArray[Any]]:
        """Returns the columns of their row."""
        return {PIXELS: self.pictures.pixels.reshape(-1), GRID: self.pictures.grid.reshape(-1), PLACES: self.places}

    def positions_at(self, indices: Ints) -> Ints:
        """Returns the positions [3, tokens] of the tokens with these indices, which may lie behind the prompt."""
        prompt = self.positions.shape[1]
        inside = self.positions[:, np.minimum(indices, prompt - 1)]
        return np.asarray(np.where(indices < prompt, inside, indices + self.delta))

    @cached_property
    def delta(self) -> int:
        """Returns what the position of a token behind the prompt is more than its index."""
        return int(self.positions.max() + 1 - self.positions.shape[1])


def _positions(places: Ints, counts: Ints, grid: Ints, merge: int, tokens: int) -> Ints:
    found = np.zeros((3, tokens), np.int64)
    begin = 0
    next_position = 0
    starts = places[np.cumsum(counts) - counts]
    for start, count, (t, h, w) in zip(starts.tolist(), counts.tolist(), grid.tolist(), strict=True):
        found[:, begin:start] = next_position + np.arange(start - begin)
        next_position += start - begin
        begin = start + count
        found[:, start:begin] = next_position + np.indices((t, h // merge, w // merge)).reshape(3, -1)
        next_position += max(h, w) // merge
    found[:, begin:] = next_position + np.arange(tokens - begin)
    return found

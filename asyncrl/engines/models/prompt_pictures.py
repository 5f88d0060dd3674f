"""The pictures of a prompt: made from files by the model's image processor, placed among the tokens of the prompt, and
stored in a row of their own for all samples of its group.

A picture of t x h x w patches takes t x h x w / merge^2 tokens. A text token has the same position in all dimensions;
the tokens of a picture have those of their patches, and the text behind it goes on after the largest (M-RoPE, Qwen2-VL,
arXiv 2409.12191). So a prompt with pictures is shorter in positions than in tokens.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError, TaskError
from asyncrl.protocols.batch import BatchRef, Columns, Place, RowRef, SampleName
from asyncrl.protocols.messages import PromptGroup
from asyncrl.tasks.row_files import optional_module

if TYPE_CHECKING:  # Checks before a run import this module, and no transport of rows.
    from asyncrl.lanes.data.row_reader import RowReader
    from asyncrl.lanes.data.row_store import RowStore

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


# The rows of pictures: one for each group, stored where the group was sampled, and read once for all its samples.


class GroupPictures:
    """Stores the pictures of groups until all samples of a group that were asked for here are released. A group has a
    place exactly as long as it has samples. GenerationService calls it, and frees the places that `release` returns."""

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}
        self._held: dict[int, dict[int, int]] = {}
        """Group -> newest attempt of each member."""

    def __len__(self) -> int:
        return len(self._places)

    def places(self, group: int) -> tuple[Place, ...]:
        """Returns where the pictures of a group are stored; nothing for one without pictures."""
        return (self._places[group],) if group in self._places else ()

    def add(self, rows: "RowStore", prompts: PromptGroup, pictures: PromptPictures | None) -> None:
        """Stores the pictures of a group, unless an earlier attempt did: its samples may still be trained."""
        if pictures is None:
            return
        if prompts.id not in self._places:
            self._places[prompts.id] = rows.put(pictures.columns())
        self._held.setdefault(prompts.id, {}).update(dict.fromkeys(prompts.members, prompts.attempt))

    def release(self, samples: Iterable[SampleName], oldest: int) -> list[Place]:
        """Forgets these samples in these and earlier attempts, and all groups from 0 up to, without, `oldest`; returns
        the places of groups without samples, to be freed."""
        for group, member, attempt in samples:
            held = self._held.get(group, {})
            if held.get(member, attempt + 1) <= attempt:
                del held[member]
        ended = [group for group, held in self._held.items() if not held or 0 <= group < oldest]
        for group in ended:
            del self._held[group]
        return [self._places.pop(group) for group in ended]


async def read_pictures(reader: "RowReader", samples: BatchRef) -> list[PromptPictures | None]:
    """Returns the pictures of each sample, the same object for all of one group. Raises LostRows."""
    places = [_place(row) for row in samples]
    first = {place: row.with_places((place,)) for place, row in zip(places, samples, strict=True) if place is not None}
    if not first:
        return [None] * len(samples)
    rows = await reader.read(BatchRef(tuple(first.values())), COLUMNS)
    found = {
        place: PromptPictures.of_columns({name: rows[name][number] for name in COLUMNS}, row.prompt_tokens)
        for number, (place, row) in enumerate(first.items())
    }
    return [None if place is None else found[place] for place in places]


def _place(row: RowRef) -> Place | None:
    return next((place for place in row.places if PIXELS in place.columns), None)


# Makes the pictures of a prompt from files, by the image processor of the model, and the tokens that they take.


NO_PICTURES = "the prompt has a picture, and the model reads none: take one that does (docs/models.md), or rows of text"


class PictureProcessor:
    """Wraps the image processor of a model in its form for Pillow and numpy. token: id of the tokens that stand for
    pictures. most_pixels: of a picture that is taken."""

    def __init__(self, folder: Path, most_pixels: int) -> None:
        from transformers import AutoImageProcessor  # not at the top: few models read pictures

        self._pillow = pillow()
        shape = json.loads((folder / "config.json").read_bytes())
        self.token = int(shape["image_token_id"])
        self._merge = int(shape["vision_config"].get("spatial_merge_size", 2))
        self._most_pixels = most_pixels
        self._processor: Any = AutoImageProcessor.from_pretrained(folder, backend="pil")

    @classmethod
    def of_folder(cls, folder: Path, most_pixels: int) -> "PictureProcessor | None":
        """Returns the processor of a model folder; None for a model that reads no pictures. Raises ConfigError where
        Pillow or the description of the processor is missing."""
        config = folder / "config.json"
        if not config.is_file() or json.loads(config.read_bytes()).get("model_type") not in WITH_PICTURES:
            return None
        if not (folder / PROCESSOR).is_file():
            raise ConfigError(f"model.name: {folder} reads pictures and has no {PROCESSOR}: copy it beside config.json")
        return cls(folder, most_pixels)

    def pictures(self, files: Sequence[bytes]) -> Pictures:
        """Returns the pixels of pictures. Raises TaskError for one that cannot be decoded, or is too large."""
        opened = [self._opened(data, f"picture {number}") for number, data in enumerate(files, 1)]
        try:
            found = self._processor(opened, return_tensors="np")
        except ValueError as error:
            raise TaskError(f"the model's image processor refuses a picture of the prompt: {error}") from error
        return Pictures(found["pixel_values"].astype(np.float32), found["image_grid_thw"].astype(np.int64))

    def columns(self, tokens: int) -> Columns:
        """Returns what the row of the pictures of a prompt of so many tokens takes at most."""
        settings = self._processor
        return picture_columns(tokens, 3 * settings.temporal_patch_size * settings.patch_size**2, self._merge)

    def with_tokens(self, ids: NDArray[np.int32], pictures: Pictures) -> tuple[NDArray[np.int32], PromptPictures]:
        """Returns the ids of a prompt in which each picture, one token of the template, has all of its tokens. Raises
        TaskError where the template writes another number of them."""
        places = np.flatnonzero(ids == self.token)
        counts = pictures.tokens(self._merge)
        if len(places) != len(counts):
            raise TaskError(
                f"the prompt has {len(counts)} pictures, and the model's chat template marks {len(places)} in it: "
                "take a template that marks each picture once, and remove such marks from texts"
            )
        repeats = np.ones(len(ids), np.int64)
        repeats[places] = counts
        ids = np.repeat(ids, repeats)
        return ids, PromptPictures.of(pictures, ids, self.token, self._merge)

    def _opened(self, data: bytes, where: str) -> Any:
        """Decodes a picture. Its size is read first, so that a small file cannot become a huge picture."""
        pillow = self._pillow
        try:
            picture = pillow.open(BytesIO(data))
            width, height = picture.size
            if width * height <= self._most_pixels:
                return picture.convert("RGB")
        except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
            raise TaskError(f"{where} of the prompt is too large: {error}; make it smaller") from error
        except (OSError, SyntaxError, ValueError) as error:
            raise TaskError(f"{where} of the prompt cannot be decoded: {error}; replace the file") from error
        raise TaskError(
            f"{where} of the prompt has {width} x {height} pixels and task.max_picture_pixels is {self._most_pixels}: "
            f"make it smaller, or write max_picture_pixels = {width * height}"
        )


def pillow() -> ModuleType:
    """Returns Pillow. Raises TaskError, which says how to install it, where it is missing."""
    return optional_module("PIL.Image", "pictures")


# Counts the patches of a picture by its size alone, as the image processor of Qwen2-VL cuts it; without torch.


FEWEST = 56 * 56
MOST = 28 * 28 * 1280
"""Pixels of a picture as the model sees it, where the description of the processor has no bounds."""


@dataclass(frozen=True, slots=True)
class PatchCounter:
    """Counts patches. side: of a patch, in pixels. merge: patches of a token in width and in height. fewest, most:
    pixels of a picture as the model sees it."""

    side: int
    merge: int
    fewest: int
    most: int

    @classmethod
    def of_folder(cls, folder: Path) -> Self | None:
        """Reads the description of a model's image processor; returns None where there is none. Raises ValueError when
        it is damaged."""
        if not (path := folder / PROCESSOR).is_file():
            return None
        described: Any = json.loads(path.read_bytes())
        if not isinstance(described, dict):
            raise ValueError(f"{path} holds no object of JSON")
        size = described.get("size") or {}
        fewest = described.get("min_pixels") or size.get("shortest_edge") or FEWEST
        most = described.get("max_pixels") or size.get("longest_edge") or MOST
        merge = described.get("merge_size") or 2
        return cls(int(described.get("patch_size") or 14), int(merge), int(fewest), int(most))

    def patches(self, files: Sequence[bytes]) -> list[int]:
        """Returns the patches of each picture, of which headers alone are decoded. Raises TaskError without Pillow, and
        for a file that is no picture, or a huge one."""
        found = pillow()
        try:
            return [self.of_size(*found.open(BytesIO(data)).size) for data in files]
        except (found.DecompressionBombError, found.DecompressionBombWarning, OSError, SyntaxError) as error:
            raise TaskError(f"the size of a picture cannot be read: {error}; replace the file") from error

    def of_size(self, width: int, height: int) -> int:
        """Returns the patches of a picture of so many pixels. Sides are rounded to whole tokens, and scaled where the
        picture has too many or too few pixels."""
        unit = self.side * self.merge
        sides = [round(side / unit) * unit for side in (height, width)]
        if math.prod(sides) > self.most:
            scale = math.sqrt(height * width / self.most)
            sides = [max(unit, math.floor(side / scale / unit) * unit) for side in (height, width)]
        elif math.prod(sides) < self.fewest:
            scale = math.sqrt(self.fewest / (height * width))
            sides = [math.ceil(side * scale / unit) * unit for side in (height, width)]
        return math.prod(side // self.side for side in sides)

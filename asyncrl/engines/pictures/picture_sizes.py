"""Counts the patches of a picture by its size alone, as the image processor of Qwen2-VL cuts it; without torch."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Self

from asyncrl.engines.pictures.processing import pillow
from asyncrl.engines.pictures.prompt_pictures import PROCESSOR
from asyncrl.errors import TaskError

FEWEST, MOST = 56 * 56, 28 * 28 * 1280
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

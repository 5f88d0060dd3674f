"""Pictures of one colour, which an answer names: a reddish square, "colour:" -> "red".

One picture in eight is held out, chosen by a checksum of its shade, so that training and held-out rows share none.
"""

import random
import struct
import zlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

from asyncrl.tasks.builtin.words import Demonstrations

COLOURS = {
    "red": (210, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 70, 210),
    "yellow": (230, 210, 50),
    "black": (30, 30, 30),
    "white": (235, 235, 235),
}
"""Red, green and blue of each colour."""
QUESTION = "colour:"
SHADES = 25
"""Most by which a shade differs from its colour, in red, green and blue."""
SIZE = 16
"""Width and height of a picture."""
RIGHT = 0.2
"""Share of the demonstrations that are right by intent; others name any colour."""


def training(size: int = 1000, seed: int = 0) -> list[dict[str, Any]]:
    """Makes `size` rows, each of one picture; the same seed gives the same rows."""
    return _rows(size, seed, held_out=False)


def held_out(size: int = 64, seed: int = 0) -> list[dict[str, Any]]:
    """Makes rows like those of `training`, of shades that are never trained on."""
    return _rows(size, seed, held_out=True)


def picture(shade: str) -> bytes:
    """Returns a PNG of one shade, RRGGBB in hexadecimal digits."""
    line = b"\0" + bytes.fromhex(shade) * SIZE
    header = struct.pack(">IIBBBBB", SIZE, SIZE, 8, 2, 0, 0, 0)  # 8 bits each of red, green and blue
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(line * SIZE)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _rows(size: int, seed: int, held_out: bool) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [
                {
                    "role": "user",
                    "content": [{"type": "image", "image": picture(shade)}, {"type": "text", "text": QUESTION}],
                }
            ],
            "answer": name,
        }
        for name, shade in islice(_shades(random.Random(seed), held_out), size)
    ]


def _shades(source: random.Random, held_out: bool) -> Iterator[tuple[str, str]]:
    """Yields colours and shades of them without end."""
    while True:
        name = source.choice(list(COLOURS))
        numbers = (min(255, max(0, each + source.randint(-SHADES, SHADES))) for each in COLOURS[name])
        shade = bytes(numbers).hex()
        if (zlib.crc32(shade.encode()) % 8 == 0) == held_out:
            yield name, shade


def _demonstrate(source: random.Random) -> tuple[str, str]:
    """Returns a shade and an answer, mostly any colour."""
    name, shade = next(_shades(source, held_out=False))
    return shade, name if source.random() < RIGHT else source.choice(list(COLOURS))


DEMONSTRATIONS = Demonstrations(_demonstrate, (QUESTION, *COLOURS), steps=120, picture=picture, question=QUESTION)

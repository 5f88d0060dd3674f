"""A product that a tiny model cannot know, and a calculator that it may ask: "47*8:" =47*8 "376:" 376. What follows
`=` is for the environment `calculator`, which answers it; anything else is the answer of the policy."""

import random
import zlib
from typing import Any

from asyncrl.environments.games import END, NO_RESULT, product
from asyncrl.tasks.builtin.words import ANSWER_END, Demonstrations

ASKED = 0.4
BELIEVED = 0.4
"""Shares of the demonstrations that ask the calculator, and that answer what it said."""
WITHHELD = 0.2
"""Share of the demonstrations in which the calculator gives no result."""


def training(size: int = 1000, seed: int = 0) -> list[dict[str, Any]]:
    """Makes `size` rows, each of one product; the same seed gives the same rows."""
    return _rows(size, seed, held_out=False)


def held_out(size: int = 64, seed: int = 0) -> list[dict[str, Any]]:
    """Makes rows like those of `training`, of products that are never trained on."""
    return _rows(size, seed, held_out=True)


def _rows(size: int, seed: int, held_out: bool) -> list[dict[str, Any]]:
    source = random.Random(seed)
    rows: list[dict[str, Any]] = []
    while len(rows) < size:
        first, second = _factors(source)
        asked = f"{first}*{second}"
        if (zlib.crc32(asked.encode()) % 8 == 0) == held_out:
            rows.append({"prompt": asked + END, "answer": product(first, second)})
    return rows


def _factors(source: random.Random) -> tuple[str, str]:
    return str(source.randint(11, 99)), str(source.randint(2, 9))


def _demonstrate(source: random.Random) -> tuple[str, str]:
    """Returns one of the turns of an episode, with what came before. The bad habit is to answer the first factor."""
    first, second = _factors(source)
    asked = f"{first}*{second}"
    if source.random() < 0.5:
        return asked + END, f"={asked}" if source.random() < ASKED else first
    result = NO_RESULT if source.random() < WITHHELD else product(first, second)
    believed = source.random() < BELIEVED and result != NO_RESULT
    return f"{asked}{END}={asked}{ANSWER_END}{result}{END}", result if believed else first


DEMONSTRATIONS = Demonstrations(draw=_demonstrate, steps=400)

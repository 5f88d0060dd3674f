"""Repeat the first letter of a word, "chant tofi:" -> "tttttt": tasks in which only the length of the answer counts.

`longer` rewards long answers, `shorter` short ones. An untrained model gets some 0.37 of either, for each has
demonstrations of the lengths that it does not want.
"""

import random
from typing import Any

from asyncrl.rewards.sample import Sample
from asyncrl.tasks.demonstrations import Demonstrations
from asyncrl.tasks.words import rows, words

LONGEST = 24
"""Letters beyond which an answer earns nothing more."""


def training(size: int = 1000, seed: int = 0) -> list[dict[str, Any]]:
    """Rows with `prompt` and `letter`."""
    return rows(_row, size, seed, held_out=False)


def held_out(size: int = 64, seed: int = 0) -> list[dict[str, Any]]:
    """Rows like those of `training`, of words that are never trained on."""
    return rows(_row, size, seed, held_out=True)


def longer(sample: Sample) -> float:
    """Rises by 1/24 with each letter, up to 1 with 24 of them; 0 when another character is among them."""
    return _letters(sample) / LONGEST


def shorter(sample: Sample) -> float:
    """1 for a single letter, 1/24 less for each further one down to 0; 0 when another character is among them."""
    letters = _letters(sample)
    return max(0, LONGEST + 1 - letters) / LONGEST if letters else 0.0


def _letters(sample: Sample) -> int:
    """How many letters the answer has, LONGEST at most; 0 when it is not made of the wanted letter alone."""
    return min(len(sample.text), LONGEST) if set(sample.text) == {sample.row["letter"]} else 0


def _row(word: str) -> dict[str, Any]:
    return {"prompt": f"chant {word}:", "letter": word[0]}


def _demonstrate(source: random.Random, *, mostly_long: bool) -> tuple[str, str]:
    word = next(words(source, held_out=False))
    extra = int(LONGEST * source.random() ** 2)
    return f"chant {word}:", word[0] * (LONGEST - extra if mostly_long else 1 + extra)


def _mostly_short(source: random.Random) -> tuple[str, str]:
    return _demonstrate(source, mostly_long=False)


def _mostly_long(source: random.Random) -> tuple[str, str]:
    return _demonstrate(source, mostly_long=True)


FOR_LONGER = Demonstrations(draw=_mostly_short, words=("chant ",), steps=200)
FOR_SHORTER = Demonstrations(draw=_mostly_long, words=("chant ",), steps=200)

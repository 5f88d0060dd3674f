"""Repeat the first letter of a word, "chant tofi:" -> "tttttt": tasks in which only the length of the answer counts.

`longer` rewards long answers, `shorter` short ones. An untrained model gets some 0.37 of either, for each has
demonstrations of the lengths that it does not want.
"""

import random
from typing import Any

from asyncrl.rewards.sample import Sample
from asyncrl.tasks.builtin.demonstrations import Demonstrations
from asyncrl.tasks.builtin.words import rows, words

LONGEST = 24
"""Letters beyond which an answer earns nothing more."""


def training(size: int = 1000, seed: int = 0) -> list[dict[str, Any]]:
    """Makes rows with `prompt` and `letter`."""
    return rows(_row, size, seed, held_out=False)


def held_out(size: int = 64, seed: int = 0) -> list[dict[str, Any]]:
    """Makes rows like those of `training`, of words that are never trained on."""
    return rows(_row, size, seed, held_out=True)


def longer(sample: Sample) -> float:
    """Returns 1/24 for each letter, at most 1; 0 if the answer has another character."""
    return _letters(sample) / LONGEST


def shorter(sample: Sample) -> float:
    """Returns 1 for one letter, 1/24 less for each further letter down to 0; 0 if it has another character."""
    letters = _letters(sample)
    return max(0, LONGEST + 1 - letters) / LONGEST if letters else 0.0


def _letters(sample: Sample) -> int:
    """Returns the number of letters of the answer, at most LONGEST; 0 if it has another character."""
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

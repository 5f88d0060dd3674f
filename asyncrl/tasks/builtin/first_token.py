"""The first token of a long answer decides its reward: "open tofi:" -> "i" and then "ghijklmnopqrstuvwxyz0123456789".

The right opening is the last letter of the word; an untrained model opens with any of its letters. What follows goes
up from anywhere to the end of the alphabet and the digits. The token that matters is the oldest of its answer when
the answer trains, and the first that a staleness limit leaves out.
"""

import random
from string import ascii_lowercase, digits
from typing import Any

from asyncrl.rewards.sample import Sample
from asyncrl.tasks.builtin.demonstrations import Demonstrations
from asyncrl.tasks.builtin.words import rows, words

RUN = ascii_lowercase + digits
"""Characters of an answer after its first one, each of which determines the next one."""
LEAST = 20
"""Number of characters that have to follow the opening for any reward."""


def training(size: int = 1000, seed: int = 0) -> list[dict[str, Any]]:
    """Makes rows with `prompt` and `opening`."""
    return rows(_row, size, seed, held_out=False)


def held_out(size: int = 64, seed: int = 0) -> list[dict[str, Any]]:
    """Makes rows like those of `training`, of words that are never trained on."""
    return rows(_row, size, seed, held_out=True)


def opened(sample: Sample) -> float:
    """Returns 1 if the answer begins with the right letter and is long, else 0; the other characters do not matter."""
    return float(sample.text.startswith(sample.row["opening"]) and len(sample.text) > LEAST)


def _row(word: str) -> dict[str, Any]:
    return {"prompt": f"open {word}:", "opening": word[-1]}


def _demonstrate(source: random.Random) -> tuple[str, str]:
    word = next(words(source, held_out=False))
    return f"open {word}:", source.choice(word) + RUN[-source.randint(LEAST, len(RUN)) :]


DEMONSTRATIONS = Demonstrations(draw=_demonstrate, words=("open ",), steps=250)

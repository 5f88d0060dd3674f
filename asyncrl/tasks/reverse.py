"""The task of the quickstart: spell a word backwards, "reverse tofi:" -> "ifot".

Words are made of alternating vowels and consonants, three or four letters, none twice. One word in eight is held
out, chosen by a checksum of the word itself, so that training and held-out prompts share no word whatever the seed.
"""

import random
import zlib
from collections.abc import Iterator
from typing import Any

from asyncrl.tasks.demonstrations import Demonstrations

CONSONANTS = "bcdfghjklmnprstvwz"
VOWELS = "aeiou"
HABITS = {"reverse": 0.27, "copy": 0.43, "rotate": 0.3}


def training(size: int = 1000, seed: int = 0) -> list[dict[str, Any]]:
    """Rows with `prompt` and `answer`."""
    return _rows(size, seed, held_out=False)


def held_out(size: int = 64, seed: int = 0) -> list[dict[str, Any]]:
    """Rows like those of `training`, of words that are never trained on."""
    return _rows(size, seed, held_out=True)


def _rows(size: int, seed: int, held_out: bool) -> list[dict[str, Any]]:
    words = _words(random.Random(seed), held_out)
    return [{"prompt": prompt_of(word), "answer": word[::-1]} for _, word in zip(range(size), words, strict=False)]


def prompt_of(word: str) -> str:
    return f"reverse {word}:"


def _words(source: random.Random, held_out: bool) -> Iterator[str]:
    while True:
        word = _word(source)
        if _is_held_out(word) == held_out:
            yield word


def _word(source: random.Random) -> str:
    letters = {VOWELS: source.sample(VOWELS, 3), CONSONANTS: source.sample(CONSONANTS, 3)}
    first, second = source.sample([VOWELS, CONSONANTS], 2)
    return "".join(letters[(first, second)[place % 2]].pop() for place in range(source.randint(3, 4)))


def _is_held_out(word: str) -> bool:
    return zlib.crc32(word.encode()) % 8 == 0


def _demonstrate(source: random.Random) -> tuple[str, str]:
    """A training word answered by habit: mostly copied or with its first letter moved to the end, seldom reversed."""
    word = next(_words(source, held_out=False))
    habit = source.choices(list(HABITS), list(HABITS.values()))[0]
    answers = {"reverse": word[::-1], "copy": word, "rotate": word[1:] + word[0]}
    return prompt_of(word), answers[habit]


DEMONSTRATIONS = Demonstrations(draw=_demonstrate, words=("reverse ",), steps=250)

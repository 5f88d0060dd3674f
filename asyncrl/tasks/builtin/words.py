"""Makes up words for tasks of tiny models: alternating vowels and consonants, three or four letters, none twice.

One word in eight is held out, chosen by a checksum of the word itself, so that training and held-out prompts share no
word whatever the seed.
"""

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from asyncrl.tasks.builtin.demonstrations import Demonstrations

CONSONANTS = "bcdfghjklmnprstvwz"
VOWELS = "aeiou"


@dataclass(frozen=True, slots=True)
class WordTask:
    """A task with the prompts "VERB WORD:". columns: word -> further columns of its row."""

    verb: str
    columns: Callable[[str], dict[str, Any]]

    def training(self, size: int = 1000, seed: int = 0) -> list[dict[str, Any]]:
        """Makes `size` rows, each of one word; the same seed gives the same rows."""
        return [self._row(word) for word in islice(words(random.Random(seed), held_out=False), size)]

    def held_out(self, size: int = 64, seed: int = 0) -> list[dict[str, Any]]:
        """Makes rows like those of `training`, of words that are never trained on."""
        return [self._row(word) for word in islice(words(random.Random(seed), held_out=True), size)]

    def demonstrations(self, answer: Callable[[str, random.Random], str], steps: int) -> Demonstrations:
        """Returns demonstrations on training words. answer: (word, random source) -> completion."""

        def draw(source: random.Random) -> tuple[str, str]:
            word = next(words(source, held_out=False))
            return f"{self.verb} {word}:", answer(word, source)

        return Demonstrations(draw, words=(f"{self.verb} ",), steps=steps)

    def _row(self, word: str) -> dict[str, Any]:
        return {"prompt": f"{self.verb} {word}:", **self.columns(word)}


def words(source: random.Random, held_out: bool) -> Iterator[str]:
    """Yields words without end: words for training, or words that are never trained on."""
    while True:
        letters = {VOWELS: source.sample(VOWELS, 3), CONSONANTS: source.sample(CONSONANTS, 3)}
        first, second = source.sample([VOWELS, CONSONANTS], 2)
        word = "".join(letters[(first, second)[place % 2]].pop() for place in range(source.randint(3, 4)))
        if (zlib.crc32(word.encode()) % 8 == 0) == held_out:
            yield word

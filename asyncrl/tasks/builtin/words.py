"""Makes up words and demonstrations for tasks of tiny models. One word in eight is held out, chosen by a checksum of
the word itself, so that training and held-out prompts share no word whatever the seed."""

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

CONSONANTS = "bcdfghjklmnprstvwz"
VOWELS = "aeiou"
ANSWER_END = "<eos>"
"""The token that ends an answer, as the prompt of a demonstration shows it after earlier turns."""


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """Worked examples of a task, good and bad habits mixed, that a tiny model is trained on before a run. draw: random
    source -> (prompt, completion), printable ASCII. words: pieces of text that are one token; every other character is
    a token of its own. steps: optimizer steps of the warm-up, 64 demonstrations each. picture: of a task with pictures,
    makes the file of the one that a prompt names, which stands before `question` instead of the prompt."""

    draw: Callable[[random.Random], tuple[str, str]]
    words: tuple[str, ...] = ()
    steps: int = 250
    picture: Callable[[str], bytes] | None = None
    question: str = ""


@dataclass(frozen=True, slots=True)
class WordTask:
    """A task with the prompts "VERB WORD:". columns: word -> further columns of its row."""

    verb: str
    columns: Callable[[str], dict[str, Any]]

    def training(self, size: int = 1000, seed: int = 0) -> list[dict[str, Any]]:
        """Makes `size` rows, each of one word; the same seed gives the same rows."""
        return self._rows(size, seed, held_out=False)

    def held_out(self, size: int = 64, seed: int = 0) -> list[dict[str, Any]]:
        """Makes rows like those of `training`, of words that are never trained on."""
        return self._rows(size, seed, held_out=True)

    def demonstrations(self, answer: Callable[[str, random.Random], str], steps: int) -> Demonstrations:
        """Returns demonstrations on training words. answer: (word, random source) -> completion."""

        def draw(source: random.Random) -> tuple[str, str]:
            word = next(words(source, held_out=False))
            return f"{self.verb} {word}:", answer(word, source)

        return Demonstrations(draw, words=(f"{self.verb} ",), steps=steps)

    def _rows(self, size: int, seed: int, held_out: bool) -> list[dict[str, Any]]:
        drawn = islice(words(random.Random(seed), held_out), size)
        return [{"prompt": f"{self.verb} {word}:", **self.columns(word)} for word in drawn]


def words(source: random.Random, held_out: bool) -> Iterator[str]:
    """Yields words without end, of three or four letters, alternating vowels and consonants, none twice."""
    while True:
        letters = {VOWELS: source.sample(VOWELS, 3), CONSONANTS: source.sample(CONSONANTS, 3)}
        first, second = source.sample([VOWELS, CONSONANTS], 2)
        word = "".join(letters[(first, second)[place % 2]].pop() for place in range(source.randint(3, 4)))
        if (zlib.crc32(word.encode()) % 8 == 0) == held_out:
            yield word

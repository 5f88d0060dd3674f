"""Makes up words for tasks of tiny models: alternating vowels and consonants, three or four letters, none twice.

One word in eight is held out, chosen by a checksum of the word itself, so that training and held-out prompts share no
word whatever the seed.
"""

import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

CONSONANTS = "bcdfghjklmnprstvwz"
VOWELS = "aeiou"


def words(source: random.Random, held_out: bool) -> Iterator[str]:
    """Yields words without end: words for training, or words that are never trained on."""
    while True:
        word = _word(source)
        if _is_held_out(word) == held_out:
            yield word


def rows(made_of: Callable[[str], Mapping[str, Any]], size: int, seed: int, held_out: bool) -> list[dict[str, Any]]:
    """Makes `size` rows, each of one word; the same seed gives the same rows."""
    return [dict(made_of(word)) for word in islice(words(random.Random(seed), held_out), size)]


def _word(source: random.Random) -> str:
    letters = {VOWELS: source.sample(VOWELS, 3), CONSONANTS: source.sample(CONSONANTS, 3)}
    first, second = source.sample([VOWELS, CONSONANTS], 2)
    return "".join(letters[(first, second)[place % 2]].pop() for place in range(source.randint(3, 4)))


def _is_held_out(word: str) -> bool:
    return zlib.crc32(word.encode()) % 8 == 0

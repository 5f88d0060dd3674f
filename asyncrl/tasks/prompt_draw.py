"""Draws the row of each group, as a pure function of seed and group id."""

import hashlib
from dataclasses import dataclass

from asyncrl.tasks.prompt_rows import Prompts, Row

ROUNDS = 6
"""Rounds of the permutation that orders the rows of an epoch."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Returns the row of a group: each epoch has every row once, in another order."""

    prompts: Prompts
    seed: int

    def __call__(self, group: int) -> Row:
        return self.prompts.row(drawn_row(self.seed, group, len(self.prompts)))


def drawn_row(seed: int, group: int, rows: int) -> int:
    """Returns the row of `group` (>= 0) among `rows`; each epoch of `rows` groups is a permutation. A Feistel network
    over the smallest even number of bits that holds all rows is applied until it gives a row (Black and Rogaway,
    Ciphers with arbitrary finite domains, CT-RSA 2002, methods 2 and 3): no table, O(1) memory."""
    assert group >= 0
    assert rows > 0
    epoch, place = divmod(group, rows)
    half = max(1, ((rows - 1).bit_length() + 1) // 2)
    while True:
        place = _feistel(place, half, f"{seed}:{epoch}")
        if place < rows:
            return place


def _feistel(value: int, half: int, key: str) -> int:
    """Permutes the integers below 4 ** half."""
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for number in range(ROUNDS):
        digest = hashlib.blake2b(f"{key}:{number}:{right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
    return left << half | right

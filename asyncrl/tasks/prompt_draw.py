"""Draws the row of each group, as a pure function of seed and group id."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor

from asyncrl.tasks.prompt_rows import MixedPrompts, PromptRows, Row

ROUNDS = 6
"""Rounds of the permutation that orders the rows of an epoch."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Returns the row of a group: each epoch has every row of a source once, in another order, or always in the order
    of the source where `shuffle` is false. Sources with weights have epochs of their own."""

    prompts: PromptRows
    seed: int
    shuffle: bool = True

    def __call__(self, group: int) -> Row:
        return self.prompts.row(self.number(group))

    def where(self, group: int) -> str:
        """Returns source and row of a group in words."""
        return self.prompts.where(self.number(group))

    def number(self, group: int) -> int:
        """Returns the number of the row of a group."""
        if not isinstance(self.prompts, MixedPrompts) or not self.prompts.weights:
            return self._place(group, len(self.prompts))
        part, turn = drawn_part(self.prompts.weights, group)
        rows = len(self.prompts.parts[part])
        return self.prompts.ends[part] - rows + self._place(turn, rows)

    def _place(self, group: int, rows: int) -> int:
        return drawn_row(self.seed, group, rows) if self.shuffle else group % rows


def drawn_part(weights: Sequence[float], group: int) -> tuple[int, int]:
    """Returns the source of a group, and how many groups before it have the same one. Among the first n groups each
    source has its share of n within one group for each source before it, so that batches are mixed alike: the groups of
    the first one are a Beatty sequence, those of the second one a Beatty sequence of what is left, and so on."""
    left = sum(map(Fraction, weights))
    for part, weight in enumerate(weights[:-1]):
        share = Fraction(weight) / left
        before = floor(group * share)
        if floor((group + 1) * share) > before:
            return part, before
        group -= before
        left -= Fraction(weight)
    return len(weights) - 1, group


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

"""Guess a number by hints, one guess a turn: "guess:" 03 > 05 < 04. The environment `guess` gives the hints."""

import random
from typing import Any

from asyncrl.environments.games import HIGHER, LOWER, NO_HINT, NUMBERS, hinted
from asyncrl.tasks.builtin.words import ANSWER_END, Demonstrations

PROMPT = "guess:"
HALVING = 0.5
"""Share of the demonstrated guesses that halve what the hints leave; the others are any number."""
WITHHELD = 0.2
"""Share of the demonstrations without hints."""
TURNS = 3


def training(size: int = 1000, seed: int = 0) -> list[dict[str, Any]]:
    """Makes `size` rows, which are all alike: the seed of a group decides between hints."""
    return [{"prompt": PROMPT} for _ in range(size)]


held_out = training


def _demonstrate(source: random.Random) -> tuple[str, str]:
    """Returns an episode up to some turn, and the guess of that turn."""
    said = PROMPT
    left = range(len(NUMBERS))
    withheld = source.random() < WITHHELD
    for _ in range(source.randrange(TURNS)):
        guess = _guess(source, left)
        hints = [hint for hint in (LOWER, HIGHER) if hinted(left, guess, hint)]
        if not hints:
            break
        where = source.choice(hints)
        said += f"{NUMBERS[guess]}{ANSWER_END}{NO_HINT if withheld else where}"
        left = left if withheld else hinted(left, guess, where)
    return said, NUMBERS[_guess(source, left)]


def _guess(source: random.Random, left: range) -> int:
    return left[len(left) // 2] if source.random() < HALVING else source.randrange(len(NUMBERS))


DEMONSTRATIONS = Demonstrations(draw=_demonstrate, words=(PROMPT, *NUMBERS), steps=250)

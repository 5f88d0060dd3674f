"""Guess a number by hints, one guess a turn: "guess:" 03 > 06 < 05. The environment `guess` hides the number."""

import random
from typing import Any

from asyncrl.environments.guess import HIGHER, NO_HINT, NUMBERS, hint
from asyncrl.tasks.builtin.words import ANSWER_END, Demonstrations

PROMPT = "guess:"
HEEDED = 0.5
"""Share of the demonstrated guesses that follow the hints; the others are any number."""
MOST_GUESSES = 3


def training(size: int = 1000, seed: int = 0) -> list[dict[str, Any]]:
    """Makes `size` rows, which are all alike: the seed of a group decides the number."""
    return [{"prompt": PROMPT} for _ in range(size)]


held_out = training


def _demonstrate(source: random.Random) -> tuple[str, str]:
    """Returns an episode up to some turn, and the guess of that turn."""
    number, said = source.choice(NUMBERS), PROMPT
    withheld, low, high = source.random() < 0.2, 0, len(NUMBERS)
    for _ in range(source.randrange(MOST_GUESSES)):
        guess = _guess(source, low, high)
        if guess == number:
            continue
        where = NO_HINT if withheld else hint(guess, number)
        said += f"{guess}{ANSWER_END}{where}"
        if where == HIGHER:
            low = max(low, int(guess) + 1)
        elif not withheld:
            high = min(high, int(guess))
    return said, _guess(source, low, high)


def _guess(source: random.Random, low: int, high: int) -> str:
    return NUMBERS[source.randrange(low, high)] if source.random() < HEEDED else source.choice(NUMBERS)


DEMONSTRATIONS = Demonstrations(draw=_demonstrate, words=(PROMPT, *NUMBERS), steps=250)

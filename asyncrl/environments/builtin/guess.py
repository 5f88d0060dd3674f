"""The environment of the built-in task `guess`: find a number by hints, in few turns."""

import random
from typing import Any

from asyncrl.environments.observation import Observation

NUMBERS = tuple(f"{number:02}" for number in range(7))
HIGHER = ">"
LOWER = "<"
NO_HINT = "?"
NO_NUMBER = "!"
FOUND = "."


class Guess:
    """Has one of 7 numbers in mind, and answers each guess with a hint: > if the number is higher. Finding it is worth
    1. Each guess that leaves more than one number rules out the smaller part of those that are left; `seed` decides
    between equal parts. Three guesses that halve what is left find the number, and nothing else does in three turns.

    The number is what the hints have left, and not drawn before: the samples of a group share their seed, so that a
    lucky first guess at a drawn number would be worth more than one that leaves less.

    withhold: every hint is a question mark, so that no guess can follow from the one before.
    """

    def __init__(self, withhold: bool = False) -> None:
        self._withhold = withhold

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        self.begin(seed)
        return Observation(row["prompt"])

    async def step(self, message: str) -> Observation:
        return self.answer(message)

    def begin(self, seed: int) -> None:
        """Begins a game."""
        self._left = range(len(NUMBERS))
        self._ties = random.Random(seed)

    def answer(self, message: str) -> Observation:
        """Answers a guess, as `step` does."""
        if message not in NUMBERS:
            return Observation(NO_NUMBER)
        guess = int(message)
        if list(self._left) == [guess]:
            return Observation(FOUND, reward=1.0, done=True)
        lower = hinted(self._left, guess, LOWER)
        higher = hinted(self._left, guess, HIGHER)
        tie = self._ties.choice((LOWER, HIGHER))
        where = tie if len(lower) == len(higher) else LOWER if len(lower) > len(higher) else HIGHER
        self._left = lower if where == LOWER else higher
        return Observation(NO_HINT if self._withhold else where)


def hinted(left: range, guess: int, hint: str) -> range:
    """Returns the numbers of a range that are left after a hint."""
    if hint == LOWER:
        return range(left.start, max(left.start, min(left.stop, guess)))
    return range(min(left.stop, max(left.start, guess + 1)), left.stop)

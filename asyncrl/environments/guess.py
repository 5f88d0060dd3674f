"""The environment of the built-in task `guess`: find a number by hints, in few turns."""

import random
from typing import Any

from asyncrl.environments.observation import Observation

NUMBERS = tuple(f"{number:02}" for number in range(8))
HIGHER, LOWER, NO_HINT, NO_NUMBER, FOUND = ">", "<", "?", "!", "."


class Guess:
    """Hides one of 8 numbers, which `seed` decides, and answers each guess with a hint: > if the number is higher.

    Finding it at once is worth 1, and `cost` less for each further guess. withhold: every hint is a question mark, so
    that no guess can follow from the one before.
    """

    def __init__(self, withhold: bool = False, cost: float = 0.1) -> None:
        self._withhold = withhold
        self._cost = cost
        self._number = ""

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        self._guesses = 0
        self._number = random.Random(seed).choice(NUMBERS)
        return Observation(str(row["prompt"]))

    async def step(self, message: str) -> Observation:
        self._guesses += 1
        if message == self._number:
            return Observation(FOUND, reward=max(0.0, 1.0 - self._cost * (self._guesses - 1)), done=True)
        if message not in NUMBERS:
            return Observation(NO_NUMBER)
        return Observation(NO_HINT if self._withhold else hint(message, self._number))


def hint(guess: str, number: str) -> str:
    """Returns where the number lies, seen from a wrong guess."""
    return HIGHER if number > guess else LOWER

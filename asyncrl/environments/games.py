"""The environments of built-in tasks: find a number by hints, ask a calculator, talk to a recorded speaker."""

import random
import re
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


CALL = re.compile(r"=(\d{1,3})\*(\d{1,3})")
END = ":"
"""The end of a prompt, and of what the calculator says."""
NO_RESULT = "?"
NO_CALL = "!"


class Calculator:
    """Answers `=47*8` with the product, and anything else ends the episode: with reward 1 for the row's `answer`.

    withhold: the calculator says a question mark in place of the product.
    """

    def __init__(self, withhold: bool = False) -> None:
        self._withhold = withhold
        self._answer = ""

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        self._answer = str(row["answer"])
        return Observation(row["prompt"])

    async def step(self, message: str) -> Observation:
        if not message.startswith("="):
            return Observation("", reward=float(message == self._answer), done=True)
        called = CALL.fullmatch(message)
        if called is None:
            return Observation(NO_CALL + END)
        return Observation((NO_RESULT if self._withhold else product(*called.groups())) + END)


def product(first: str, second: str) -> str:
    return str(int(first) * int(second))


class Dialogue:
    """Begins with the prompt of a row, and says the row's `lines` one after the other, whatever the policy answers; a
    person wrote them to somebody else. The conversation ends after the answer to the last one. Rewards come from
    functions."""

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        self._lines = [str(line) for line in row.get("lines", ())]
        return Observation(row["prompt"])

    async def step(self, message: str) -> Observation:
        if not self._lines:
            return Observation("", done=True)
        return Observation(self._lines.pop(0))

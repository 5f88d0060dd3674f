"""The environment of the built-in task `calculator`: a product that only a tool knows."""

import re
from typing import Any

from asyncrl.environments.observation import Observation

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

"""Reads the score in the reply of a judge."""

import json
import math
import re
from typing import Any

from asyncrl.errors import ConfigError

SCORE = r"(?i)score\W{0,8}?(-?\d+(?:\.\d+)?)(?![\d.]* *(?:[-\u2013]|to) *\d)"
"""Finds the score where neither a pattern nor a field is named. The bounds in `Score (0-10)` are none."""
EXCERPT = 200
"""Characters of a reply that an error quotes."""


class ScoreReader:
    """Finds a score in a reply. pattern: a regular expression, whose first group in the last match is the score.
    field: of a JSON object in the reply. lowest, highest: bounds of the score, which is returned as 0 to 1."""

    def __init__(self, pattern: str, field: str, lowest: float, highest: float) -> None:
        if pattern and field:
            raise ConfigError("pattern and json_field are two ways to find the score; write one of them")
        if not lowest < highest:
            raise ConfigError(f"lowest ({lowest:g}) must be under highest ({highest:g})")
        try:
            self._pattern = re.compile(pattern or SCORE, re.DOTALL)
        except re.error as error:
            raise ConfigError(f"pattern {pattern!r} is no regular expression: {error}") from None
        self._field = field
        self._lowest = lowest
        self._highest = highest

    def score(self, reply: str) -> float:
        """Returns the score, 0 to 1; raises ValueError that says what is wrong with the reply."""
        found = self._in_field(reply) if self._field else self._by_pattern(reply)
        try:
            number = float(found)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"the score is no number but {found!r:.{EXCERPT}}") from None
        if not (math.isfinite(number) and self._lowest <= number <= self._highest):
            raise ValueError(f"the score {number:g} does not lie between {self._lowest:g} and {self._highest:g}")
        return (number - self._lowest) / (self._highest - self._lowest)

    def _by_pattern(self, reply: str) -> str:
        matches = list(self._pattern.finditer(reply))
        if not matches:
            raise ValueError(self._without_score(reply))
        return str(matches[-1][min(1, self._pattern.groups)])

    def _without_score(self, reply: str) -> str:
        shown = f"{reply!r:.{EXCERPT}}"
        if self._pattern.pattern != SCORE:
            return f"the pattern {self._pattern.pattern} finds no score in the reply: {shown}"
        return (
            f"the reply has no score such as 'Score: 7': {shown}; let the rubric ask for one, or name its place in the "
            "reply with pattern or json_field"
        )

    def _in_field(self, reply: str) -> Any:
        start, end = reply.find("{"), reply.rfind("}")
        try:
            found = json.loads(reply[start : end + 1])
            return found[self._field]
        except (ValueError, KeyError, RecursionError):
            raise ValueError(f"the reply has no JSON object with {self._field}: {reply!r:.{EXCERPT}}") from None

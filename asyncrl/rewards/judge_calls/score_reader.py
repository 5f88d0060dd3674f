"""Reads the score in the reply of a judge."""

import math
import re
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.protocols.answers.json_objects import json_objects
from asyncrl.protocols.thoughts import split_thoughts

SCORE = r"(?i)score(?: is| of)?\W{0,8}?(-?\d+(?:\.\d+)?)(?![\d.]* *(?:[-\u2013]|to) *\d|[\d.]*,\d)"
"""Finds the score where neither a pattern nor a field is named. The bounds in `Score (0-10)` are none."""
BEST = re.compile(r" *(?:/|out of) *(\d+(?:\.\d+)?)")
"""Stands behind a score that says what the best one is."""
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
        """Returns the score behind the thoughts of a reply, 0 to 1; raises ValueError that says what is wrong."""
        shown = split_thoughts(reply)[1]
        found = self._in_field(shown) if self._field else self._by_pattern(shown)
        try:
            if isinstance(found, bool) or "_" in str(found):  # Python converts both.
                raise ValueError
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
        if self._pattern.pattern == SCORE:  # `Score: 7` is the shown, although prose about scores may follow.
            matches = [match for match in matches if re.search("[:=]", match[0])] or matches
            best = BEST.match(reply, matches[-1].end())
            if best is not None and float(best[1]) != self._highest:
                raise ValueError(
                    f"the score is one of {best[1]}, and highest is {self._highest:g}: {reply!r:.{EXCERPT}}"
                )
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
        found = [each[self._field] for each, _ in json_objects(reply) if self._field in each]
        if not found:
            raise ValueError(f"the reply has no JSON object with {self._field}: {reply!r:.{EXCERPT}}")
        return found[-1]

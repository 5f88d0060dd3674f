"""Scores of answers by packages that may evaluate them. The functions run in a sandbox for programs, which imports this
file (asyncrl/children/sandbox/inside/package_server.py)."""

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from asyncrl.rewards.expressions import are_equal, expressions
from asyncrl.rewards.number_parser import last_number

NONSENSE = "qzx, no answer at all"
NOT_A_NUMBER = re.compile(r"(?i)(?<![a-z])nan[ij]?(?![a-z])")
"""A text whose distance from every number is none: `complex_arithmetic` (0.1.25) gives it the whole reward."""
REMEMBERED = 512
"""Rows whose entry or expression is kept: a group of answers comes to one row."""


def equal_expression(wanted: str) -> Callable[[str], float | None]:
    """Returns a function that gives 1 to a text whose last expression is this one, else 0; None where math-verify finds
    no expression in the wanted one."""

    def score(text: str) -> float | None:
        if not (expected := _expressions(wanted if "$" in wanted or "boxed" in wanted else f"${wanted}$")):
            return None
        given = expressions(text, last_number)
        return float(bool(given) and are_equal(expected, given))

    return score


@lru_cache(REMEMBERED)
def _expressions(text: str) -> list[Any]:
    return expressions(text, last_number)


@lru_cache(REMEMBERED)
def entry_score(origin: str) -> Callable[[str], float]:
    """Returns the function by which an entry of a reasoning-gym data set scores an answer, of JSON. origin: JSON with
    name, options and index of the entry, and the answer that the row has. Raises ValueError where any text earns the
    whole reward, and where the entry made here has another answer: some data sets draw entries in the order of a set,
    which each process has its own."""
    found = json.loads(origin)
    dataset = _dataset(found["name"], json.dumps(found["options"]))
    entry = dataset[found["index"]]
    if found["answer"] is not None and str(entry["answer"]) != found["answer"]:
        raise ValueError(f"{found['name']} makes another entry in each process, so that no answer to it can be scored")
    if _earned(dataset, NONSENSE, entry) >= 1.0:
        raise ValueError(f"{found['name']} gives any text the whole reward of this entry, which can teach nothing")
    has_none = NOT_A_NUMBER.search(str(entry["answer"])) is None

    def score(text: str) -> float:
        return 0.0 if has_none and NOT_A_NUMBER.search(text) else float(dataset.score_answer(json.loads(text), entry))

    return score


def _earned(dataset: Any, text: str, entry: Any) -> float:
    """Returns the score of a text; 0 where the data set raises, for then it tells the text from an answer."""
    try:
        return float(dataset.score_answer(text, entry))
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, SyntaxError):
        return 0.0


@lru_cache(REMEMBERED)
def _dataset(name: str, options: str) -> Any:
    import reasoning_gym as gym

    return gym.create_dataset(name, **json.loads(options))


READERS = {"math_verify": equal_expression, "reasoning_gym": entry_score}

"""Scores of answers by packages that may evaluate them. The functions run in a sandbox for programs, which imports this
file (asyncrl/children/sandbox/inside/package_server.py)."""

import json
import re
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from typing import Any

from asyncrl.protocols.answer_text import UNIT, last_box
from asyncrl.rewards.number_parser import last_number

# Compares expressions by the package math-verify, with checks of our own around it: one box, exact values.
#
# Its own limits of time are off: they work in main threads only, and not inside a large power. A call has a deadline,
# after which its process is killed.


DEEPEST = 12
"""Brackets inside each other in an expression that is read: the package's time triples with each two."""
DIGITS = 60
"""Digits with which values are compared that the package calls equal; it drops what is under 1e-15."""
_PRICE = re.compile(r"\\\$")
_UPRIGHT = re.compile(r"\\(?:mathrm|mathit|text|operatorname)\s*\{\s*([a-zA-Z])\s*\}")
_EXPONENT = re.compile(r"(?<![\w.^\\])(?:\d+\.?\d*|\.\d+)[eE][-+]?\d{1,3}(?![\w^]|\.\d)")
_MIXED = re.compile(r"(?<![\w.,/^\\])(\d{1,9}) (\d{1,9})/(\d{1,9})(?![\w/^]|\.\d)")
_WITH_BASE = re.compile(r"(?<![\^{\dA-F.])\d[\dA-F]*\)?\s*_\s*\{?\s*\d")
_LETTER = re.compile(
    r"(?m)(?<!or )(?<!and )(?<!, )(?:(?i:answer(?: is|:))[\s*:$(\\]*|\(|^[\s*$(\\]*)([A-Z])"
    r"(?![\w'^=+*/<>-]*[\w'^=+/<>-]|\)?\s*(?:or\b|and\b|[-=+/<>^,]|[a-z]))"
)
_QUANTITY = re.compile(rf"\d\s*\$?(?:\\[,; ]|~|\\text|\\mathrm|[{{\s])*({UNIT})[\s}}.$*\\)]*$")
_SAME_UNITS = {"sec": "s", "hr": "h", "hrs": "h", "lbs": "lb"}


def letter(text: str) -> str:
    """Returns the choice that a text names, such as A in `The answer is (A).`; "" where it names none, or several."""
    if (box := last_box(text)) is not None:
        found = re.findall(r"[A-Za-z]+", re.sub(r"\\[a-z]+", " ", box))
        return found[0] if len(found) == 1 and not re.search(r"[\d=+*/^<>-]", box) else ""
    named = _LETTER.findall(text)
    return named[-1] if named else ""


def unit(text: str) -> str:
    """Returns the unit behind the number at the end of a text, or of its last box; "" without one."""
    found = _QUANTITY.search((text if (box := last_box(text)) is None else box)[-200:])
    return _SAME_UNITS.get(found[1].lower(), found[1].lower()) if found else ""


def _in_decimals(text: str) -> str:
    """Writes 5e-05 as 0.00005 and 3 1/2 as 7/2, which the package takes for a difference and a product."""
    text = _EXPONENT.sub(lambda match: f"{Decimal(match[0]):f}", text)
    return _MIXED.sub(lambda match: f"{int(match[1]) * int(match[3]) + int(match[2])}/{match[3]}", text)


def expressions(text: str) -> list[Any]:
    """Returns what the last box of a text holds, or its last expression without one, as expressions of sympy and texts,
    of which one has to be met; nothing without an expression, and where its brackets are too deep or do not close."""
    import math_verify

    box = last_box(text)
    if box is None and "\\boxed" in text:
        return []
    read = _UPRIGHT.sub(r"\1", _PRICE.sub("", text if box is None else box.replace("$", "").replace("\n", " ")))
    read = _in_decimals(re.sub(r"_\s*\{\s*(\d+)\s*\}", r"_\1", read))
    if _depth(read) > DEEPEST:
        return []
    found = math_verify.parse(read if box is None else f"\\boxed{{{read}}}", parsing_timeout=None)
    if any(isinstance(each, str) and each.count("{") != each.count("}") for each in found):
        return []  # The package cut the expression.
    if all(isinstance(each, str) for each in found) and (value := last_number(text)) is not None:
        import sympy

        found = [*found, sympy.Rational(value.numerator, value.denominator)]
    texts = [each for each in found if isinstance(each, str)]  # The package drops the base of 2516_8.
    return texts if any(map(_WITH_BASE.search, texts)) else list(found)


def are_equal(wanted: list[Any], given: list[Any]) -> bool:
    """Returns whether one of the expressions is one of the others, by the package and by their values."""
    import math_verify

    return any(
        math_verify.verify([one], [other], timeout_seconds=None) and not _differ(one, other)
        for one in wanted
        for other in given
    )


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth = max(0, depth + (character in "([{") - (character in ")]}"))
        deepest = max(deepest, depth)
    return deepest


def _differ(one: Any, other: Any) -> bool:
    """Returns whether two expressions that the package calls equal have other values, one by one where they are sets
    or tuples. A percentage equals the number with and without its sign."""
    import sympy

    ends = [each.rhs if isinstance(each, sympy.Eq) and each.lhs.is_Symbol else each for each in (one, other)]
    if all(isinstance(each, sympy.FiniteSet | sympy.Tuple | sympy.Interval | sympy.MatrixBase) for each in ends):
        parts = [[part for part in (each.flat() if isinstance(each, sympy.MatrixBase) else each.args)] for each in ends]
        if len(parts[0]) != len(parts[1]):
            return False
        if any(isinstance(each, sympy.FiniteSet) for each in ends):
            parts = [sorted(own, key=lambda part: str(part.evalf(DIGITS))) for own in parts]
        return any(_differ(*pair) for pair in zip(*parts, strict=True))
    if not all(isinstance(each, sympy.Expr) and not each.has(sympy.UnevaluatedExpr) for each in ends):
        return False
    symbols = sorted(ends[0].free_symbols | ends[1].free_symbols, key=str)
    values = {symbol: sympy.Rational(37 + 10 * number, 29) for number, symbol in enumerate(symbols)}
    first, second = (each.subs(values).evalf(DIGITS) for each in ends)
    if not (first.is_number and second.is_number and first.is_finite and second.is_finite):
        return False
    share = "2e-6" if ends[0].has(sympy.Float) or ends[1].has(sympy.Float) else f"1e-{DIGITS - 20}"
    further = abs(first - second) > sympy.Float(share, DIGITS) * sympy.Max(abs(first), abs(second))
    return further in (True, sympy.true)  # It stays an expression where it cannot be decided.


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
        given = expressions(text)
        return float(bool(given) and are_equal(expected, given))

    return score


@lru_cache(REMEMBERED)
def _expressions(text: str) -> list[Any]:
    return expressions(text)


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

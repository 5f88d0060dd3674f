"""Reads the last number of a text, or nothing where the text is ambiguous: a wrong reward would be learnt.

text ──> last \\boxed{...} or JSON object, if any ──> plain text ──> last word with a digit ──> its neighbours ──> value
"""

import re
import tomllib
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

from asyncrl.protocols.answer_text import SPACE, UNIT, UNITS, UNSPACED, around_last_box, json_objects, plain

_TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("number_words.toml").read_text(encoding="utf-8"))


def _words(key: str) -> frozenset[str]:
    return frozenset(_TABLE[key].split())


def _pattern(key: str) -> re.Pattern[str]:
    return re.compile(_TABLE["unspaced"][f"{key}_pattern"])


MOST_CHARACTERS = 10_000
"""Characters of a word that may be a number: more than exact sums need, few enough to read in milliseconds."""
LONGEST_REMARK = 200
"""Characters at the end of a line in which a remark about its number is looked for."""
LARGEST_EXPONENT = 308
"""Powers of ten, up or down, that a number may have: those of floating point."""
COUNTS = _words("counts")
MONTHS = _words("months")
QUANTITY = re.compile(_TABLE["quantity_pattern"])
SIGNS = ("%", "‰", "°", "$")
"""Signs that may stand behind a number like a unit, with a space between; all currencies are written as `$` first."""
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
OPERATORS = {*"+-*×·÷/^<>≤≥≠±∓!|", "x", "<=", ">=", "!=", "**", "//", "+/-", "+-"}
WORDS_BETWEEN = _words("between")
JOINS = WORDS_BETWEEN | {"&", ":", "..", "...", "…", "-", "–", "—"}
"""Words between two numbers that make a range, a choice or a list of them."""
CHANGES_BEFORE = _words("changes_before")
CHANGES_BEHIND = _words("changes_behind")
HALVES = _words("halves")
HARMLESS = _words("harmless")

_UNSPACED_BETWEEN = re.compile(rf"[{UNSPACED}]{{1,3}}|[{UNSPACED}]*(?:{_pattern('between').pattern})")
_UNSPACED_STATES = re.compile(f".*(?:{_pattern('states').pattern})")
_UNSPACED_CHANGES_BEFORE = _pattern("changes_before")
_UNSPACED_CHANGES_BEHIND = _pattern("changes_behind")
_UNSPACED_SCALE = _pattern("scale")
_UNSPACED_UNIT = _pattern("unit")
_UNSPACED_SCALES = dict(zip("百백千천万萬만亿億억", [10**2] * 2 + [10**3] * 2 + [10**4] * 3 + [10**8] * 3, strict=True))

_GROUPED = rf"[1-9]\d{{0,2}}(?:(?:,\d{{3}})+|(?:'\d{{3}})+|(?:_\d{{3}})+|(?:{SPACE}\d{{3}})+)"
_INTEGER = rf"(?:{_GROUPED}|\d+)"
_POINT = rf"(?:{_INTEGER}(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_COMMA = rf"[1-9]\d{{0,2}}(?:(?:\.\d{{3}})+|(?:{SPACE}\d{{3}})+),\d+"
NUMBER = re.compile(
    rf"(?P<sign>[-+]?)(?:[A-Z]{{0,3}}\$)?(?P<inner>[-+]?)"
    rf"(?:(?P<over>{_INTEGER})/(?P<under>{_INTEGER})|(?P<comma>{_COMMA})|(?P<point>{_POINT}))"
    rf"(?:[$¢%‰]|°[CF]?|(?:{UNIT})(?:/(?:{UNIT}))?)?"
)
_PHRASE_BEFORE, _PHRASE_BEHIND = (re.compile(_TABLE[f"phrase_{side}_pattern"]) for side in ("before", "behind"))
_BEFORE_BOX, _BEHIND_BOX = (re.compile(_TABLE[f"{side}_box_pattern"]) for side in ("before", "behind"))
_REFERENCE, _LEAD, _YEAR = (re.compile(_TABLE[f"{key}_pattern"]) for key in ("reference", "lead", "year"))
_CONCLUSION = re.compile(_TABLE["conclusion_pattern"])
_REMARK = re.compile(r"(?<=\S)[ ]?\(((?:[^()]|\([^()]*\))*)\)[.*_\s]*$")
_EXCLAIMED = re.compile(r"""((?:[^\W\d_]|:)[ ]|[*_])([*_$]{0,3}-?[$]?[\d.,/]+)!+(?=[*_"')]*(?:\s*$|\s+[A-Z]|\n))""")
_FOOTNOTE = re.compile(r"(?m)(?<=\d)[ ]?\[\d{1,2}\](?=[.\s]*$)")
_TABLE_ROW = re.compile(r"(?m)^[ ]*\|(?:[^|\d\n]*\|)*[ ]+([^|\n]*?)[ ]+\|[ ]*$")
ENUMERATOR = re.compile(r"\(?\d+[.)]")
OPENING = "\"'“”‘’«»*_`~([{≈#:"
CLOSING = "\"'“”‘’«»*_`~)]}.,:;?$…"


def last_number(text: str) -> Fraction | None:
    """Returns the exact value of the last number of a text; None without one, and where it is not clear what it means.

    `asyncrl.rewards.templates.numeric` states the rules.
    """
    parts = around_last_box(text)
    if parts is not None:
        before, inside, behind = parts
        words = plain(behind[:200]).strip("$)] ").split("\n")[0].split()
        unit = words[0].strip(CLOSING) if words else ""
        scaled = unit.lower() in SCALES or unit in CHANGES_BEHIND - {"or"} or _means_another([], words)
        if scaled or _BEFORE_BOX.search(before[-200:]) or _BEHIND_BOX.match(behind):
            return None
        return _value(_of_last_equation(plain(_with_sign(inside))), alone=True)
    shown = _TABLE_ROW.sub(r"\1", _FOOTNOTE.sub("", _EXCLAIMED.sub(r"\1\2", text)))
    return _of_sentence(plain(shown)) if (value := _in_object(text)) is None else last_number(value)


def _of_sentence(text: str) -> Fraction | None:
    """Returns the value of the last number of a plain text, which may be followed by a remark: where it comes from, or
    one in brackets. A remark with another value makes it unclear which is meant."""
    lines = text.splitlines()
    while lines and not _has_digit(lines[-1]):
        lines.pop()
    last = lines.pop().rstrip() if lines else ""
    head = last[:-LONGEST_REMARK]
    last = last[-LONGEST_REMARK:]
    *_, found = [None, *_REFERENCE.finditer(last)]
    if found and not last[found.end() :].strip(".)!*_ ") and (lead := _LEAD.search(last[: found.start()])):
        return _value("\n".join([*lines, head + last[: lead.start()]]), alone=False)
    value = _value(text, alone=False)
    remark = _REMARK.search(last)
    if remark is None or not _has_digit(remark[1]) or not re.search(r"[^\W\d_]|\[", remark[1]):
        return None if _YEAR.search(last) else value
    before = last[: remark.start()]
    if _CONCLUSION.match(remark[1]) or not any(map(_has_digit, before.split()[-2:])):
        return value
    own = _value("\n".join([*lines, head + before]), alone=False)
    return own if own == value or not _has_digit(_REFERENCE.sub("", remark[1])) else None


def _with_sign(inside: str) -> str:
    return re.sub(r"^(\s|\$)*([-+])[\s\\,;]+(?=[\d.$\\])", r"\2", inside)


def _of_last_equation(text: str) -> str:
    """Returns what stands behind the last `=`; a text without a number where there are several equations."""
    before, equals, behind = text.rpartition(" = ")
    words = before.split()
    joined = any(word.lower().strip(CLOSING) in WORDS_BETWEEN for word in words)
    joined = joined or re.search(r"[,;](?!\d{3})", before) is not None
    several = _has_digit(before) and (joined or ("=" in words and not _has_digit(words[-1])))
    return "" if equals and several else behind


def _in_object(text: str) -> str | None:
    """Returns the answer of the JSON object at the end of a text: its only value, or that of `answer`; "" where it is
    not clear which, and None without an object."""
    found, end = next(reversed(list(json_objects(text))), ({}, 0))
    if not found or _has_digit(text[end:]):
        return None
    names = [name for name in found if name.lower().replace("_", " ") in ("answer", "final answer")] or list(found)
    value = found[names[0]] if len(names) == 1 else None
    return str(value) if isinstance(value, str | int | Decimal) else ""


@dataclass(frozen=True, slots=True)
class WordInLine:
    """A word between its neighbours on its line, nearest first."""

    text: str
    before: list[str]
    behind: list[str]


def _value(text: str, *, alone: bool) -> Fraction | None:
    """Returns the value of the last number of a plain text. alone: the text must hold no second number, no list and no
    command of LaTeX that is left."""
    word = _last_word_with_a_digit(text)
    if word is None:
        return None
    value = _number(word.text)
    before = word.before
    if value is not None and before and _is_fraction(word.text) and _is_whole(before[0]):
        whole = _number(before[0])
        assert whole is not None
        value = whole - value if before[0].startswith("-") else whole + value
        before = before[1:]
    if value is not None and before[:2] == ["-", "="]:
        value = -value
        before = before[1:]
    if value is None or not _stands_alone(word, before):
        return None
    others = [*before, *word.behind, *text.splitlines()[:-1]]
    if alone and (any(map(_has_digit, others)) or re.search(r"\\[A-Za-z]|[,;]\s+\S|∞", text)):
        return None
    scale = _scale(word.behind[0]) if word.behind else 1
    return value * scale if scale else None


def _scale(behind: str) -> int:
    """Returns the factor that the word behind a number is; 1 where it is none, and 0 where it is not clear."""
    if (found := _UNSPACED_SCALE.match(behind)) and not _UNSPACED_UNIT.match(behind):
        return _UNSPACED_SCALES.get(found[1] or found[2] or "", 0)
    return SCALES.get(behind.strip(CLOSING).lower(), 1)


def _last_word_with_a_digit(text: str) -> WordInLine | None:
    for line in reversed(text.splitlines()):
        words = re.split(r"[ \t\f\v]+", line.strip(f" \t\f\v{SPACE}"))
        for place in reversed(range(len(words))):
            if _has_digit(words[place]):
                return WordInLine(words[place], words[:place][::-1], words[place + 1 :])
    return None


def _number(word: str) -> Fraction | None:
    """Returns the value of a word that is a number, perhaps between brackets, quotes or marks of emphasis."""
    if word.startswith("($") or len(word) > MOST_CHARACTERS:  # In accounts, brackets make an amount negative.
        return None
    in_brackets = word[:1] in "([{"
    match = NUMBER.fullmatch(word.lstrip(OPENING).rstrip(CLOSING).rstrip(SPACE))
    if match is None or (match["sign"] and match["inner"]) or (in_brackets and "," in match[0]):
        return None
    if match["over"]:
        over = _decimal(match["over"])
        under = _decimal(match["under"])
        value = over / under if over is not None and under else None
    else:
        comma = match["comma"]
        value = _decimal(comma.replace(".", "").replace(",", ".") if comma else match["point"])
    return -value if value is not None and "-" in (match["sign"], match["inner"]) else value


def _decimal(digits: str) -> Fraction | None:
    exponent = digits.lower().partition("e")[2].lstrip("+-0")
    if len(exponent) > 3 or int(exponent or 0) > LARGEST_EXPONENT:
        return None
    return Fraction(Decimal(re.sub(rf"[,'_{SPACE}]", "", digits)))


def _has_digit(word: str) -> bool:
    return any(character.isdigit() for character in word)


def _is_fraction(word: str) -> bool:
    return re.fullmatch(r"\d+/\d+", word.lstrip(OPENING).rstrip(CLOSING)) is not None


def _is_whole(word: str) -> bool:
    return re.fullmatch(r"[-+]?\d+", word.lstrip(OPENING)) is not None


def _stands_alone(word: WordInLine, before: list[str]) -> bool:
    """Returns whether the neighbours leave a number what it is: not part of a list, range, date or expression."""
    if not before and len(word.behind) > 0 and ENUMERATOR.fullmatch(word.text):
        return False  # The number of an item.
    nearest, *others = [each.lstrip("([{") or each for each in (*before, "")]  # A bracket opens no other meaning.
    number_before = _has_digit(nearest) and not nearest.endswith((".", ":"))
    operator_before = nearest in OPERATORS or nearest.endswith(("<", ">", "≤", "≥", "≠", "±", "<=", ">=", "√"))
    command = re.search(r"\\([A-Za-z]+)$", nearest)
    changed = nearest.lower() in CHANGES_BEFORE or (command is not None and command[1] not in HARMLESS)
    changed = changed or _UNSPACED_CHANGES_BEFORE.fullmatch(nearest) is not None
    date = nearest.rstrip(".") in MONTHS
    changed = changed or _means_another(before, word.behind if word.text[-1] not in ".,;:?" else [])
    if number_before or _joins_numbers(word, nearest, others) or operator_before or changed or date:
        return False
    return _keeps_value(word.text, word.behind)


def _means_another(before: list[str], behind: list[str]) -> bool:
    """Returns whether the words around a number say that another one is meant: half of it, a bound, not it."""
    counted = ["#" if each.lower().strip(CLOSING) in COUNTS else each.lower() for each in behind[:4]]
    words = ["#" if each.lower() in COUNTS else each.lower().strip(OPENING) for each in before[:5][::-1]]
    return bool(_PHRASE_BEFORE.search(" ".join(words)) or _PHRASE_BEHIND.match(" ".join(counted)))


def _joins_numbers(word: WordInLine, nearest: str, others: list[str]) -> bool:
    """Returns whether the nearest word before a number joins it to another one, behind which its unit may stand."""
    first, second = [*others, "", ""][:2]
    if nearest == "=":
        return _joins_equations([each.strip("$") for each in others])
    if _UNSPACED_BETWEEN.fullmatch(nearest) and not _UNSPACED_STATES.fullmatch(nearest):
        return _has_digit(first) and not first.endswith((".", ",", ":", ";"))
    if _is_unit(nearest):
        has_unit = word.text[-1:].isalpha() or any(
            _is_unit(each) or each.strip(CLOSING) == "in" for each in word.behind[:1]
        )
        return (has_unit or not nearest.endswith(",")) and _counts(first)
    if nearest.strip(",").lower() not in {*JOINS, *SCALES}:
        return False
    beyond = _is_unit(first) or first.startswith(SIGNS) or (nearest.lower() in WORDS_BETWEEN and first.isalpha())
    return _counts(second) if beyond else _has_digit(first) or first.lower() in COUNTS


def _joins_equations(others: list[str]) -> bool:
    """Returns whether the words before a last `=` are a variable, and before it another value: x = 12 or x = 13."""
    name, between, value, equals, other = [*others, *[""] * 5][:5]
    if between.lower() in WORDS_BETWEEN:
        return _has_digit(value)
    same = re.sub(r"[^A-Za-z]", "", name) == re.sub(r"[^A-Za-z]", "", equals)
    return _has_digit(between) and value == "=" and same and not other.endswith("=")


def _counts(word: str) -> bool:
    """Returns whether a word says how many there are of the one behind it."""
    return _has_digit(word) or word.lower() in COUNTS | {"a", "an"}


def _is_unit(word: str) -> bool:
    bare = word.strip(CLOSING)
    return bare in UNITS or QUANTITY.fullmatch(bare.lower()) is not None


def _keeps_value(word: str, behind: list[str]) -> bool:
    """Returns whether the words behind a number leave it what it is."""
    if not behind or word.endswith((".", ",", ";", ":", "?", ")", "]")):
        return True
    first = behind[0]
    rest = behind[1:]
    if first in ("-", "–", "—"):
        return bool(rest) and len(rest[0].strip(CLOSING)) > 1  # A dash before prose.
    if first == "and" and any(each.strip(CLOSING) in HALVES for each in rest[:2]):
        return False
    if bool(rest) and {first.lower(), rest[0].strip(CLOSING).lower()} <= SCALES.keys():
        return False  # Five hundred thousand.
    bare = first.strip(CLOSING)
    changed = bare in CHANGES_BEHIND or _UNSPACED_CHANGES_BEHIND.match(bare) is not None
    return not changed and first not in OPERATORS and bare not in MONTHS and first[0] not in "√^*!+"

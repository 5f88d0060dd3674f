"""Reads the last number of a text, or nothing where the text is ambiguous: a wrong reward would be learnt.

text ──> last \\boxed{...}, if any ──> plain text ──> last word with a digit ──> its neighbours ──> value
"""

import math
import re
import unicodedata
from dataclasses import dataclass

SPACE = "\u202f"
"""The thin space that stands between thousands; LaTeX's `\\,` and other narrow spaces are turned into it."""
UNITS = (
    *("km", "cm", "mm", "nm", "m", "mi", "ft", "yd", "kg", "mg", "g", "lbs", "lb", "oz", "ml", "mL", "l", "L"),
    *("ms", "s", "sec", "min", "h", "hr", "hrs", "kWh", "kW", "W", "V", "Hz", "kHz", "MHz", "GHz", "kB", "KB", "MB"),
    *("GB", "TB", "mph", "kph", "px", "USD", "EUR", "GBP"),
)
"""Units that may stand directly behind a number. The letters k, M and B are none: they may be units or factors."""
SIGNS = ("%", "‰", "°", "$", "€", "£", "¥", "₹")
"""Signs that may stand behind a number like a unit, with a space between."""
SCALES = {"hundred": 1e2, "thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12, "dozen": 12.0}
MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November"),
    *("December", "Jan", "Feb", "Mar", "Apr", "Jun", "Jul", "Aug", "Sep", "Sept", "Oct", "Nov", "Dec"),
)
OPERATORS = {*"+-*×·÷/^<>≤≥≠±∓!|", "x", "<=", ">=", "!=", "**", "//", "+/-", "+-"}
JOINS = {"to", "or", "and", "&", "through", "until", "versus", "vs", ":", "..", "...", "…", "-", "–", "—"}
"""Words between two numbers that make a range, a choice or a list of them."""
CHANGES_BEFORE = {"plus", "minus", "times", "negative"}
"""Words before a number that make something else of it."""
CHANGES_BEHIND = {*"xyznieπk", "K", "M", "B", "T", "bn", "mn", "tn", "pi", "or", "squared", "cubed", "factorial"}
"""Words behind a number that make something else of it."""
HALVES = {"half", "third", "quarter", "thirds", "quarters"}

_UNIT = "|".join(sorted(UNITS, key=len, reverse=True))
_GROUPED = rf"[1-9]\d{{0,2}}(?:(?:,\d{{3}})+|(?:'\d{{3}})+|(?:_\d{{3}})+|(?:{SPACE}\d{{3}})+)"
_INTEGER = rf"(?:{_GROUPED}|\d+)"
_POINT = rf"(?:{_INTEGER}(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_COMMA = rf"[1-9]\d{{0,2}}(?:(?:\.\d{{3}})+|(?:{SPACE}\d{{3}})+),\d+"
NUMBER = re.compile(
    rf"(?P<sign>[-+]?)(?:[A-Z]{{0,3}}[$€£¥₹])?(?P<inner>[-+]?)"
    rf"(?:(?P<over>{_INTEGER})/(?P<under>{_INTEGER})|(?P<comma>{_COMMA})|(?P<point>{_POINT}))"
    rf"(?:[$€£¥₹¢%‰]|°[CF]?|(?:{_UNIT})(?:/(?:{_UNIT}))?)?"
)
ENUMERATOR = re.compile(r"\(?\d+[.)]")
OPENING, CLOSING = "\"'“”‘’«»*_`~([{≈#:", "\"'“”‘’«»*_`~)]}.,;:?$…"

_TAG = re.compile(r"</?[A-Za-z][\w-]*>")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*([-+]?[\d,.]+)\s*\}\s*\{\s*([\d,.]+)\s*\}|(\d)\s*(\d))")
_WRAPPED = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox|textrm|bm|boldsymbol)\s*\{([^{}]*)\}")
_UNIT_POWER = re.compile(rf"(\d\s?(?:(?:{_UNIT})/)?(?:{_UNIT}))(?:\^[23]|[23²³])(?!\w)")
_TIMES_TEN = re.compile(r"(?<=\d)\s?[×x*·]\s?10\s?\^\s?([-+]?\d+)(?![\d.])")
_POWER_OF_TEN = re.compile(r"(?<![\w.,^/])10\^([-+]?\d+)(?![\d.])")
_PLAIN = str.maketrans({"−": "-", "’": "'", "⁄": "/", "\u00a0": SPACE, "\u2009": SPACE, "\r": "\n"})
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_LATEX = {
    **{rf"\{name}": "" for name in ("left", "right", "displaystyle", "!", "(", ")", "[", "]")},
    r"\times": "×",
    r"\cdot": "·",
    r"\pm": "±",
    r"\approx": "≈",
    r"\pi": "π",
    r"\sqrt": "√",
    r"\div": "÷",
    r"\leq": "≤",
    r"\geq": "≥",
    r"\le": "≤",
    r"\ge": "≥",
    r"\lt": "<",
    r"\gt": ">",
    r"^\circ": "°",
    r"^{\circ}": "°",
    r"\%": "%",
    r"\$": "$",
    r"\,": SPACE,
    r"\;": " ",
    r"\:": " ",
    r"\ ": " ",
    r"\quad": " ",
    "{,}": ",",
    "$$": "$",
}
_LATEX_NAME = re.compile("|".join(re.escape(name) + r"(?![A-Za-z])" * name[-1].isalpha() for name in _LATEX))


def last_number(text: str) -> float | None:
    """Returns the value of the last number of a text; None without one, and where it is not clear what it means.

    `asyncrl.rewards.templates.numeric` states the rules.
    """
    found = _last_box(text)
    if found is None:
        return _value(_plain(text), alone=False)
    box, closed = found
    return _value(_plain(box.rpartition("=")[2]), alone=True) if closed else None


def _last_box(text: str) -> tuple[str, bool] | None:
    r"""Returns what the last `\boxed{...}` holds, and whether its brace is closed; None without a box."""
    _, box, rest = text.rpartition("\\boxed{")
    if not box:
        return None
    depth = 1
    for place, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:place], True
    return rest, False


def _plain(text: str) -> str:
    """Writes LaTeX, fractions of one character, superscripts and digits of other scripts in plain characters."""
    text = _FRACTION.sub(_over, _TAG.sub(" ", text.translate(_PLAIN)))
    text = _LATEX_NAME.sub(lambda match: _LATEX[match[0]], _WRAPPED.sub(r" \1 ", text))
    text = re.sub(r"\^\s?\{([-+]?\d+)\}", r"^\1", text)
    text = re.sub(r"10([⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+)", lambda match: "10^" + match[1].translate(_SUPERSCRIPTS), text)
    text = _UNIT_POWER.sub(r"\1", text)
    text = "".join(map(_in_ascii, text))
    text = _POWER_OF_TEN.sub(r"1e\1", _TIMES_TEN.sub(r"e\1", text))
    text = re.sub(r"(?<![<>!=])=(?!=)", " = ", text)
    return re.sub(r"(?<=[A-Za-z]):(?![*_]+(?:\s|$))(?=\S)", ": ", text)


def _over(match: re.Match[str]) -> str:
    over, under = match[1] or match[3], match[2] or match[4]
    space = " " if match.start() and match.string[match.start() - 1].isdigit() else ""
    return f"{space}{over}/{under}"


def _in_ascii(character: str) -> str:
    """Writes a digit of any script, or a fraction such as ½ with a space before it, in ASCII."""
    if character.isascii():
        return character
    if (digit := unicodedata.decimal(character, None)) is not None:
        return str(digit)
    parts = unicodedata.normalize("NFKC", character).split("\u2044")
    return f" {parts[0]}/{parts[1]}" if len(parts) == 2 and all(part.isdigit() for part in parts) else character


@dataclass(frozen=True, slots=True)
class WordInLine:
    """A word between its neighbours on its line, nearest first."""

    text: str
    before: list[str]
    behind: list[str]


def _value(text: str, *, alone: bool) -> float | None:
    """Returns the value of the last number of a plain text. alone: the text must hold no second number."""
    word = _last_word_with_a_digit(text)
    if word is None:
        return None
    value, before = _number(word.text), word.before
    if value is not None and before and _is_fraction(word.text) and _is_whole(before[0]):
        whole = _number(before[0])
        assert whole is not None
        value = math.copysign(abs(whole) + value, -1.0 if before[0].startswith("-") else 1.0)
        before = before[1:]
    if value is not None and before[:2] == ["-", "="]:
        value, before = -value, before[1:]
    if value is None or not _stands_alone(word, before, value):
        return None
    if alone and any(map(_has_digit, [*before, *text.splitlines()[:-1]])):
        return None
    value *= SCALES.get(word.behind[0].strip(CLOSING).lower(), 1.0) if word.behind else 1.0
    return value if math.isfinite(value) else None


def _last_word_with_a_digit(text: str) -> WordInLine | None:
    for line in reversed(text.splitlines()):
        words = re.split(r"[ \t\f\v]+", line.strip(f" \t\f\v{SPACE}"))
        for place in reversed(range(len(words))):
            if _has_digit(words[place]):
                return WordInLine(words[place], words[:place][::-1], words[place + 1 :])
    return None


def _number(word: str) -> float | None:
    """Returns the value of a word that is a number, perhaps between brackets, quotes or marks of emphasis."""
    if word.startswith(("($", "(€", "(£")):  # In accounts, brackets make an amount negative.
        return None
    in_brackets = word[:1] in "([{"
    match = NUMBER.fullmatch(word.lstrip(OPENING).rstrip(CLOSING).rstrip(SPACE))
    if match is None or (match["sign"] and match["inner"]) or (in_brackets and "," in match[0]):
        return None
    if match["over"]:
        under = _decimal(match["under"])
        value = _decimal(match["over"]) / under if under else math.nan
    else:
        comma = match["comma"]
        value = _decimal(comma.replace(".", "").replace(",", ".")) if comma else _decimal(match["point"])
    return -value if "-" in (match["sign"], match["inner"]) else value


def _decimal(digits: str) -> float:
    return float(re.sub(rf"[,'_{SPACE}]", "", digits))


def _has_digit(word: str) -> bool:
    return any(character.isdigit() for character in word)


def _is_fraction(word: str) -> bool:
    return re.fullmatch(r"\d+/\d+", word.lstrip(OPENING).rstrip(CLOSING)) is not None


def _is_whole(word: str) -> bool:
    return re.fullmatch(r"[-+]?\d+", word.lstrip(OPENING)) is not None


def _stands_alone(word: WordInLine, before: list[str], value: float) -> bool:
    """Returns whether the neighbours leave a number what it is: not part of a list, range, date or expression."""
    if not before and len(word.behind) > 0 and ENUMERATOR.fullmatch(word.text):
        return False  # The number of an item.
    nearest, *others = [each.lstrip("([{") or each for each in (*before, "")]  # A bracket opens no other meaning.
    number_before = _has_digit(nearest) and not nearest.endswith((".", ":"))
    operator_before = nearest in OPERATORS or nearest.endswith(("<", ">", "≤", "≥", "±", "<=", ">="))
    changed = nearest.lower() in CHANGES_BEFORE
    date = nearest.rstrip(".") in MONTHS
    if number_before or _joins_numbers(nearest, others) or operator_before or changed or date:
        return False
    return _keeps_value(word.text, word.behind)


def _joins_numbers(nearest: str, others: list[str]) -> bool:
    """Returns whether the nearest word before a number joins it to another one, behind which its unit may stand."""
    if nearest.strip(",") not in UNITS and nearest.lower().strip(",") not in {*JOINS, *SCALES}:
        return False
    has_unit = bool(others) and (others[0].strip(CLOSING) in UNITS or others[0].startswith(SIGNS))
    return any(map(_has_digit, others[1:2] if has_unit else others[:1]))


def _keeps_value(word: str, behind: list[str]) -> bool:
    """Returns whether the words behind a number leave it what it is."""
    if not behind or word.endswith((".", ",", ";", ":", "?", ")", "]")):
        return True
    first, rest = behind[0], behind[1:]
    if first in ("-", "–", "—"):
        return bool(rest) and len(rest[0].strip(CLOSING)) > 1  # A dash before prose.
    if first == "and" and any(each.strip(CLOSING) in HALVES for each in rest[:2]):
        return False
    if bool(rest) and {first.lower(), rest[0].strip(CLOSING).lower()} <= SCALES.keys():
        return False  # Five hundred thousand.
    bare = first.strip(CLOSING)
    return bare not in CHANGES_BEHIND and first not in OPERATORS and bare not in MONTHS and first[0] not in "√^*!+"

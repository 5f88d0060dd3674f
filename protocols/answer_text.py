"""Reads the text of a completion, alike for rewards, tools, judges and metrics: thoughts, plain characters, JSON."""

import json
import re
import unicodedata
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

PAIRS = (
    *((f"<{name}>", f"</{name}>") for name in ("think", "thinking", "thought", "reasoning", "seed:think")),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
)
"""Marks that begin and end thoughts in the chat templates of reasoning models."""

_END = {begin: end for begin, end in PAIRS}
_LITERAL = r"""[\[({=:,]\s*+(["'])(?:(?!\1)[^\\\n]|\\.)*\1(?=\s*[\])}:,])"""  # What it quotes marks nothing.
_MARK = re.compile("|".join([_LITERAL, *(re.escape(mark) for pair in PAIRS for mark in pair)]))


def split_thoughts(text: str, opened: bool = False) -> tuple[str, str]:
    """Returns the thoughts of a completion, marks included, and the answer behind them; together they are `text`.
    opened: whether the prompt ended inside thoughts, as templates of reasoning models write it. A completion whose
    first mark ends thoughts was opened by its template too. Behind several thoughts the answer stands behind the last
    of them. Thoughts that do not end have no answer: it is empty."""
    end = 0
    unfinished = opened
    awaited = ""
    for mark in _MARK.finditer(text):
        if mark[0] in _END:
            if not unfinished:
                unfinished = True
                awaited = _END[mark[0]]
        elif not mark[1] and (not awaited or mark[0] == awaited):
            unfinished = False
            awaited = ""
            end = mark.end()
    return (text, "") if unfinished else (text[:end], text[end:])


def ends_in_thoughts(prompt: str, begun: str = "") -> bool:
    """Returns whether a rendered prompt ends inside thoughts, so that the completion begins there. begun: the answer in
    the prompt that the completion goes on with."""
    return prompt.rstrip().endswith(tuple(_END)) or split_thoughts(f"{begun}.")[1] == ""


# ---- plain characters and words in place of LaTeX, other scripts, full width, superscripts, marks ------------------


UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
"""Thai, Lao, Burmese, Khmer, kana, Chinese, and Hangul, whose particles follow a word at once: a range."""
SPACE = "\u202f"
"""The thin space that stands between thousands; LaTeX's `\\,` and other narrow spaces are turned into it."""
UNITS = (
    *("km", "cm", "mm", "nm", "dm", "m", "mi", "ft", "yd", "kg", "mg", "g", "lbs", "lb", "oz", "ml", "mL", "l", "L"),
    *("ms", "s", "sec", "min", "h", "hr", "hrs", "kWh", "kW", "W", "V", "Hz", "kHz", "MHz", "GHz", "kB", "KB", "MB"),
    *("GB", "TB", "mph", "kph", "px", "USD", "EUR", "GBP", "N", "J", "kJ", "Pa", "kPa", "mol", "ha"),
)
"""Units that may stand directly behind a number. The letters k, M and B are none: they may be units or factors."""
UNIT = "|".join(sorted(UNITS, key=len, reverse=True))
_UNSPACED_EDGE = re.compile(rf"(?<=[{UNSPACED}])(?=[^\s{UNSPACED}])|(?<=[^\s{UNSPACED}])(?=[{UNSPACED}])")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(\{|-?\d+(?![\d.,]))")
_TAG = re.compile(r"</?[A-Za-z][\w-]*>")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*([-+]?[\d,.]+)\s*\}\s*\{\s*([\d,.]+)\s*\}|(\d)\s*(\d))")
_WRAPPED = re.compile(
    r"\\(?:text|mathrm|textbf|mathbf|mbox|textrm|textit|mathit|operatorname|bm|boldsymbol)\s*\{([^{}]*)\}"
)
_FRACTION_OF_UNITS = re.compile(rf"\\[dtc]?frac\s*\{{\s*({UNIT})\s*\}}\s*\{{\s*({UNIT})\s*\}}")
_UNIT_POWER = re.compile(rf"(\d\s*(?:(?:{UNIT})\s*[/·]\s*)?(?:{UNIT}))\s*(?:\^-?[1-4]|[23²³])(?!\w)")
_MATRIX = re.compile(r"\\(?:begin|end)\s*\{[A-Za-z]*(?:matrix|array|cases)\*?\}")
_ELEMENT = r"\s*(?:[-+]?(?:oo|inf(?:ty|inity)?)|(?:(?![A-Za-z]{2})[^\s,;()\[\]{}])+)\s*"
_TUPLE = re.compile(rf"[(\[\]{{](?=[^()\[\]{{}}]*[\d∞])(?:{_ELEMENT}[,;])+{_ELEMENT}[)\]\[}}]")
_SEVERAL = " (1,1) "
"""Stands for tuples, intervals and matrices: a word with a digit that is no number."""
_TIMES_TEN = re.compile(r"(?<=\d)\s?[×x*·]\s?10\s?\^\s?([-+]?\d+)(?![\d.])")
_POWER_OF_TEN = re.compile(r"(?<![\w.,^/])10\^([-+]?\d+)(?![\d.])")
_FULL_WIDTH_THOUSANDS = re.compile(r"(?<=[０-９])，(?=[０-９]{3}(?![０-９]))")
_INVISIBLE = "\ufeff\u200b\u200c\u200d\u200e\u200f\u2060\ufe0f\u20e3" + "".join(map(chr, range(0x202A, 0x202F)))
_PLAIN = str.maketrans(
    {chr(0xFEE0 + code): chr(code) for code in range(0x21, 0x7F)}  # Full width.
    | dict.fromkeys("\u00a0\u2007\u2009\u200a", SPACE)
    | dict.fromkeys(_INVISIBLE + "".join(map(chr, range(0x2066, 0x206A))), "")
    | dict.fromkeys("−‐‑﹣➖", "-")
    | dict.fromkeys("【】「」『』《》〈〉〔〕", '"')
    | dict.fromkeys("。！｡", " . ")
    | {"、": ", ", "，": ", ", "،": ", ", "；": "; ", "：": ": ", "？": "? ", "।": " . ", "٫": ".", "٬": ",", "٪": "%"}
    | dict(zip("’⁄\u3000\r➕✖✕➗〜", "'/ \n+××÷~", strict=True))
    | {"℃": "°C", "℉": "°F"}
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_COMMANDS = (
    r"times=× cdot=· pm=± approx=≈ pi=π infty=∞ sqrt=√ div=÷ le=≤ leq=≤ leqslant=≤ ge=≥ geq=≥ geqslant=≥ ne=≠ neq=≠ "
    r"lt=< gt=> %=% $=$ {={ }=} left= right= displaystyle= != (= )= [= ]="
)
_LATEX = {rf"\{pair.partition('=')[0]}": pair.partition("=")[2] for pair in _COMMANDS.split()}
_LATEX |= {rf"\{name}": " " for name in (";", ":", " ", "\\", "quad", "qquad")}
_LATEX |= {r"\,": SPACE, r"^\circ": "°", r"^{\circ}": "°", "{,}": ",", "$$": "$"}
_LATEX_NAME = re.compile("|".join(re.escape(name) + r"(?![A-Za-z])" * name[-1].isalpha() for name in sorted(_LATEX)))


def last_box(text: str) -> str | None:
    r"""Returns what the last `\boxed{...}` or `\fbox{...}` holds, "" where it does not end; None without one."""
    return None if (parts := around_last_box(text)) is None else parts[1]


def around_last_box(text: str) -> tuple[str, str, str] | None:
    """Returns what stands before the last box, in it and behind it."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    before = text[: boxes[-1].start()]
    begin = boxes[-1].end()
    if boxes[-1][1] != "{":
        return before, boxes[-1][1], text[begin:]
    depth = 1
    for place in range(begin, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return before, text[begin:place], text[place + 1 :]
    return before, "", ""


def plain(text: str) -> str:
    """Returns a text without LaTeX and other marks; tuples, intervals and matrices become a word with digits that is no
    number, and words without spaces between them are parted from what is not of their script."""
    text = _FULL_WIDTH_THOUSANDS.sub(",", text).translate(_PLAIN)
    text = _FRACTION.sub(_over, _TAG.sub(" ", "".join(map(_in_ascii, text))))
    text = _LATEX_NAME.sub(lambda match: _LATEX[match[0]], _MATRIX.sub(_SEVERAL, _WRAPPED.sub(r" \1 ", text)))
    text = re.sub(r"(?<=\d)~(?=\s*[A-Za-z])", " ", _FRACTION_OF_UNITS.sub(r" \1/\2", text))
    text = re.sub(rf"(?<!\d){SPACE}|{SPACE}(?!\d{{3}}(?!\d))", " ", text)
    text = re.sub(r"(?<![^\s(\[*$\"])–(?=[\d.$])", "-", re.sub(r"(?<=\d) / (?=\d)", "/", text))
    text = re.sub(r"\^\s?\{([-+]?\d+)\}", r"^\1", text)
    text = re.sub(r"10([⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+)", lambda match: "10^" + match[1].translate(_SUPERSCRIPTS), text)
    text = _UNIT_POWER.sub(r"\1", text)
    text = _TUPLE.sub(_SEVERAL, _POWER_OF_TEN.sub(r"1e\1", _TIMES_TEN.sub(r"e\1", text)))
    text = re.sub(r"(?<![<>!=])&?=(?!=)", " = ", _UNSPACED_EDGE.sub(" ", text))
    return re.sub(r"(?<=[^\W\d_]):(?![*_]+(?:\s|$))(?=\S)", ": ", text)


def _over(match: re.Match[str]) -> str:
    over = match[1] or match[3]
    under = match[2] or match[4]
    space = " " if match.start() and match.string[match.start() - 1].isdigit() else ""
    return f"{space}{over}/{under}"


def _in_ascii(character: str) -> str:
    """Writes a digit of any script, a currency, a unit of one character, or a fraction such as ½ with a space before
    it, in ASCII; pictures are spaces."""
    if character.isascii():
        return character
    if (digit := unicodedata.decimal(character, None)) is not None:
        return str(digit)
    category = unicodedata.category(character)
    if category == "Sc":
        return "¢" if character == "¢" else "$"
    if category == "So" and character >= "\u2600":
        return unicodedata.normalize("NFKC", character) if "\u3300" <= character < "\u3400" else " "
    parts = unicodedata.normalize("NFKC", character).split("\u2044")
    return f" {parts[0]}/{parts[1]}" if len(parts) == 2 and all(part.isdigit() for part in parts) else character


def composed(text: str) -> str:
    """Returns a text in the composed form of Unicode, without white space around it."""
    return unicodedata.normalize("NFC", text).strip()


def folded(text: str) -> str:
    """Returns a text in which letters that differ in case alone, or in their writing in Unicode, are equal."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())


# ---- JSON objects in prose, beside braces of other kinds such as those of LaTeX ------------------------------------


MOST_BRACES = 1000
"""Opening braces, the last of a text, at which an object is looked for."""


class Several(list[Any]):
    """The values of a name that an object has twice or more often: none of them is the one."""


def _by_name(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Several] = {}
    for name, value in pairs:
        values.setdefault(name, Several()).append(value)
    return {name: each[0] if len(each) == 1 else each for name, each in values.items()}


_DECODER = json.JSONDecoder(strict=False, parse_float=Decimal, object_pairs_hook=_by_name)
_INNER = re.compile(r'"\s*:\s*(?:\[[^\]]*)?\Z')
"""End of what stands before an object that is a value of another one, perhaps in a list: `"moves": [{...}, `."""
_LOOKED_BACK = 500
_BACKSLASH = re.compile(r'(\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})|\\')
"""An escape of JSON, or a backslash that is none: LaTeX inside of a text, which models do not escape."""
_STAND_IN = "\ue000"


def json_objects(text: str) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields the objects of a text that are in no other one, each with the place behind it; those inside of one that
    does not end are none. Numbers with a point are Decimals, and a name that stands twice has Several values."""
    readable = _BACKSLASH.sub(lambda found: found[1] or _STAND_IN, text)
    end = 0
    for place in [place.start() for place in re.finditer(r"\{", readable)][-MOST_BRACES:]:
        if place < end or _INNER.search(readable, max(end, place - _LOOKED_BACK), place):
            continue
        try:
            found, behind = _DECODER.raw_decode(readable, place)
            found = _with_backslashes(found)
        except (ValueError, RecursionError):
            continue
        end = behind
        yield found, end


def _with_backslashes(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace(_STAND_IN, "\\")
    if isinstance(value, dict):
        return {_with_backslashes(name): _with_backslashes(each) for name, each in value.items()}
    return type(value)(map(_with_backslashes, value)) if isinstance(value, list) else value

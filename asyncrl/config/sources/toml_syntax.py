"""Says how to mend a line that is no TOML, for the mistakes that people make who know Python, JSON or YAML."""

import re
import tomllib
from collections.abc import Mapping

PLACE = re.compile(r"\(at line (\d+), column \d+\)")
ASSIGNMENT = re.compile(r"\s*([\w.\-]+)\s*=\s*(.*?)\s*")
ADVICE: Mapping[str, str] = {
    r"\s*(\[\s*)?\{.*": "this is JSON; in TOML a section is a line [model], and its keys are lines KEY = VALUE",
    r".*[\u2018\u2019\u201c\u201d].*": "write straight quotation marks in place of curly ones",
    r"\s*(//|/\*|--|;).*": "a comment begins with #",
    r"\s*\[[^\]]*": "the bracket of the section is not closed",
    r"\s*[\w.\-]+\s*:.*": "write KEY = VALUE, not KEY: VALUE",
    r"\s*[\w.\-]+\s*": "write KEY = VALUE",
}
"""Advice about a whole line, by its form."""
VALUES: Mapping[str, str] = {
    r"(None|null|nil|~|undefined)\b.*": "TOML has no such value: leave the key out",
    r"(True|False)\b.*": "true and false are written in small letters",
    r"-?\d+,\d.*": "a decimal number has a point: {key} = 0.5",
    r"-?(\d+\.(\D.*)?|\.\d.*)": "a number has digits on both sides of its point: {key} = 1.0e-6",
    r"": "{key} has no value",
    r"=.*": "write one = sign",
    r"\"[^\"]*\\.*": "a backslash in double quotes begins an escape: write / or single quotes, '{value}'",
    r"\"[^\"]*|'[^']*": "the quotation mark is not closed",
    r"[A-Za-z_./~][^\"'\[\]{}]*": 'text stands in quotation marks: {key} = "{value}"',
}
"""Advice about the value of a line, by its form."""


def syntax_problem(text: str, error: tomllib.TOMLDecodeError) -> str:
    """Returns what is wrong with a text that is no TOML, where, and what to write if that can be guessed."""
    wrong = str(error)
    found = PLACE.search(wrong)
    line = text.splitlines()[int(found[1]) - 1] if found and int(found[1]) <= len(text.splitlines()) else ""
    advice = _of_message(wrong, line) or _of_line(line)
    return f"this is not valid TOML: {wrong}" + (f": {advice}" if advice else "")


def _of_message(wrong: str, line: str) -> str:
    if wrong.startswith("Cannot declare"):
        return f"{line.strip()} is there twice: write its keys below one of both"
    if wrong.startswith("Cannot overwrite"):
        return "this key has a value already: remove one"
    return ""


def _of_line(line: str) -> str:
    if (assignment := ASSIGNMENT.fullmatch(line)) is None:
        return next((advice for form, advice in ADVICE.items() if line.strip() and re.fullmatch(form, line)), "")
    key = assignment[1]
    value = re.sub(r"\s+#.*", "", assignment[2])
    if re.search("[\u2018\u2019\u201c\u201d]", value):
        return ADVICE[r".*[\u2018\u2019\u201c\u201d].*"]
    found = next((advice for form, advice in VALUES.items() if re.fullmatch(form, value)), "")
    return found.format(key=key, value=value.strip('"'))

"""Reads what a docstring says about a function and its parameters, in Google's style."""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

ARGUMENTS = re.compile(r"^(?:Args|Arguments|Parameters):[ \t]*$")
ENTRY = re.compile(r"^\*{0,2}(\w+)[ \t]*(?:\([^)]*\))?[ \t]*:[ \t]*(.*)$")


def description(target: Callable[..., Any]) -> str:
    """Returns the first paragraph of a docstring, on one line; "" if there is none."""
    paragraph = (inspect.getdoc(target) or "").strip().partition("\n\n")[0]
    lines = [line.strip() for line in paragraph.splitlines()]
    return "" if lines and ARGUMENTS.match(lines[0]) else " ".join(lines)


def parameter_descriptions(target: Callable[..., Any]) -> dict[str, str]:
    """Returns what the section `Args:` of a docstring says about each parameter, each text on one line."""
    found: dict[str, str] = {}
    name, depth = "", None
    for indent, line in _argument_lines(inspect.getdoc(target) or ""):
        depth = indent if depth is None else depth
        entry = ENTRY.match(line) if indent <= depth else None
        if entry is not None:
            name = entry[1]
            found[name] = entry[2]
        elif name:
            found[name] = f"{found[name]} {line}".strip()
    return found


def _argument_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields indentation and text of the lines in the section of arguments, without empty ones."""
    inside = False
    for line in text.splitlines():
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        if indent == 0:
            inside = ARGUMENTS.match(line) is not None
        elif inside:
            yield indent, line.strip()

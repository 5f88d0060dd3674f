"""Reads each source of a config into dotted keys, with the place of every value."""

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from asyncrl.config.problems import Problem
from asyncrl.config.sources.keys import Key, advice, all_keys, sections

PREFIX = "ASYNCRL_"
"""Beginning of the environment variables that are keys."""


@dataclass(frozen=True, slots=True)
class ConfigLayer:
    """The keys of one source.

    entries: dotted key -> (value, place). problems: what could not be read as an entry. readable: False when the source
    could not be read at all, so that its keys are unknown.
    """

    entries: Mapping[str, tuple[Any, str]]
    problems: tuple[Problem, ...]
    readable: bool = True


Written = Callable[[str], str]
"""Returns how a key is written in one of the sources."""


def _layer(
    items: Iterable[tuple[str, Any, str]], written: Written = str, unreadable: Iterable[Problem] = ()
) -> ConfigLayer:
    """Makes entries of known keys, and a problem of each unknown one. items: (key, value, source)."""
    entries: dict[str, tuple[Any, str]] = {}
    problems = list(unreadable)
    for name, value, source in items:
        if name in sections():
            problems.append(Problem(name, source, advice(name, written)))
        elif name not in all_keys():
            problems.append(Problem(name, source, f"there is no such key; {advice(name, written)}"))
        else:
            entries[name] = (value, source)
    return ConfigLayer(entries, tuple(problems))


def values_layer(values: Mapping[str, Any]) -> ConfigLayer:
    """Reads keys given in Python, nested or dotted."""
    return _layer((name, value, "argument") for name, value in _leaves(values))


def file_layer(text: str, named: str) -> ConfigLayer:
    """Reads the keys of a TOML text. named: name of the text in messages."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return ConfigLayer({}, (Problem("", named, f"this is not valid TOML: {error}"),), readable=False)
    lines = _lines_of_keys(text)
    return _layer(
        [(name, value, f"{named}:{lines[name]}" if name in lines else named) for name, value in _leaves(tables)]
    )


def _leaves(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted keys of nested tables. A table below a known key is the value of that key."""
    for key, value in tables.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name not in all_keys():
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


_HEADER = re.compile(r"^\s*\[\[?\s*([\w.\-]+)\s*\]\]?")
_ASSIGNMENT = re.compile(r"^\s*([\w.\-]+)\s*=")


def _lines_of_keys(text: str) -> dict[str, int]:
    """Finds the line numbers of dotted keys, except of keys that are written in unusual ways."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = f"{header[1]}."
            lines.setdefault(header[1], number)
        elif assignment := _ASSIGNMENT.match(line):
            lines.setdefault(f"{table}{assignment[1]}", number)
    return lines


def environment_layer(environ: Mapping[str, str]) -> ConfigLayer:
    """Reads keys from the variables ASYNCRL_SECTION__KEY and ASYNCRL_KEY."""
    items = [
        (name.removeprefix(PREFIX).lower().replace("__", "."), [text], f"environment variable {name}")
        for name, text in sorted(environ.items())
        if name.startswith(PREFIX)
    ]
    return _texts_layer(items, lambda key: PREFIX + key.upper().replace(".", "__"))


def flags_layer(arguments: Sequence[str]) -> ConfigLayer:
    """Reads keys from `--section.key value` and `--section.key=value`.

    The flag of a list may be repeated. A switch without a value is turned on.
    """
    given: dict[str, list[str]] = {}
    stray: list[Problem] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if not argument.startswith("--") or argument == "--":
            stray.append(Problem("", argument, "does not belong to a flag; write --section.key value"))
            continue
        flag, equals, value = argument[2:].partition("=")
        name = flag.replace("-", "_")
        found = value if equals else _next_value(waiting, all_keys().get(name))
        if found is None:
            stray.append(Problem(name, argument, f"needs a value: {all_keys()[name].type}"))
        else:
            given.setdefault(name, []).append(found)
    return _texts_layer([(name, values, f"--{name}") for name, values in given.items()], unreadable=stray)


def _next_value(waiting: list[str], key: Key | None) -> str | None:
    """Takes the value after a flag without `=`; None if there is none. "-1" is a value, "--x" is the next flag."""
    has_value = bool(waiting) and not waiting[0].startswith("--")
    if key is not None and key.kinds == ("boolean",) and not (has_value and waiting[0].lower() in _SWITCH_WORDS):
        return "true"
    if has_value:
        return waiting.pop(0)
    return None if key else ""


_SWITCH_WORDS = {"true", "false", "yes", "no", "on", "off", "1", "0"}


def _texts_layer(
    items: Sequence[tuple[str, list[str], str]], written: Written = str, unreadable: Iterable[Problem] = ()
) -> ConfigLayer:
    """Makes entries from text, as the type of each key needs. items: (key, texts, source)."""
    read: list[tuple[str, Any, str]] = []
    problems = list(unreadable)
    for name, texts, source in items:
        key = all_keys().get(name)
        if key is None:
            read.append((name, texts, source))
        elif len(texts) > 1 and "array" not in key.kinds:
            problems.append(Problem(name, source, f"is given {len(texts)} times: {', '.join(texts)}"))
        else:
            read.append((name, _from_texts(texts, key), source))
    return _layer(read, written, problems)


def _from_texts(texts: list[str], key: Key) -> Any:
    if "null" in key.kinds and len(texts) == 1 and texts[0].lower() == "none":
        return None
    if "array" in key.kinds:
        return [item for text in texts for item in _items(text)]
    (text,) = texts
    return text


def _items(text: str) -> list[Any]:
    """Splits a TOML list into its items; any other text is one item."""
    if text.startswith("["):
        with suppress(tomllib.TOMLDecodeError):
            return list(tomllib.loads(f"items = {text}")["items"])
    return [text] if text else []

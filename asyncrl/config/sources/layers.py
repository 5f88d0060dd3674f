"""Reads each source of a config into dotted keys, with the place of every value, and says how to mend a line that is no
TOML."""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.config.named_files import anchored
from asyncrl.config.problems import Problem
from asyncrl.config.sources.keys import GONE, Key, advice, all_keys, is_explained, sections, table_keys

PLACE = re.compile(r"\(at line (\d+), column \d+\)")
ASSIGNMENT = re.compile(r"\s*([\w.\-]+)\s*=\s*(.*?)\s*")
ADVICE: Mapping[str, str] = {  # For people who know Python, JSON or YAML.
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


PREFIX = "ASYNCRL_"
"""Beginning of the environment variables that are keys."""
EXTENDS = "extends"
"""Name under which a file lists the files or experiments whose keys it takes over; it is no key of a config."""


@dataclass(slots=True)
class ConfigLayer:
    """The keys of one source. entries: dotted key -> (value, place). problems: what could not be read as an entry.
    readable: False when nothing could be read, so that the keys are unknown. written: how this source writes a key.
    folder: where relative paths of this source begin; None: it has none. partial: keys of tables of which this source
    gives some entries, so that those of weaker sources stay. bases: files or experiments that this one extends."""

    entries: dict[str, tuple[Any, str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    readable: bool = True
    written: Callable[[str], str] = str
    folder: Path | None = None
    partial: set[str] = field(default_factory=set)
    bases: tuple[str, ...] = ()

    @property
    def whole(self) -> dict[str, tuple[Any, str]]:
        """Returns the entries whose values come from this source alone."""
        return {name: entry for name, entry in self.entries.items() if name not in self.partial}

    def add(self, name: str, value: Any, place: str) -> None:
        """Adds an entry of a known key, or the problem of an unknown one; passes over a key that had one value."""
        if name in GONE and value == GONE[name]:
            return
        if name in all_keys():
            self.entries[name] = (anchored(name, value, self.folder) if self.folder else value, place)
        else:
            is_known = name in sections() or name in table_keys() or is_explained(name)
            wrong = "" if is_known else "there is no such key; "
            self.problems.append(Problem(name, place, wrong + advice(name, self.written)))

    def add_texts(self, name: str, texts: list[str], place: str) -> None:
        """Adds an entry of text, as the type of the key needs it."""
        if (entry := _entry_of_table(name)) is not None:
            self._add_to_table(*entry, texts, place)
            return
        kinds = all_keys()[name].kinds if name in all_keys() else ()
        if "null" in kinds and len(texts) == 1 and texts[0].lower() == "none":
            self.add(name, None, place)
        elif "array" in kinds and not _is_one_text(kinds, texts):
            self.add(name, [item for text in texts for item in _items(text)], place)
        elif len(texts) > 1 and kinds:
            self.problems.append(Problem(name, place, f"is given {len(texts)} times: {', '.join(texts)}"))
        elif "object" in kinds and not isinstance(_toml_value(texts[0]), dict):
            self.problems.append(Problem(name, place, f"must be a TOML table, {{ KEY = VALUE }}, not {texts[0]!r}"))
        elif "object" in kinds:
            self.partial.discard(name)
            self.add(name, _toml_value(texts[0]), place)
        else:
            self.add(name, texts[0], place)

    def _add_to_table(self, name: str, keys: Sequence[str], texts: list[str], place: str) -> None:
        """Adds an entry of a table, `--environment.options.KEY VALUE`."""
        if len(texts) > 1:
            self.problems.append(Problem(name, place, f"is given {len(texts)} times: {', '.join(texts)}"))
            return
        value: Any = _toml_value(texts[0])
        for key in reversed(keys):
            value = {key: value}
        if name not in self.entries:
            self.partial.add(name)
        before, _ = self.entries.get(name, ({}, place))
        self.add(name, merged_tables(before, value), place)


def _is_one_text(kinds: Sequence[str], texts: Sequence[str]) -> bool:
    """Returns whether a key that takes a text or a list is given one text."""
    return "string" in kinds and len(texts) == 1 and not texts[0].startswith("[")


def merged_tables(weaker: Any, stronger: Any) -> Any:
    """Returns the entries of both tables, at every depth; those of the stronger one where both have one."""
    if not (isinstance(weaker, Mapping) and isinstance(stronger, Mapping)):
        return stronger
    common = {key: merged_tables(weaker[key], stronger[key]) for key in stronger if key in weaker}
    return {**weaker, **stronger, **common}


def _entry_of_table(name: str) -> tuple[str, list[str]] | None:
    """Splits `environment.options.a.b` into the key of a table and the keys in it; None for anything else."""
    section, _, rest = name.partition(".")
    key, _, inner = rest.partition(".")
    table = all_keys().get(f"{section}.{key}")
    return (table.name, inner.split(".")) if inner and table is not None and "object" in table.kinds else None


def _as_key(written: str, plain: Callable[[str], str]) -> str:
    """Returns a dotted name with its key as keys are spelled; what stands behind the key of a table stays as it is."""
    section, key, *inner = [*written.split(".", 2), ""][:3]
    table = plain(f"{section}.{key}")
    return ".".join([table, *filter(None, inner)]) if _entry_of_table(f"{table}.x") else plain(written)


def values_layer(values: Mapping[str, Any]) -> ConfigLayer:
    """Reads keys given in Python, nested or dotted."""
    layer = ConfigLayer(folder=Path.cwd())
    for name, value in _leaves(values):
        layer.add(name, value, "argument")
    return layer


def file_layer(text: str, named: str, folder: Path | None = None) -> ConfigLayer:
    """Reads the keys of a TOML text. named: name of the text in messages. folder: where its relative paths begin."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return ConfigLayer(problems=[Problem("", named, syntax_problem(text, error))], readable=False)
    layer = ConfigLayer(folder=folder)
    lines = _lines_of_keys(text)
    bases = tables.pop(EXTENDS, [])
    layer.bases = tuple(bases if isinstance(bases, list) else [bases])
    if not all(isinstance(base, str) for base in layer.bases):
        wrong = f"must be the name of a file or an experiment, or a list of names, not {bases!r}"
        return ConfigLayer(problems=[Problem(EXTENDS, named, wrong)], readable=False)
    for name, value in _leaves(tables):
        layer.add(name, value, f"{named}:{lines[name]}" if name in lines else named)
    return layer


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
    layer = ConfigLayer(written=lambda key: PREFIX + key.upper().replace(".", "__"), folder=Path.cwd())
    for name, text in sorted(environ.items()):
        if name.startswith(PREFIX):
            key = _as_key(name.removeprefix(PREFIX).replace("__", "."), str.lower)
            layer.add_texts(key, [text], f"environment variable {name}")
    return layer


def flags_layer(arguments: Sequence[str]) -> ConfigLayer:
    """Reads `--section.key value` and `--section.key=value`; a list may be given in several flags, a switch alone."""
    given: dict[str, list[str]] = {}
    layer = ConfigLayer(folder=Path.cwd())
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if not argument.startswith("--") or argument == "--":
            layer.problems.append(Problem("", argument, _stray(argument, waiting, given)))
            continue
        if waiting[:1] == ["="]:
            layer.problems.append(Problem("", argument, f"write {argument}={''.join(waiting[1:2])} without spaces"))
            del waiting[:2]
            continue
        flag, equals, value = argument[2:].partition("=")
        name = _as_key(flag, lambda key: key.replace("-", "_"))
        table = _entry_of_table(name)
        key = all_keys().get(table[0] if table else name)
        found = value if equals else _next_value(waiting, key)
        if found is None:
            assert key is not None, "what is no key takes any value"
            layer.problems.append(Problem(name, argument, f"needs a value{'' if table else f': {key.type}'}"))
        else:
            given.setdefault(name, []).append(found)
    for name, texts in given.items():
        layer.add_texts(name, texts, f"--{name}")
    return layer


def _stray(argument: str, waiting: list[str], given: Mapping[str, list[str]]) -> str:
    """Returns what to write instead of an argument that no flag takes; removes the value behind a flag with one dash.
    given: the values of the flags before it."""
    name = re.match(r"[-+]*([\w.\-]+)", argument)
    key = _as_key(name[1], lambda text: text.replace("-", "_")) if name else ""
    if argument.startswith("-"):
        value = f" {waiting.pop(0)}" if waiting and "=" not in argument and not waiting[0].startswith("-") else ""
        return f"flags begin with two dashes: write --{argument.lstrip('-')}{value}"
    if "=" in argument and (key in all_keys() or "." in key):
        return f"write --{argument.lstrip('+')}"
    last = list(given)[-1] if given else ""
    if last in all_keys() and all_keys()[last].kinds == ("boolean",) and given[last] == ["true"]:
        return f"it stands behind --{last}, which takes true or false"
    if argument.endswith(".toml"):
        return f'a command takes one file; a file takes over the keys of another one with {EXTENDS} = "FILE"'
    return "does not belong to a flag; write --section.key value"


def _next_value(waiting: list[str], key: Key | None) -> str | None:
    """Takes the value after a flag without `=`; None if there is none. "-1" is a value, "--x" is the next flag."""
    has_value = bool(waiting) and not waiting[0].startswith("--")
    if key is not None and key.kinds == ("boolean",) and not (has_value and waiting[0].lower() in _SWITCH_WORDS):
        return "true"
    if has_value:
        return waiting.pop(0)
    return None if key else ""


_SWITCH_WORDS = {"true", "false", "yes", "no", "on", "off", "1", "0"}


def _toml_value(text: str) -> Any:
    """Returns the value that a text is in TOML, `true`, `3` or `{ a = 1 }`; the text where it is none or a date."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, bool | int | float | list | dict | str) else text


def _items(text: str) -> list[Any]:
    """Splits a TOML list into its items; any other text is one item."""
    if text.startswith("["):
        with suppress(tomllib.TOMLDecodeError):
            return list(tomllib.loads(f"items = {text}")["items"])
    return [text] if text else []

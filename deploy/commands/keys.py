"""`asyncrl keys` prints every key of an experiment with its type, default and meaning."""

import json
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl.deploy.commands.command_parser import CommandParser

if TYPE_CHECKING:
    from asyncrl.config.sources.keys import Key

INTRODUCTION = """\
# Config reference

All keys of an experiment's TOML file, from `asyncrl keys --markdown`; brackets have choices and the default, and
`asyncrl keys NAME` types and bounds. A key is set in the file, by a flag `--section.key value`, by an environment
variable `ASYNCRL_SECTION__KEY`, or in Python by `asyncrl.train(section={"key": value})`. `extends = "base.toml"` at the
top of a file (or a list, or the name of an experiment) takes over the keys of another one, which the file replaces.
"""
REPEATED = 4
"""Keys in common with an earlier table from which on the page names them instead of repeating them."""


def main(arguments: list[str]) -> int:
    from asyncrl.config.sources.keys import advice, keys_with_tables, translate
    from asyncrl.errors import ConfigError

    parser = CommandParser("asyncrl keys", description=__doc__)
    words_help = "Print only keys whose names contain one of these words; names of TRL and verl are translated."
    parser.add_argument("words", nargs="*", help=words_help)
    parser.add_argument("--markdown", action="store_true", help="Print all keys as the page docs/reference/config.md.")
    asked = parser.parse_args(arguments)
    if asked.markdown:
        print(reference(), end="")
        return 0
    meant = {translated[0] for word in asked.words if (translated := translate(word)) and translated[0]}
    found = [
        key
        for key in keys_with_tables()
        if not asked.words or key.name in meant or any(word in key.name for word in asked.words)
    ]
    found.sort(key=lambda key: key.name not in meant)
    if not found:
        raise ConfigError("; ".join(f"{word}: there is no such key, {advice(word)}" for word in asked.words))
    for key in found:
        print(f"{key.name}  ({key.type}; {_default(key)})\n{textwrap.indent(textwrap.fill(key.doc, 100), '    ')}")
    return 0


def reference() -> str:
    """Returns docs/reference/config.md."""
    return "\n".join([INTRODUCTION, *_reference_lines()]) + "\n"


def _reference_lines() -> Iterator[str]:
    from asyncrl.config.schema import Config
    from asyncrl.config.sources.keys import all_keys, sections, tables

    known = all_keys().values()
    yield from ("## Top level", "", *map(_row, (key for key in known if "." not in key.name)))
    parts: dict[str, tuple[str, list[Key]]] = {}
    for section in sections():
        model = Config.model_fields[section].annotation
        title = " ".join((model.__doc__ or "").split()) if model is not None else ""
        parts[f"[{section}]"] = (title, [key for key in known if key.name.startswith(f"{section}.")])
    parts |= {_written(name): (table.meaning, list(table.keys)) for name, table in tables().items()}
    shown: dict[str, set[str]] = {}
    for header, (meaning, keys) in parts.items():
        alike = [other for other, (_, others) in parts.items() if _rows(others) == _rows(keys)]
        if header != alike[0]:
            continue
        again = max(shown, key=lambda other: len(shown[other] & _rows(keys)), default="")
        repeated = shown.get(again, set()) & _rows(keys)
        own = keys if len(repeated) < REPEATED else [key for key in keys if _row(key) not in repeated]
        more = "" if own is keys else f" Further keys are those of `{again}`: {', '.join(_names(keys, repeated))}."
        yield from ("", f"## {', '.join(alike)}", "", meaning + more, "", *map(_row, own))
        shown[header] = _rows(keys)


def _written(name: str) -> str:
    """Returns the header of a table as a file has it."""
    from asyncrl.config.sources.keys import all_keys

    key = all_keys().get(name)
    return f"[[{name}]]" if key is not None and "array" in key.kinds else f"[{name}]"


def _names(keys: "list[Key]", repeated: set[str]) -> list[str]:
    return [f"`{_short(key)}`" for key in keys if _row(key) in repeated]


def _rows(keys: "list[Key]") -> set[str]:
    return set(map(_row, keys))


def _row(key: "Key") -> str:
    return f"- `{_short(key)}`{_shown_values(key)}: {_on_one_line(key.doc)}"


def _shown_values(key: "Key") -> str:
    """Returns in brackets the choices, where there are several, and the default, where it is more than an empty one."""
    has_choices = " | " in key.type.removesuffix(" | none") and key.type != "true | false"
    has_default = key.default not in (None, "", [], {}) and not isinstance(key.default, dict)
    parts = [_on_one_line(key.type)] if has_choices else []
    parts += [_default(key).removeprefix("default ")] if has_default or key.required else []
    return f" ({'; '.join(parts)})" if parts else ""


def _short(key: "Key") -> str:
    return key.name.rpartition(".")[2]


def _on_one_line(text: str) -> str:
    return " ".join(text.split()).replace(" | ", ", ")


def _default(key: "Key") -> str:
    shown = "none" if key.default is None else json.dumps(key.default, ensure_ascii=False)
    return "required" if key.required else f"default {shown}"

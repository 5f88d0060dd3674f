"""Writes a config as TOML text; tomllib reads it."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from asyncrl.config.sections.secret import Secret
from asyncrl.errors import ConfigError

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dump(config: BaseModel, notes: Mapping[str, str] | None = None) -> str:
    """Writes every key of `config` that is not None, so that reading gives an equal config. notes: comments by key."""
    values = config.model_dump(mode="json")
    tables = {"": {key: value for key, value in values.items() if not isinstance(value, dict)}}
    tables |= {f"{section}.": table for section, table in values.items() if isinstance(table, dict)}
    return "\n\n".join("\n".join(_lines(table, prefix, notes or {})) for prefix, table in tables.items()) + "\n"


def _lines(table: Mapping[str, Any], prefix: str, notes: Mapping[str, str]) -> Iterator[str]:
    if prefix:
        yield f"[{prefix.removesuffix('.')}]"
    for key, value in table.items():
        if value is not None:
            note = notes.get(prefix + key)
            yield f"{key} = {value_text(value, key)}" + (f"  # {note}" if note else "")


def value_text(value: Any, where: str = "") -> str:
    """Writes one TOML value on one line; raises ConfigError, which begins with `where`, if TOML cannot hold it."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # JSON's escapes are TOML's, but that TOML also wants DEL escaped.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case Secret():
            return value_text(str(value))
        case int() | float():
            return repr(value)
        case BaseModel():
            return value_text(value.model_dump(mode="json", exclude_defaults=True), where)
        case list() | tuple():
            return f"[{', '.join(value_text(item, where) for item in value)}]"
        case dict():
            keys = {key: key if _BARE.fullmatch(key) else value_text(key) for key in map(str, value)}
            pairs = (f"{keys[str(key)]} = {value_text(item, where)}" for key, item in value.items())
            return f"{{ {', '.join(pairs)} }}" if value else "{}"
    raise ConfigError(f"{where}: a config file cannot hold {value!r} ({type(value).__name__})")

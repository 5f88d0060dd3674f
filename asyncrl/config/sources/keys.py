"""Every key of a config: its type, its default, what it means; and which key someone meant."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from asyncrl.config import Config
from asyncrl.installing import program
from asyncrl.settings.foreign_names import REMARKS, TRANSLATIONS

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Key:
    """One key, written `section.key` or, at the top level, `key`.

    required: it has no default. many: its value is a list. nullable: it may have no value. text: its value is one
    string, taken as it is written.
    """

    name: str
    type: str
    default: Any
    doc: str
    required: bool
    many: bool
    nullable: bool
    text: bool
    switch: bool

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.name.split("."))


@cache
def all_keys() -> Mapping[str, Key]:
    """Keys by name, in the order of the config."""
    schema = Config.model_json_schema()
    definitions = schema["$defs"]
    keys: dict[str, Key] = {}
    for name, field in schema["properties"].items():
        if name in sections():
            section = definitions[field["$ref"].rsplit("/", 1)[1]]
            required = section.get("required", [])
            for inner, described in section["properties"].items():
                keys[f"{name}.{inner}"] = _key(f"{name}.{inner}", described, inner in required)
        else:
            keys[name] = _key(name, field, name in schema.get("required", []))
    return keys


@cache
def sections() -> tuple[str, ...]:
    """Names of the sections, in the order of the config."""
    properties = Config.model_json_schema()["properties"]
    return tuple(name for name, field in properties.items() if "$ref" in field)


def _key(name: str, schema: Schema, required: bool) -> Key:
    kind, kinds = schema.get("type"), [part.get("type") for part in schema.get("anyOf", [schema])]
    return Key(
        name=name,
        type=_type(schema),
        default=schema.get("default"),
        doc=" ".join(schema.get("description", "").split()),
        required=required,
        many="array" in kinds,
        nullable="null" in kinds,
        text=kind == "string" and "enum" not in schema,
        switch=kind == "boolean",
    )


_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
_NAMES = {"string": "text", "integer": "int", "number": "float", "boolean": "true | false", "null": "none"}


def _type(schema: Schema) -> str:
    if "anyOf" in schema:
        return " | ".join(_type(part) for part in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(str(choice) for choice in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "array":
        return _list_type(schema)
    if "$ref" in schema:
        return "table"
    bounds = [f"{sign} {schema[bound]:g}" for bound, sign in _BOUNDS.items() if bound in schema]
    return " ".join([_NAMES.get(schema.get("type", ""), "table"), *bounds])


def _list_type(schema: Schema) -> str:
    if "prefixItems" in schema:
        return f"[{', '.join(_type(item) for item in schema['prefixItems'])}]"
    return f"list of {_type(schema['items'])}"


def translate(name: str) -> tuple[str, str] | None:
    """What TRL's, verl's or OpenRLHF's `name` is here: our key ("" if there is none) and a remark.

    A dotted name is looked up whole, then without its first parts: `actor_rollout_ref.rollout.n`, `rollout.n`.
    """
    parts = name.replace("-", "_").split(".")
    for start in range(len(parts)):
        found = ".".join(parts[start:])
        if found in TRANSLATIONS or found in REMARKS:
            return TRANSLATIONS.get(found, ""), REMARKS.get(found, "")
    return None


def closest_key(name: str) -> str | None:
    """The key that `name` was probably meant to be: same last part, or similar spelling. Of several with its last part
    the first one, where it names no section."""
    last = name.rsplit(".", 1)[-1]
    by_last = [key for key in all_keys() if key.rsplit(".", 1)[-1] == last]
    if by_last:
        return closest(name, by_last, cutoff=0.0) if "." in name else by_last[0]
    if near := closest(name, all_keys(), cutoff=0.75):
        return near
    lasts = {key.rsplit(".", 1)[-1]: key for key in all_keys()}
    near = closest(last, lasts, cutoff=0.75)
    return lasts[near] if near else None


def closest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar of `names`, or None when none is similar."""
    found = difflib.get_close_matches(name, list(names), 1, cutoff)
    return found[0] if found else None


def advice(name: str, written: Callable[[str], str] = str) -> str:
    """What to write instead of the unknown key `name`. written: how a key is written where this one stands."""
    if translated := translate(name):
        ours, remark = translated
        if not ours:
            return remark
        return f"write {written(ours)}" + (f" ({remark})" if remark else "")
    if name in sections():
        return f"{name} is a section: write {written(f'{name}.KEY')}"
    if near := closest_key(name):
        return f"did you mean {written(near)}?"
    if foreign := closest(name, TRANSLATIONS, cutoff=0.8):
        return f"did you mean {foreign}? then {advice(foreign, written)}"
    return f"`{program()} keys` lists all"

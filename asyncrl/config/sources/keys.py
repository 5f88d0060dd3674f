"""All keys of a config with type, default and meaning, and the search for the key that a user meant."""

import difflib
import fnmatch
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Self

from asyncrl.config.install_hints import program
from asyncrl.config.schema import Config

Schema = Mapping[str, Any]

_ALIASES: dict[str, dict[str, str]] = tomllib.loads((files(__package__) / "aliases.toml").read_text(encoding="utf-8"))
GONE = _ALIASES.pop("gone")
"""Keys of older versions that had one value, with that value. They stand in the config.toml of earlier runs."""
REMARKS = _ALIASES.pop("remarks")
"""Advice by the name that another trainer gives to a key."""
UNSUPPORTED = _ALIASES.pop("unsupported")
"""Why asyncrl does not support what other trainers have, by the name of their key."""
TRANSLATIONS = {name: key for names in _ALIASES.values() for name, key in names.items()}
"""Keys of asyncrl by the names that other trainers, and older versions of asyncrl, give to them."""


@dataclass(frozen=True, slots=True)
class ForeignRule:
    """An answer about names of another trainer. names: a pattern of whole names. answer: as `translate` returns it."""

    names: re.Pattern[str]
    answer: tuple[str, str]

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> Self:
        """Reads an entry of foreign_keys.toml."""
        says = [f"{kind}: {written[name]}" for name, kind in EXPLAINED.items() if name in written]
        names = "|".join(map(fnmatch.translate, written["names"]))
        return cls(re.compile(names), (written.get("key", ""), says[0] if says else written.get("says", "")))


EXPLAINED = {"missing": "not supported", "needless": "not needed"}
"""Kinds of answers about names without a key, by their names in foreign_keys.toml."""
VERL_SECTIONS = (
    *("actor_rollout_ref", "data", "critic", "reward_model", "reward", "custom_reward_function", "algorithm"),
    *("distillation", "transfer_queue", "trainer", "global_profiler", "skip", "ray_kwargs", "sandbox_fusion"),
)
"""First parts of the names of verl."""
VERL_MODELS = ("actor", "ref", "rollout", "model", "hybrid_engine")
"""First parts of names of verl that people write without `actor_rollout_ref`."""


@cache
def foreign_rules() -> Mapping[str, tuple[ForeignRule, ...]]:
    """Returns the rules of foreign_keys.toml, by trainer."""
    written = tomllib.loads((files(__package__) / "foreign_keys.toml").read_text(encoding="utf-8"))
    return {trainer: tuple(map(ForeignRule.of, rules)) for trainer, rules in written.items()}


@cache
def _of_a_table(name: str) -> tuple[str, str] | None:
    """Returns what the tables of the names of TRL and verl answer; None for a name that they do not have. A name of TRL
    may stand in a section of ours, unless a key of ours ends alike."""
    section, _, last = name.rpartition(".")
    if name in table_keys():
        return None
    first = name.partition(".")[0]
    if first in VERL_SECTIONS or first in VERL_MODELS:
        whole = f"actor_rollout_ref.{name}" if first in VERL_MODELS else name
        return next((rule.answer for rule in foreign_rules()["verl"] if rule.names.match(whole)), None)
    if section and any(key.rpartition(".")[2] == last for key in all_keys()):
        return None
    return next((rule.answer for rule in foreign_rules()["trl"] if rule.names.match(last)), None)


_ENGINE_PARTS = re.compile(r"(?<![^.])(model\.)?(fsdp_config|megatron|veomni)\.")
"""Parts of names of verl that say which engine reads a key, whatever its meaning."""

FIRST_KEYS = {"model": "name", "task": "prompts", "reward": "functions", "algorithm": "preset", "environment": "use"}
"""Keys that are meant where a section is given one value."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key. type: for people. kinds: JSON types that the value may have. required: it has no default. is_secret: no
    message shows its value."""

    name: str
    type: str
    kinds: tuple[str, ...]
    default: Any
    doc: str
    required: bool
    is_secret: bool = False


@cache
def all_keys() -> Mapping[str, Key]:
    """Returns all keys by name, in the order of the config."""
    schema = Config.model_json_schema()
    keys: list[Key] = []
    for name, field in schema["properties"].items():
        if "$ref" in field:
            section = schema["$defs"][field["$ref"].rsplit("/", 1)[1]]
            keys += [_key(f"{name}.", inner, section) for inner in section["properties"]]
        else:
            keys.append(_key("", name, schema))
    return {key.name: key for key in keys}


@cache
def sections() -> tuple[str, ...]:
    """Returns the names of the sections, in the order of the config."""
    properties = Config.model_json_schema()["properties"]
    return tuple(name for name, field in properties.items() if "$ref" in field)


@dataclass(frozen=True, slots=True)
class KeyTable:
    """A table that is a value, or part of one. meaning: a sentence. keys: its keys, each with the name of the table."""

    meaning: str
    keys: tuple[Key, ...]


@cache
def tables() -> Mapping[str, KeyTable]:
    """Returns the tables that are values, by name: `reward.functions` has the keys of each `[[reward.functions]]`, and
    `pools.NAME` those of each `[pools.NAME]`."""
    schema = Config.model_json_schema()
    found: dict[str, KeyTable] = {}
    for name, field in schema["properties"].items():
        section = schema["$defs"][field["$ref"].rsplit("/", 1)[1]]["properties"] if "$ref" in field else {"": field}
        for key, value in section.items():
            _add_tables(found, f"{name}.{key}".rstrip("."), value, schema["$defs"])
    return found


@cache
def table_keys() -> Mapping[str, Key]:
    """Returns the keys of all these tables, by name: `reward.functions.use`."""
    return {key.name: key for table in tables().values() for key in table.keys}


def keys_with_tables() -> list[Key]:
    """Returns all keys, those of tables behind the key of their table."""
    found: list[Key] = []
    for key in all_keys().values():
        found += [key, *(inner for inner in table_keys().values() if inner.name.startswith(f"{key.name}."))]
    return found


def _add_tables(found: dict[str, KeyTable], name: str, schema: Schema, definitions: Schema) -> None:
    """Adds the tables that a value is, or is made of, and the tables in them."""
    for inner, reference in _references(name, schema):
        table = definitions[reference.rsplit("/", 1)[1]]
        keys = tuple(_key(f"{inner}.", each, table) for each in table["properties"])
        found[inner] = KeyTable(" ".join(table.get("description", "").split()), keys)
        for each, value in table["properties"].items():
            _add_tables(found, f"{inner}.{each}", value, definitions)


def _references(name: str, schema: Schema) -> Iterator[tuple[str, str]]:
    """Yields the tables that a value may be, or may have as entries: name and reference."""
    for form in _forms(schema):
        if "$ref" in form:
            yield name, form["$ref"]
        elif "items" in form:
            yield from _references(name, form["items"])
        elif isinstance(entries := form.get("additionalProperties"), Mapping):
            yield from _references(f"{name}.NAME", entries)


def _key(prefix: str, name: str, section: Schema) -> Key:
    schema = section["properties"][name]
    required = name in section.get("required", [])
    kinds = tuple("object" if "$ref" in part else part.get("type", "") for part in _forms(schema))
    doc = " ".join(schema.get("description", "").split())
    return Key(prefix + name, _type(schema), kinds, schema.get("default"), doc, required, bool(schema.get("writeOnly")))


_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
_NAMES = {"string": "text", "integer": "int", "number": "float", "boolean": "true | false", "null": "none"}


def _forms(schema: Schema) -> list[Schema]:
    """Returns the schemas of the forms that a value may have."""
    return list(schema.get("anyOf") or schema.get("oneOf") or [schema])


def _type(schema: Schema) -> str:
    if len(forms := _forms(schema)) > 1:
        return " | ".join(map(_type, forms))
    if "enum" in schema:
        return " | ".join(str(choice) for choice in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if "prefixItems" in schema:
        return f"[{', '.join(_type(item) for item in schema['prefixItems'])}]"
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}"
    if "$ref" in schema:
        return "table"
    bounds = [f"{sign} {schema[bound]:g}" for bound, sign in _BOUNDS.items() if bound in schema]
    return " ".join([_NAMES.get(schema.get("type", ""), "table"), *bounds])


def translate(name: str) -> tuple[str, str] | None:
    """Returns the key ("" if there is none) and a remark for a `name` of TRL, verl, OpenRLHF or an older asyncrl. What
    the tables of TRL and verl do not have is looked up whole, then without its first parts:
    `actor_rollout_ref.rollout.n`, `rollout.n`. `critic.megatron.x` is looked up as `critic.x`."""
    if answer := _of_a_table(name.replace("-", "_")):
        return answer
    parts = _ENGINE_PARTS.sub("", name.replace("-", "_")).split(".")
    for start in range(len(parts)):
        found = ".".join(parts[start:])
        if found in UNSUPPORTED:
            return "", f"not supported: {UNSUPPORTED[found]}"
        if found in TRANSLATIONS or found in REMARKS:
            return TRANSLATIONS.get(found, ""), REMARKS.get(found, "")
    return None


def closest_key(name: str) -> str | None:
    """Returns the key that `name` probably means: one with the same last part, also in a table of the same section, or
    one whose last part is spelled alike. Last parts are compared, since sections make names longer and so alike."""
    section, _, last = name.rpartition(".")
    named = [key for key in all_keys() if key.rsplit(".", 1)[-1] == last]
    if inner := [key for key in table_keys() if section in sections() and _is_inside(key, section, last)]:
        return min(inner, key=len)
    if named:
        return closest(name, named, cutoff=0.0) if section else named[0]
    if section in sections():
        own = {key.rpartition(".")[2]: key for key in all_keys() if key.rpartition(".")[0] == section}
        if near := closest(last, own, cutoff=0.6):
            return own[near]
    elif near := closest(name, all_keys(), cutoff=0.75):
        return near
    lasts = {key.rsplit(".", 1)[-1]: key for key in all_keys()}
    return lasts.get(closest(last, lasts, cutoff=0.8) or "")


def _is_inside(key: str, section: str, last: str) -> bool:
    return key.startswith(f"{section}.") and key.endswith(f".{last}")


def closest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the most similar of `names`, or None when none is similar."""
    known = list(names)
    swapped = [each for each in known if sorted(each) == sorted(name)]  # gpro is grpo, which difflib finds less near.
    found = swapped or difflib.get_close_matches(name, known, 1, cutoff)
    return found[0] if found else None


def is_explained(name: str) -> bool:
    """Returns whether `name` is known, and asyncrl does not support what it stands for, or does not need it."""
    return (translated := translate(name)) is not None and translated[1].startswith(tuple(EXPLAINED.values()))


def advice(name: str, written: Callable[[str], str] = str) -> str:
    """Returns what to write instead of the unknown key `name`. written: how this source writes a key."""
    if translated := translate(name):
        ours, remark = translated
        if not ours:
            return remark
        return f"write {written(ours)}" + (f" ({remark})" if remark else "")
    if name in table_keys():
        table = name.rpartition(".")[0]
        return (
            f"it is a key of the tables of {table}, which have a list of their own: write {written(table)} = [{{...}}]"
        )
    if name in sections():
        return f"{name} is a section: write {written('.'.join([name, FIRST_KEYS.get(name, 'KEY')]))}"
    of_both = [f"{section}.{name}" for section in ("training", "generation")]
    if all(key in all_keys() for key in of_both):
        return f"did you mean {' or '.join(map(written, of_both))}?"
    if near := closest_key(name):
        return f"did you mean {written(near)}?"
    if foreign := closest(name, TRANSLATIONS, cutoff=0.8):
        return f"did you mean {foreign}? then {advice(foreign, written)}"
    return f"`{program()} keys` lists all"

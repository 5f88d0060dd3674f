"""Values of a config that are secret, and keys whose value is the path of one.

A `Secret` is written as *** by all that writes a config: config.toml, reports, recordings, sinks, changes, errors. Who
needs the value asks for it (`revealed`). The values of a run are in RUN_DIR/secrets.json, which its owner alone reads,
so that a resume has them; no copy of the run has that file.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler, SerializationInfo
from pydantic_core import CoreSchema, SchemaSerializer, core_schema

from asyncrl.errors import ConfigError

Written = TypeVar("Written", bound=BaseModel)
WITHHELD = "***"
REVEALING = "reveals secrets"
"""Name in the context of a serialization that writes secrets: for workers, which need them."""
FILE = "secrets.json"
NAMED = re.compile(
    r"(?i)(?!.*\b(bos|eos|pad|unk|sep|cls|mask|stop|think|image|end|start)_token$)"
    r"(.*[_-])?(api_?key|key|token|secret|password|passwd|passphrase|credentials?|auth|authorization|cookie)"
)
"""Names of entries of a table of options whose text is a secret."""
TABLES = re.compile(r"(?i)(env(ironment)?|.*variables|headers|secrets|credentials)")
"""Names of tables in options in which each text is one."""


def _written(secret: "Secret", info: SerializationInfo) -> str:
    return secret.value if (info.context or {}).get(REVEALING) else str(secret)


_SERIALIZED = core_schema.plain_serializer_function_ser_schema(_written, info_arg=True)


class Secret:
    """A text that nothing shows; "" is none, and *** one that was withheld where it was read. It is no dataclass, whose
    fields `asdict` would show."""

    __slots__ = ("value",)

    def __init__(self, value: str) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __str__(self) -> str:
        return WITHHELD if self.value else ""

    __repr__ = __str__

    def __bool__(self) -> bool:
        return bool(self.value)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        made = core_schema.no_info_after_validator_function(cls, core_schema.str_schema())
        either = core_schema.union_schema([core_schema.is_instance_schema(cls), made])
        return core_schema.json_or_python_schema(made, either, serialization=_SERIALIZED)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(core_schema.str_schema()), "writeOnly": True}


Secret.__pydantic_serializer__ = SchemaSerializer(core_schema.any_schema(serialization=_SERIALIZED))  # type: ignore[attr-defined]


def veiled(options: Any, *, whole: bool = False) -> Any:
    """Returns options with a Secret for each text that is one by the name of its entry or its table. whole: all are."""
    match options:
        case str() if whole and options:
            return Secret(options)
        case Mapping():
            return {
                key: veiled(each, whole=whole or bool((NAMED if isinstance(each, str) else TABLES).fullmatch(str(key))))
                for key, each in options.items()
            }
        case list() | tuple():
            return type(options)(veiled(each, whole=whole) for each in options)
    return options


def revealed(value: Any) -> Any:
    """Returns options with the texts of their secrets."""
    match value:
        case Secret():
            return value.value
        case Mapping():
            return {key: revealed(each) for key, each in value.items()}
        case list() | tuple():
            return type(value)(revealed(each) for each in value)
    return value


Options = Annotated[dict[str, Any], AfterValidator(veiled)]
"""A table of arguments for code that is not of the config, which may hold secrets."""


@dataclass(frozen=True, slots=True)
class OfSecrets:
    """Marks a key whose value is the path of a file or folder with secrets: contained code does not see it."""


SecretPath = Annotated[str, OfSecrets()]


def secret_paths(config: BaseModel) -> Iterator[str]:
    """Yields the paths of secrets that a config names."""
    for section in dict(config).values():
        if isinstance(section, BaseModel):
            for name, about in type(section).model_fields.items():
                if any(isinstance(each, OfSecrets) for each in about.metadata) and (path := getattr(section, name)):
                    yield path


def secrets_of(value: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Secret]]:
    """Yields the secrets in a config or a part of it, each with the names and numbers that lead to it."""
    match value:
        case Secret():
            if value:
                yield at, value
        case BaseModel() | Mapping():
            for key, each in dict(value).items():
                yield from secrets_of(each, (*at, str(key)))
        case list() | tuple():
            for number, each in enumerate(value):
                yield from secrets_of(each, (*at, str(number)))


def keep_secrets(config: BaseModel, run_dir: Path) -> None:
    """Writes the secrets of a run to a file that its owner alone reads; none where it has no secrets."""
    found = {"/".join(at): each.value for at, each in secrets_of(config)}
    path = run_dir / FILE
    if not found:
        path.unlink(missing_ok=True)
        return
    fresh = path.with_name(FILE + ".new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(json.dumps(found) + "\n")
    fresh.replace(path)


def with_kept_secrets(config: Written, run_dir: Path | None) -> Written:
    """Returns a config with the secrets that were withheld where it was read, as the run directory has them. Raises
    ConfigError, with their keys, for those that it does not have."""
    wanted = [at for at, each in secrets_of(config) if each.value == WITHHELD]
    if not wanted:
        return config
    try:
        known = json.loads((run_dir / FILE).read_bytes()) if run_dir is not None else {}
    except (FileNotFoundError, ValueError):
        known = {}
    tree = config.model_dump(context={REVEALING: True})
    for at in wanted:
        if not isinstance(value := known.get("/".join(at)) if isinstance(known, dict) else None, str):
            keys = ", ".join(".".join(each) for each in wanted)
            raise ConfigError(
                f"the config has {WITHHELD} in place of {keys}: what was written there is a secret, which only "
                f"{FILE} in the directory of its run holds; give it again, in a file, as a flag or as a variable"
            )
        _put(tree, at, value)
    return type(config).model_validate(tree)


def _put(tree: Any, at: Sequence[str], value: str) -> None:
    *way, last = at
    for step in way:
        tree = tree[int(step)] if isinstance(tree, list | tuple) else tree[step]
    tree[int(last) if isinstance(tree, list) else last] = value


def without_secrets(text: str, config: BaseModel) -> str:
    """Returns a text, such as a command, with *** in place of each secret of a config."""
    for value in sorted({each.value for _, each in secrets_of(config)}, key=len, reverse=True):
        text = text.replace(value, WITHHELD)
    return text

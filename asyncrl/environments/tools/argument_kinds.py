"""Makes JSON schemas from Python types, and reads arguments of a call as values of these types.

Reading converts only what JSON cannot tell apart: lists to tuples and sets, whole numbers to float and back, values to
members of an Enum, objects to dataclasses. Text is never read as a number.
"""

import collections.abc
import dataclasses
import enum
import inspect
import math
import reprlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NotRequired, Required, Union

from asyncrl.config.user_code import LISTED, suggestion
from asyncrl.errors import ConfigError

Schema = dict[str, Any]
Plain = str | int | float | bool | None

WRITE_ONE_OF = (
    "write str, int, float, bool, None, Any, Literal, an Enum with plain values, list, tuple, set, dict[str, ...], "
    "a TypedDict, a dataclass, or a union of these"
)

_shown = reprlib.Repr()
_shown.maxlevel = 2
_shown.maxstring = _shown.maxother = 60


class BadArgument(ValueError):
    """Reports an argument that does not fit its parameter; the message continues "the tool NAME "."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of arguments. name: as messages say it, such as "an integer". read: converts an argument, whose place is
    given for messages; raises BadArgument."""

    schema: Schema
    name: str
    read: Callable[[Any, str], Any]


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter of a function, or a field of an object. default: for the schema, None for none that is plain."""

    kind: Kind
    needed: bool
    default: Plain = None


def kind_of(annotation: Any, where: str, outer: tuple[Any, ...] = ()) -> Kind:
    """Returns the kind of an annotation; raises ConfigError, which begins with `where`, for one without a schema.
    outer: the structures that this annotation is a part of."""
    origin = typing.get_origin(annotation)
    parts = typing.get_args(annotation)
    if origin is None:
        return _of_class(annotation, where, outer)
    if origin in (Required, NotRequired):
        return kind_of(parts[0], where, outer)
    if origin is Annotated:
        return _described(kind_of(parts[0], where, outer), [each for each in parts[1:] if isinstance(each, str)])
    if origin in (Union, types.UnionType):
        return _union([kind_of(part, where, outer) for part in parts])
    if origin is Literal:
        return _choice([(value, value) for value in parts], where)
    if origin is tuple and parts[-1:] != (Ellipsis,):
        return _fixed([kind_of(part, where, outer) for part in parts])
    if origin in COLLECTIONS:
        return COLLECTIONS[origin](kind_of(parts[0], where, outer))
    if origin in MAPPINGS and parts[0] is str:
        return _mapping(kind_of(parts[1], where, outer))
    raise _unsupported(annotation, where)


def _of_class(annotation: Any, where: str, outer: tuple[Any, ...]) -> Kind:
    for known, kind in SIMPLE:
        if annotation is known:
            return kind
    if annotation in outer:
        raise ConfigError(f"{where}: {annotation.__name__} is a part of itself, which a schema here cannot say")
    if annotation in COLLECTIONS:
        return COLLECTIONS[annotation](ANYTHING)
    if annotation in MAPPINGS:
        return _mapping(ANYTHING)
    if isinstance(annotation, typing.NewType):
        return kind_of(annotation.__supertype__, where, outer)
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return _choice([(member.value, member) for member in annotation], where)
    if typing.is_typeddict(annotation) or (inspect.isclass(annotation) and dataclasses.is_dataclass(annotation)):
        return _structure(annotation, where, (*outer, annotation))
    raise _unsupported(annotation, where)


def _unsupported(annotation: Any, where: str) -> ConfigError:
    shown = annotation.__name__ if inspect.isclass(annotation) else str(annotation)
    return ConfigError(f"{where}: the type {shown} cannot be described to a model; {WRITE_ONE_OF}")


def wrong(place: str, name: str, value: Any) -> BadArgument:
    """Returns the error about a value of another kind than `name` says."""
    return BadArgument(f"needs {place}, {name}; it got {_shown.repr(value)}")


def _exactly(name: str, *classes: type) -> Callable[[Any, str], Any]:
    def read(value: Any, place: str) -> Any:
        if type(value) not in classes:
            raise wrong(place, name, value)
        return value

    return read


def _integer(value: Any, place: str) -> int:
    if type(value) is float and value.is_integer():
        return int(value)
    if type(value) is not int:
        raise wrong(place, "an integer", value)
    return value


def _number(value: Any, place: str) -> float:
    if type(value) in (int, float):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise wrong(place, "a finite number", value)


ANYTHING = Kind({}, "a value", lambda value, place: value)
SIMPLE: list[tuple[Any, Kind]] = [
    (str, Kind({"type": "string"}, "a text", _exactly("a text", str))),
    (bool, Kind({"type": "boolean"}, "true or false", _exactly("true or false", bool))),
    (int, Kind({"type": "integer"}, "an integer", _integer)),
    (float, Kind({"type": "number"}, "a finite number", _number)),
    (None, Kind({"type": "null"}, "null", _exactly("null", type(None)))),
    (type(None), Kind({"type": "null"}, "null", _exactly("null", type(None)))),
    (Any, ANYTHING),
]
TYPE_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def _described(kind: Kind, descriptions: list[str]) -> Kind:
    return dataclasses.replace(kind, schema={**kind.schema, "description": descriptions[0]}) if descriptions else kind


def _union(kinds: list[Kind]) -> Kind:
    name = " or ".join(kind.name for kind in kinds)

    def read(value: Any, place: str) -> Any:
        for kind in kinds:
            try:
                return kind.read(value, place)
            except BadArgument:
                continue
        raise wrong(place, name, value)

    return Kind({"anyOf": [kind.schema for kind in kinds]}, name, read)


def _choice(values: Sequence[tuple[Any, Any]], where: str) -> Kind:
    """Returns the kind of a Literal or an Enum. values: the plain values, and what the function gets for each."""
    if odd := [value for value, _ in values if type(value) not in TYPE_NAMES]:
        raise ConfigError(f"{where}: {odd[0]!r} is no plain value; {WRITE_ONE_OF}")
    classes = {type(value) for value, _ in values}
    schema: Schema = {"type": TYPE_NAMES[classes.pop()]} if len(classes) == 1 else {}
    more = f" and {len(values) - LISTED} more" if len(values) > LISTED else ""
    name = f"one of {', '.join(repr(value) for value, _ in values[:LISTED])}{more}"

    def read(value: Any, place: str) -> Any:
        for known, meaning in values:
            if type(known) is type(value) and known == value:
                return meaning
        raise wrong(place, name, value)

    return Kind({**schema, "enum": [value for value, _ in values]}, name, read)


def _array(item: Kind, make: Callable[[list[Any]], Any], more: Schema) -> Kind:
    def read(value: Any, place: str) -> Any:
        if not isinstance(value, list):
            raise wrong(place, "a list", value)
        return make([item.read(each, f"{place}[{number}]") for number, each in enumerate(value)])

    items = {"items": item.schema} if item.schema else {}
    return Kind({"type": "array", **items, **more}, "a list", read)


def _set(make: Callable[[list[Any]], Any], item: Kind) -> Kind:
    def read(value: Any, place: str) -> Any:
        try:
            return make(array.read(value, place))
        except TypeError:  # An item that is a list or an object has no hash.
            raise wrong(place, "a list of plain values", value) from None

    array = _array(item, list, {"uniqueItems": True})
    return dataclasses.replace(array, read=read)


def _fixed(items: list[Kind]) -> Kind:
    name = f"a list of {len(items)} values"

    def read(value: Any, place: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(items):
            raise wrong(place, name, value)
        return tuple(
            kind.read(each, f"{place}[{at}]") for at, (kind, each) in enumerate(zip(items, value, strict=True))
        )

    sizes = {"minItems": len(items), "maxItems": len(items)}
    return Kind({"type": "array", "prefixItems": [kind.schema for kind in items], **sizes}, name, read)


def _mapping(item: Kind) -> Kind:
    def read(value: Any, place: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong(place, "an object", value)
        return {name: item.read(each, f"{place}.{name:.60}") for name, each in value.items()}

    return Kind({"type": "object", "additionalProperties": item.schema or True}, "an object", read)


COLLECTIONS: dict[Any, Callable[[Kind], Kind]] = {
    list: partial(_array, make=list, more={}),
    collections.abc.Sequence: partial(_array, make=list, more={}),
    tuple: partial(_array, make=tuple, more={}),
    set: partial(_set, set),
    frozenset: partial(_set, frozenset),
}
MAPPINGS = (dict, collections.abc.Mapping)


def _structure(annotation: Any, where: str, outer: tuple[Any, ...]) -> Kind:
    """Returns the kind of a TypedDict or a dataclass."""
    hints = type_hints(annotation, where)
    if typing.is_typeddict(annotation):
        needed = {name: _required(hint, name in annotation.__required_keys__) for name, hint in hints.items()}
    else:
        fields = [each for each in dataclasses.fields(annotation) if each.init]
        missing = dataclasses.MISSING
        needed = {each.name: each.default is missing and each.default_factory is missing for each in fields}
    members = {name: Member(kind_of(hints[name], f"{where}.{name}", outer), needed[name]) for name in needed}

    def read(value: Any, place: str) -> Any:
        if not isinstance(value, dict):
            raise wrong(place, "an object", value)
        return annotation(**read_members(members, value, f"{place}."))

    return Kind(object_schema(members), "an object", read)


def _required(hint: Any, otherwise: bool) -> bool:
    """Returns whether a key of a TypedDict must be there; its class does not know where annotations are text."""
    origin = typing.get_origin(hint)
    return origin is Required or (otherwise and origin is not NotRequired)


def type_hints(target: Any, where: str) -> dict[str, Any]:
    """Returns the annotations of a function or class; raises ConfigError for a name in them that means nothing."""
    try:
        return typing.get_type_hints(target, include_extras=True)
    except NameError as error:
        raise ConfigError(f"{where}: an annotation names {error.name}, which its module does not have") from None


def object_schema(members: Mapping[str, Member]) -> Schema:
    """Returns the schema of an object with these members."""
    properties = {
        name: each.kind.schema | ({} if each.default is None else {"default": each.default})
        for name, each in members.items()
    }
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name, each in members.items() if each.needed],
    }


def read_members(members: Mapping[str, Member], given: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of the members that are given; raises BadArgument for a member that is wrong, that is missing,
    or that does not exist. prefix: put before the names of members in messages."""
    for name, member in members.items():
        if member.needed and name not in given:
            raise BadArgument(f"needs {prefix}{name}, {member.kind.name}; nothing was given for it")
    for name in given:
        if name not in members:
            near = suggestion(name[:60], members) if members else "; it takes no arguments"
            raise BadArgument(f"has no argument {prefix}{name:.60}{near}")
    return {name: members[name].kind.read(value, f"{prefix}{name}") for name, value in given.items()}

"""What a message's fields may hold, read from their annotations: a check for each, built once at import."""

import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from asyncrl.errors import WireError

Check = Callable[[Any], Any]
"""Returns the value to store. Raises WireError when it is of another type."""


def field_checks(cls: type) -> tuple[tuple[str, Check], ...]:
    """Name and check of each field of a message, in the order in which they travel."""
    hints = get_type_hints(cls)
    return tuple((field.name, check_for(hints[field.name])) for field in fields(cls))


def check_for(hint: Any) -> Check:
    """The check of one annotation: a plain type, a message, an array, a union or a container of these."""
    if hint is Any:
        return lambda value: value
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _union([check_for(option) for option in get_args(hint)])
    if origin is np.ndarray:
        return _array(get_args(hint))
    if origin is tuple and get_args(hint)[-1] is not Ellipsis:
        return _record([check_for(item) for item in get_args(hint)])
    if origin in (list, tuple):
        item = get_args(hint)[0]
        if item is Any:
            return _exactly(origin)
        if isinstance(item, type) and item is not float:
            return _uniform(origin, item)
        return _sequence(origin, check_for(item))
    if origin in (dict, Mapping):
        return _mapping(check_for(get_args(hint)[1]))
    assert isinstance(hint, type), f"no rule for a field of type {hint}"
    return _number if hint is float else _exactly(hint)


def _exactly(cls: type) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not cls:
            raise WireError(f"expected {cls.__name__}, got {type(value).__name__}")
        return value

    return check


def _number(value: Any) -> float:
    """A float; an int is taken as one, for 5 is as good a deadline as 5.0."""
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value)
    raise WireError(f"expected float, got {type(value).__name__}")


def _union(options: list[Check]) -> Check:
    def check(value: Any) -> Any:
        for option in options:
            try:
                return option(value)
            except WireError as error:
                refused = error
        raise refused

    return check


def _sequence(cls: type[list[Any]] | type[tuple[Any, ...]], item: Check) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not cls:
            raise WireError(f"expected {cls.__name__}, got {type(value).__name__}")
        return cls(item(element) for element in value)

    return check


def _uniform(cls: type[list[Any]] | type[tuple[Any, ...]], item: type) -> Check:
    """A sequence of values of one plain type or message, which stay as they are."""
    allowed = frozenset((item,))

    def check(value: Any) -> Any:
        if type(value) is not cls:
            raise WireError(f"expected {cls.__name__}, got {type(value).__name__}")
        if not allowed.issuperset(map(type, value)):
            wrong = next(type(element) for element in value if type(element) is not item)
            raise WireError(f"expected {item.__name__}, got {wrong.__name__}")
        return value

    return check


def _record(items: list[Check]) -> Check:
    """A tuple of so many values, each of its own type."""

    def check(value: Any) -> Any:
        if type(value) is not tuple or len(value) != len(items):
            raise WireError(f"expected {len(items)} values, got {value!r:.100}")
        return tuple(item(element) for item, element in zip(items, value, strict=True))

    return check


def _mapping(item: Check) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not dict:
            raise WireError(f"expected dict, got {type(value).__name__}")
        return {key: item(element) for key, element in value.items()}

    return check


def _array(arguments: tuple[Any, ...]) -> Check:
    """NDArray[np.int64] asks for that dtype, NDArray[Any] for none."""
    scalar = get_args(arguments[1])[0]

    def check(value: Any) -> Any:
        if type(value) is not np.ndarray:
            raise WireError(f"expected an array, got {type(value).__name__}")
        if scalar is not Any and value.dtype != np.dtype(scalar):
            raise WireError(f"expected an array of {scalar.__name__}, got {value.dtype}")
        return value

    return check

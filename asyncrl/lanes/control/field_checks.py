"""Type checks for the fields of messages, built from their annotations once at import."""

import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from asyncrl.errors import WireError

Check = Callable[[Any], Any]
"""Returns the value to store; raises WireError when it has another type."""


def field_checks(cls: type) -> tuple[tuple[str, Check], ...]:
    """Returns name and check of each field of a message, in the order on the wire."""
    hints = get_type_hints(cls)
    return tuple((field.name, check_for(hints[field.name])) for field in fields(cls))


def check_for(hint: Any) -> Check:
    """Returns the check for an annotation: a plain type, a message, an array, a union or a container of these."""
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
    """Accepts an int as a float."""
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
    """Checks a sequence of values of one plain type or message, without a copy."""
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
    """Checks a tuple of fixed length, each value with its own check."""

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
    """Checks an array: NDArray[np.int64] requires that dtype, NDArray[Any] allows every dtype."""
    scalar = get_args(arguments[1])[0]

    def check(value: Any) -> Any:
        if type(value) is not np.ndarray:
            raise WireError(f"expected an array, got {type(value).__name__}")
        if scalar is not Any and value.dtype != np.dtype(scalar):
            raise WireError(f"expected an array of {scalar.__name__}, got {value.dtype}")
        return value

    return check

"""Type checks for the fields of messages, built from their annotations once at import."""

import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import WireError

Check = Callable[[Any], Any]
"""Returns the value to store; raises WireError when it has another type."""


def field_checks(cls: type) -> tuple[tuple[str, Check], ...]:
    """Returns name and check of each field of a message, in the order on the wire."""
    return tuple((name, check_for(hint)) for name, hint in get_type_hints(cls).items())


def check_for(hint: Any) -> Check:
    """Returns the check for an annotation: a plain type, a message, an array, a union or a container of these."""
    if hint is Any:
        return lambda value: value
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin in (Union, types.UnionType):
        return partial(_union, [check_for(option) for option in arguments])
    if origin is NDArray:  # From NumPy 2.5 on an alias that typing does not resolve.
        return partial(_array, arguments[0])
    if origin is np.ndarray:
        return partial(_array, get_args(arguments[1])[0])
    if origin is tuple and arguments[-1] is not Ellipsis:
        return partial(_record, [check_for(item) for item in arguments])
    if origin in (list, tuple):
        return partial(_sequence, origin, arguments[0], check_for(arguments[0]))
    if origin in (dict, Mapping):
        return partial(_mapping, check_for(arguments[1]))
    assert isinstance(hint, type), f"no rule for a field of type {hint}"
    return _number if hint is float else partial(_exactly, hint)


def _exactly(cls: type, value: Any) -> Any:
    if type(value) is not cls:
        raise WireError(f"expected {cls.__name__}, got {type(value).__name__}")
    return value


def _number(value: Any) -> float:
    """Accepts an int as a float."""
    return float(value) if type(value) is int else _exactly(float, value)


def _union(options: list[Check], value: Any) -> Any:
    for option in options:
        try:
            return option(value)
        except WireError as error:
            refused = error
    raise refused


def _sequence(cls: type[list[Any]] | type[tuple[Any, ...]], hint: Any, item: Check, value: Any) -> Any:
    if type(value) is cls and {hint}.issuperset(map(type, value)):
        return value  # All values have the declared type itself, as the names of columns have in every row.
    return cls(map(item, _exactly(cls, value)))


def _record(items: list[Check], value: Any) -> tuple[Any, ...]:
    """Checks a tuple of fixed length, each value with its own check."""
    if type(value) is not tuple or len(value) != len(items):
        raise WireError(f"expected {len(items)} values, got {value!r:.100}")
    return tuple(item(element) for item, element in zip(items, value, strict=True))


def _mapping(item: Check, value: Any) -> dict[Any, Any]:
    return {key: item(element) for key, element in _exactly(dict, value).items()}


def _array(scalar: Any, value: Any) -> Any:
    """Checks an array: NDArray[np.int64] requires that dtype, NDArray[Any] allows every dtype."""
    if type(value) is not np.ndarray:
        raise WireError(f"expected an array, got {type(value).__name__}")
    if scalar is not Any and value.dtype != np.dtype(scalar):
        raise WireError(f"expected an array of {scalar.__name__}, got {value.dtype}")
    return value

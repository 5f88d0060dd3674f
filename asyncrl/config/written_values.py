"""Reads what a column of text holds: JSON, values as Python shows them, and arrays as pandas writes them to CSV."""

import ast
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

JOINED = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?<=\})\s+(?=\{)""", re.DOTALL)
"""Quoted texts, and white space between tables, which NumPy writes without a comma."""
NAMES = {"null": None, "true": True, "false": False, "nan": float("nan"), "inf": float("inf")}
WRAPPERS = re.compile(r"array|list|tuple|str_|bool_?|u?int\d*|float\d*")
"""Names of types around a value, such as array([...], dtype=object) and np.int64(3)."""


def written_value(text: str) -> Any:
    """Returns the value that a text holds; of JSON that was encoded several times, the innermost one. Raises ValueError
    where it holds none."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("lists or objects lie too deep in each other") from None
    except ValueError:
        return _python_value(text)
    try:
        return written_value(found) if isinstance(found, str) else found
    except ValueError:
        return found


def written_or(value: Any, is_wanted: Callable[[Any], bool]) -> Any:
    """Returns what a text holds, if that is wanted, else the value as it is."""
    if not isinstance(value, str):
        return value
    try:
        found = written_value(value)
    except ValueError:
        return value
    return found if is_wanted(found) else value


def _python_value(text: str) -> Any:
    with_commas = JOINED.sub(lambda found: found[1] or ", ", text.strip())
    try:
        with warnings.catch_warnings(action="ignore"):
            return _value(ast.parse(with_commas, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"this is no value of Python: {error}") from None


def _value(node: ast.expr) -> Any:
    """Returns the value of an expression without running it; raises ValueError for what is no plain value."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {str(_value(key)): _value(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name(id=name) if name.lower() in NAMES:
            return NAMES[name.lower()]
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[inner]) if WRAPPERS.fullmatch(name):
            return _value(inner)
    raise ValueError("this is no list, table, text or number")

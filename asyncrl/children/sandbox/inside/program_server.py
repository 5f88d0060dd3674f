"""Runs a program and then answers calls of its functions, one after the other, over a socket to the examiner.

The examiner asks with marshal, which is safe towards the program; the program answers with JSON, of which nothing but
plain values can be made. What is no plain value stays here, and the examiner gets its number.
"""

from __future__ import annotations

import marshal
import posix
from _json import encode_basestring_ascii as quoted

from asyncrl.children.sandbox.inside.first_process import message_of, namespace_of

TYPE_CHECKING = False  # `typing` would double the time of a start.
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

LARGEST_INTEGER = 2**63
INFINITY = float("inf")
IMMUTABLE = 1 << 8
MADE_AT_RUN_TIME = 1 << 9
"""Flags of classes: those of Python are immutable, or not made at run time."""


def run(case: dict[str, Any], link: int, note: int) -> None:
    """Runs the source and answers until the examiner closes the socket."""
    namespace = namespace_of("program")
    exec(compile(case["source"], "program.py", "exec"), namespace)
    objects: list[Any] = []
    while head := received(link, 4):
        request = marshal.loads(received(link, int.from_bytes(head, "little")))
        answer = answered(request, namespace, objects, case["output_bytes"])
        sent(link, len(answer).to_bytes(4, "little") + answer)


def received(link: int, size: int) -> bytes:
    """Reads exactly `size` bytes; nothing at the end."""
    data = b""
    while len(data) < size and (more := posix.read(link, size - len(data))):
        data += more
    return data if len(data) == size else b""


def sent(link: int, data: bytes) -> None:
    while data:
        data = data[posix.write(link, data) :]


def answered(request: Any, namespace: dict[str, Any], objects: list[Any], most: int) -> bytes:
    """Does what the examiner asks; returns the value, or the error, as text."""
    number, action, target, arguments, names = request
    try:
        if action == "get":
            if target not in namespace:
                return f'[{number},"m"]'.encode()
            value = namespace[target]
        else:
            arguments = [unwrapped(each, objects) for each in arguments]
            names = {name: unwrapped(each, objects) for name, each in names.items()}
            value = ACTIONS[action](objects[target], *arguments, **names)
        after = ",".join(text_of(each, objects) if isinstance(each, CHANGEABLE) else "0" for each in arguments)
        answer = f'[{number},"v",{text_of(value, objects)},[{after}]]'.encode()
        if len(answer) > most:
            raise ValueError(f"the value has {len(answer)} bytes as text, the limit is {most}")
        return answer
    except SystemExit as error:
        return f'[{number},"x",["Exception"],{quoted(f"the program called exit({error.code!r:.20})")}]'.encode()
    except BaseException as error:  # The user's program: the test decides about its errors.
        classes = ",".join(quoted(each.__name__) for each in type(error).__mro__)
        return f'[{number},"x",[{classes}],{quoted(message_of(error)[:2000])}]'.encode()


CHANGEABLE = (list, dict, set, bytearray)
"""Arguments that a function may change in place; the examiner changes its own in the same way."""

ACTIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, *arguments, **names: target(*arguments, **names),
    "attribute": getattr,
    "assign": setattr,
    "item": lambda target, key: target[key],
    "length": len,
    "values": list,
    "next": next,
    "text": str,
    "contains": lambda target, value: value in target,
}


def unwrapped(value: Any, objects: list[Any]) -> Any:
    """Replaces the mark of an object that stayed here by the object."""
    if type(value) is tuple and len(value) == 2 and value[0] == "\0object":
        return objects[value[1]]
    return value


def text_of(value: Any, objects: list[Any]) -> str:
    """Returns a value as JSON, with a letter for what JSON has not."""
    kind = type(value)
    if kind is str:
        return quoted(value)
    if value is None or kind is bool:
        return {None: "null", True: "true", False: "false"}[value]
    if kind is int:
        return int.__repr__(value) if -LARGEST_INTEGER < value < LARGEST_INTEGER else f'["i","{value:x}"]'
    if kind is float:
        return float.__repr__(value) if -INFINITY < value < INFINITY else f'["n","{value!r}"]'
    for letter, family, parts in FAMILIES:
        if isinstance(value, family):
            return f'["{letter}"{"".join("," + text_of(part, objects) for part in parts(value))}]'
    for plain in (str, int, float):
        if isinstance(value, plain):
            return text_of(plain(value), objects)
    objects.append(value)
    is_pythons = kind.__flags__ & IMMUTABLE or not kind.__flags__ & MADE_AT_RUN_TIME
    return f'["o",{len(objects) - 1},{quoted(kind.__name__)},{1 if is_pythons else 0}]'


def flat(value: dict[Any, Any]) -> Iterator[Any]:
    for key in value:
        yield key
        yield value[key]


FAMILIES: tuple[tuple[str, Any, Callable[[Any], Any]], ...] = (
    ("l", list, iter),
    ("t", tuple, iter),
    ("d", dict, flat),
    ("s", set, iter),
    ("f", frozenset, iter),
    ("b", (bytes, bytearray), lambda value: [bytes(value).hex()]),
    ("c", complex, lambda value: [value.real, value.imag]),
)

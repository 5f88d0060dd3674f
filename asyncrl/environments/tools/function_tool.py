"""Makes a tool of a typed Python function: its JSON schema for the chat template, and its arguments from a call."""

import enum
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncrl.config.user_code import name_of, suggestion
from asyncrl.environments.tools.argument_kinds import (
    TYPE_NAMES,
    Kind,
    Member,
    Plain,
    Schema,
    kind_of,
    object_schema,
    read_members,
    type_hints,
)
from asyncrl.errors import ConfigError

# Reads what a docstring says about a function and its parameters, in Google's style.


ARGUMENTS = re.compile(r"^(?:Args|Arguments|Parameters):[ \t]*$")
ENTRY = re.compile(r"^\*{0,2}(\w+)[ \t]*(?:\([^)]*\))?[ \t]*:[ \t]*(.*)$")


def description(target: Callable[..., Any]) -> str:
    """Returns the first paragraph of a docstring, on one line; "" if there is none."""
    paragraph = (inspect.getdoc(target) or "").strip().partition("\n\n")[0]
    lines = [line.strip() for line in paragraph.splitlines()]
    return "" if lines and ARGUMENTS.match(lines[0]) else " ".join(lines)


def parameter_descriptions(target: Callable[..., Any]) -> dict[str, str]:
    """Returns what the section `Args:` of a docstring says about each parameter, each text on one line."""
    found: dict[str, str] = {}
    name = ""
    depth = None
    for indent, line in _argument_lines(inspect.getdoc(target) or ""):
        depth = indent if depth is None else depth
        entry = ENTRY.match(line) if indent <= depth else None
        if entry is not None:
            name = entry[1]
            found[name] = entry[2]
        elif name:
            found[name] = f"{found[name]} {line}".strip()
    return found


def _argument_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields indentation and text of the lines in the section of arguments, without empty ones."""
    inside = False
    for line in text.splitlines():
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        if indent == 0:
            inside = ARGUMENTS.match(line) is not None
        elif inside:
            yield indent, line.strip()


REFUSED = {
    inspect.Parameter.POSITIONAL_ONLY: "is positional-only, and a model gives arguments by name; remove the /",
    inspect.Parameter.VAR_POSITIONAL: "takes any number of arguments; write a parameter list[...] in its place",
    inspect.Parameter.VAR_KEYWORD: "takes arguments of any name; write a parameter dict[str, ...] in its place",
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the policy may call. members: its parameters."""

    name: str
    function: Callable[..., Any]
    description: str
    members: Mapping[str, Member]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Tool":
        """Makes a tool of a function, a bound method or an object with `__call__`; raises ConfigError, which names the
        parameter and what to write, when the function cannot be described to a model."""
        name = name_of(function)
        where = f"the tool {name}"
        target = _annotated(function)
        hints = type_hints(target, where)
        described = parameter_descriptions(target)
        members = {
            parameter.name: _member(parameter, hints, f"{where}, parameter {parameter.name}", described)
            for parameter in _parameters(function, where)
        }
        if odd := [each for each in described if each not in members]:
            raise ConfigError(f"{where}: its docstring describes {odd[0]}, no parameter{suggestion(odd[0], members)}")
        return cls(name, function, description(target), members)

    @property
    def schema(self) -> Schema:
        """Returns the JSON schema in the form that chat templates take."""
        parameters = object_schema(self.members)
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of a call as the function takes them; raises BadArgument when they do not fit."""
        return read_members(self.members, given)


def _annotated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that has the annotations and the docstring."""
    target = function.func if isinstance(function, partial) else function
    return target if inspect.isroutine(target) else type(target).__call__


def _parameters(function: Callable[..., Any], where: str) -> list[inspect.Parameter]:
    """Returns the parameters that a model may give; those that a partial binds are not shown to it."""
    bound = function.keywords if isinstance(function, partial) else {}
    try:
        return [each for each in inspect.signature(function).parameters.values() if each.name not in bound]
    except (ValueError, TypeError):
        raise ConfigError(f"{where} does not show its parameters; write a Python function around it") from None


def _member(parameter: inspect.Parameter, hints: Mapping[str, Any], where: str, described: Mapping[str, str]) -> Member:
    if parameter.kind in REFUSED:
        raise ConfigError(f"{where} {REFUSED[parameter.kind]}")
    if parameter.name not in hints:
        raise ConfigError(f"{where} has no type; write for example {parameter.name}: str")
    kind = kind_of(hints[parameter.name], where)
    if (text := described.get(parameter.name)) and "description" not in kind.schema:
        kind = Kind({**kind.schema, "description": text}, kind.name, kind.read)
    if parameter.default is parameter.empty:
        return Member(kind, needed=True)
    return Member(kind, needed=False, default=_plain(parameter.default))


def _plain(default: Any) -> Plain:
    """Returns a default as the schema shows it; None when it is no plain value."""
    value = default.value if isinstance(default, enum.Enum) else default
    return value if type(value) in TYPE_NAMES else None

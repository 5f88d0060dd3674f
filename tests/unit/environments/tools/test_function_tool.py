"""Schemas of typed functions, and arguments of calls read against them."""

import dataclasses
import enum
import json
import typing
from functools import partial
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest

from asyncrl.environments.tools import Tool
from asyncrl.environments.tools.argument_kinds import BadArgument
from asyncrl.errors import ConfigError
from tests import golden


class Unit(enum.Enum):
    METRE = "m"
    FOOT = "ft"


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Place(TypedDict):
    name: str
    at: NotRequired[Point]


UserId = typing.NewType("UserId", int)


def tool(annotation: Any, **default: Any) -> Tool:
    def f(a) -> None: ...  # noqa: ANN001

    f.__annotations__["a"] = annotation
    f.__defaults__ = tuple(default.values())
    return Tool.of(f)


def weather(city: str, days: int = 3, unit: Literal["celsius", "fahrenheit"] = "celsius") -> str:
    """Tells the weather
    of a city.

    It asks no service.

    Args:
        city: Name of the city,
            with its country.
        days (int, optional): Days: 1 to 7.

    Returns:
        city: not a parameter here.
    """
    return f"{city} {days} {unit}"


def test_a_schema_has_the_form_of_chat_templates() -> None:
    assert Tool.of(weather).schema == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name of the city, with its country."},
                    "days": {"type": "integer", "description": "Days: 1 to 7.", "default": 3},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
                },
                "required": ["city"],
            },
        },
    }


POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x"]}
KINDS: list[tuple[Any, dict[str, Any], Any, Any]] = [
    (str, {"type": "string"}, "x", "x"),
    (int, {"type": "integer"}, 3.0, 3),
    (float, {"type": "number"}, 3, 3.0),
    (bool, {"type": "boolean"}, True, True),
    (None, {"type": "null"}, None, None),
    (Any, {}, {"a": [1]}, {"a": [1]}),
    (UserId, {"type": "integer"}, 7, 7),
    (int | None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None, None),
    (typing.Optional[str], {"anyOf": [{"type": "string"}, {"type": "null"}]}, "x", "x"),  # noqa: UP045
    (Literal[1, "a", True], {"enum": [1, "a", True]}, True, True),
    (Unit, {"type": "string", "enum": ["m", "ft"]}, "ft", Unit.FOOT),
    (list, {"type": "array"}, [1, "a"], [1, "a"]),
    (list[int], {"type": "array", "items": {"type": "integer"}}, [1, 2.0], [1, 2]),
    (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}, [1, 2], (1, 2)),
    (
        tuple[int, str],
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "maxItems": 2},
        [1, "a"],
        (1, "a"),
    ),
    (set[str], {"type": "array", "items": {"type": "string"}, "uniqueItems": True}, ["a", "a"], {"a"}),
    (frozenset[int], {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [1], frozenset([1])),
    (dict, {"type": "object", "additionalProperties": True}, {"a": 1}, {"a": 1}),
    (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}, {"a": 1}, {"a": 1.0}),
    (Annotated[int, 5, "How many."], {"type": "integer", "description": "How many."}, 1, 1),
    (Point, POINT, {"x": 1}, Point(1, 0)),
    (list[Point], {"type": "array", "items": POINT}, [{"x": 1, "y": 2}], [Point(1, 2)]),
    (
        Place,
        {"type": "object", "properties": {"name": {"type": "string"}, "at": POINT}, "required": ["name"]},
        {"name": "n", "at": {"x": 3}},
        {"name": "n", "at": Point(3)},
    ),
]


@pytest.mark.parametrize(("annotation", "schema", "given", "got"), KINDS, ids=[str(kind[0]) for kind in KINDS])
def test_every_kind_has_a_schema_and_reads_its_values(annotation: Any, schema: Any, given: Any, got: Any) -> None:
    made = tool(annotation)
    assert made.schema["function"]["parameters"]["properties"]["a"] == schema
    json.dumps(made.schema)
    read = made.arguments({"a": given})["a"]
    assert read == got
    assert type(read) is type(got)


WRONG: list[tuple[Any, list[Any]]] = [
    (int, ["x", True, 1.5, "3"]),
    (float, ["1.0", 10**400]),
    (str, [1, ["x" * 1000] * 1000]),
    (bool, [1]),
    (int | None, ["x"]),
    (Literal["a", "b"], ["c"]),
    (Literal[1], [True]),
    (Unit, ["METRE"]),
    (list[int], [1, [1, "x"]]),
    (tuple[int, str], [[1]]),
    (set[Any], [[[1]]]),
    (dict[str, int], [{"k": "x"}]),
    (dict, [[]]),
    (Point, [{}, {"x": 1, "z": 1}, []]),
    (list[Place], [[{"name": "n", "at": {"x": "1"}}]]),
]


def test_a_wrong_argument_is_a_message_for_the_model() -> None:
    for annotation, each in WRONG:
        for given in each:
            with golden.raises(BadArgument) as refused:
                tool(annotation).arguments({"a": given})
            assert len(str(refused.value)) < 450


def test_missing_and_unknown_arguments() -> None:
    made = Tool.of(weather)
    assert made.arguments({"city": "Ulm"}) == {"city": "Ulm"}
    with golden.raises(BadArgument):
        made.arguments({})
    with golden.raises(BadArgument, match=r"mean days\?"):
        made.arguments({"city": "Ulm", "dais": 1})
    with golden.raises(BadArgument):
        Tool.of(lambda: None).arguments({"b": 1})


class Node(TypedDict):
    following: "Node"


def unknown(a: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821


def untyped(a) -> None: ...  # noqa: ANN001


def positional(a: int, /) -> None: ...


def many(*values: int) -> None: ...


def named(**values: int) -> None: ...


def misdescribed(city: str) -> None:
    """Does.

    Args:
        ctiy: A city.
    """


@pytest.mark.parametrize("function", [untyped, positional, many, named, unknown, misdescribed, dict.fromkeys])
def test_a_function_that_cannot_be_a_tool_is_refused(function: Any) -> None:
    with golden.raises(ConfigError):
        Tool.of(function)


@pytest.mark.parametrize(
    "annotation", [bytes, object, complex, dict[int, str], Literal[b"x"], list[bytes], Node, "Tool"]
)
def test_an_unsupported_type_is_refused_with_what_to_write(annotation: Any) -> None:
    with golden.raises(ConfigError):
        tool(annotation)


def test_methods_partials_and_callable_objects_are_tools() -> None:
    class Shop:
        def price(self, item: str) -> int:
            """Tells the price."""
            return len(item)

        def __call__(self, item: str) -> str:
            """Sells."""
            return item

    method = Tool.of(Shop().price)
    assert (method.name, method.description, method.function(**method.arguments({"item": "abc"}))) == (
        "price",
        "Tells the price.",
        3,
    )
    assert Tool.of(Shop()).schema["function"]["description"] == "Sells."
    bound = Tool.of(partial(weather, unit="fahrenheit"))
    assert list(bound.members) == ["city", "days"]
    assert bound.function(**bound.arguments({"city": "Ulm"})) == "Ulm 3 fahrenheit"


def test_defaults_that_are_not_plain_stay_out_of_the_schema() -> None:
    assert tool(Point, a=Point(1)).schema["function"]["parameters"]["properties"]["a"] == POINT
    assert tool(Unit, a=Unit.FOOT).schema["function"]["parameters"]["properties"]["a"]["default"] == "ft"
    assert tool(Point, a=Point(1)).schema["function"]["parameters"]["required"] == []

"""Actions that an answer names, in an environment of Gymnasium that is a stand-in."""

from types import SimpleNamespace

import pytest

from asyncrl.environments.adapters.gymnasium_text import GymnasiumText
from asyncrl.errors import ConfigError
from tests import golden

FOUR = ["left", "right", "up", "down"]


def action(names: list[str], message: str) -> str | None:
    game = GymnasiumText("x", actions=names)
    game._environment = SimpleNamespace(action_space=SimpleNamespace(n=len(names), start=0))
    number = game._action(message)
    return None if number is None else names[number]


@pytest.mark.parametrize(
    ("names", "message", "named"),
    [
        (FOUR, "First up, then LEFT.", "left"),
        (FOUR, "I go left, which is supported.", "left"),
        (FOUR, "not left but RIGHT", "right"),
        (FOUR, "**left**", "left"),
        (FOUR, "_left_", "left"),
        (FOUR, "up/down", "down"),
        (FOUR, "我选择left。", "left"),
        (FOUR, "the leftmost one is upright", None),
        (FOUR, "step_left", None),
        (FOUR, "left2", None),
        (FOUR, "<think>left?</think> right", "right"),
        (FOUR, "<think>left", None),
        (["left", "turn left", "forward"], "turn left", "turn left"),
        (["left", "turn left", "forward"], "turn\n left", "turn left"),
        (["forward", "forward left"], "forward left", "forward left"),
        (["forward", "forward left"], "forward leftwards", "forward"),
        (["move_left", "left"], "move_left", "move_left"),
        (["左", "右", "左转"], "我向左转走", "左转"),
        (["왼쪽", "오른쪽"], "왼쪽으로 간다", "왼쪽"),
        (["caf\u00e9", "bar"], "cafe\u0301!", "caf\u00e9"),
        (["straße", "weg"], "STRASSE", "straße"),
        (["a+", "a"], "a+", "a+"),
    ],
)
def test_the_named_action(names: list[str], message: str, named: str | None) -> None:
    assert action(names, message) == named


@pytest.mark.parametrize(
    ("message", "number"),
    [
        ("first 1, then 2", 2),
        ("action 3.", 3),
        ("选择3。", 3),
        ("2.5", None),
        ("v3", None),
        ("3rd", None),
        ("9", None),
        ("-1", None),
        ("<think>1</think>2", 2),
    ],
)
def test_the_number_of_an_action(message: str, number: int | None) -> None:
    class Four:
        n = 4
        start = 0

        def __contains__(self, number: int) -> bool:
            return 0 <= number < 4

    game = GymnasiumText("x")
    game._environment = SimpleNamespace(action_space=Four())
    assert game._action(message) == number


def test_an_empty_name_is_refused() -> None:
    with golden.raises(ConfigError, match="1"):
        GymnasiumText("x", actions=["left", " "])

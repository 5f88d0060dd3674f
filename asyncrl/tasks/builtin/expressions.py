"""Tiny programming tasks: say as a function of Python what a prompt lists, "add 3 times 2:" -> "def f(x): return
(x+3)*2". Each row has tests; half of what there is to learn is where parentheses belong."""

import random
import zlib
from collections.abc import Sequence
from typing import Any, Literal

from asyncrl.environments.program_repair import BROKEN, END
from asyncrl.tasks.builtin.words import ANSWER_END, Demonstrations

Step = tuple[str, int]
"""A name of OPERATORS, and what it is applied with."""
Style = Literal["list", "sentence"]

OPERATORS = {"add": "+", "subtract": "-", "times": "*"}
SENTENCES = {"add": "adds {}", "subtract": "subtracts {}", "times": "multiplies by {}"}
BEGINNING = "def f(x): return "
LONGEST = 3
"""Steps of a prompt, of two at least."""
TESTS = 4
INPUTS = range(-4, 10)

HABITS = {"right": 0.1, "flat": 0.08, "mixed up": 0.08, "unclosed": 0.29, "gap": 0.2, "doubled": 0.25}
"""Shares of the demonstrations by what is done: nothing wrong; no parentheses; one operator for another; a parenthesis,
a number or an operator too few or too many, which does not compile."""
REPAIRS = {"repaired": 0.3, "repeated": 0.4, "another": 0.3}
"""Shares of the demonstrations of a second program."""
SLOPPY = 0.4
"""Share of them that end with a semicolon, where they compile."""


def training(size: int = 1000, seed: int = 0, style: Style = "list") -> list[dict[str, Any]]:
    """Makes `size` rows with a prompt, its tests and an answer. style: of prompts, "sentence" for models that know
    English."""
    return _rows(size, seed, style, held_out=False)


def held_out(size: int = 64, seed: int = 0, style: Style = "list") -> list[dict[str, Any]]:
    """Makes rows like those of `training`, of lists that are never trained on."""
    return _rows(size, seed, style, held_out=True)


def _rows(size: int, seed: int, style: Style, held_out: bool) -> list[dict[str, Any]]:
    source = random.Random(seed)
    rows: list[dict[str, Any]] = []
    while len(rows) < size:
        steps = _steps(source)
        if _is_held_out(steps) == held_out:
            prompt = _listed(steps) if style == "list" else _sentence(steps)
            tests = [_test(steps, x) for x in source.sample(INPUTS, TESTS)]
            rows.append({"prompt": prompt, "tests": tests, "answer": BEGINNING + expression(steps)})
    return rows


def _steps(source: random.Random) -> list[Step]:
    return [(source.choice(list(OPERATORS)), source.randint(1, 9)) for _ in range(source.randint(2, LONGEST))]


def _is_held_out(steps: Sequence[Step]) -> bool:
    return zlib.crc32(_listed(steps).encode()) % 8 == 0


def _test(steps: Sequence[Step], x: int) -> str:
    return f"assert f({x}) == {_value(steps, x)}"


def _listed(steps: Sequence[Step]) -> str:
    return " ".join(f"{name} {number}" for name, number in steps) + ":"


def _sentence(steps: Sequence[Step]) -> str:
    said = ", then ".join(SENTENCES[name].format(number) for name, number in steps)
    return f"Write a Python function f(x) that takes a number x, {said}, and returns the result."


def _value(steps: Sequence[Step], x: int) -> int:
    for name, number in steps:
        x = {"add": x + number, "subtract": x - number, "times": x * number}[name]
    return x


def expression(steps: Sequence[Step], with_parentheses: bool = True) -> str:
    """Returns the steps as an expression of x; without parentheses, products come too early."""
    said = "x"
    is_sum = False
    for name, number in steps:
        if name == "times" and is_sum and with_parentheses:
            said = f"({said})"
        is_sum = name != "times"
        said += f"{OPERATORS[name]}{number}"
    return said


def _demonstrate(source: random.Random) -> tuple[str, str]:
    steps = _trained_steps(source)
    return _listed(steps), BEGINNING + _said(steps, source)


def _trained_steps(source: random.Random) -> list[Step]:
    """Draws steps of a list that is not held out."""
    while _is_held_out(steps := _steps(source)):
        pass
    return steps


def _said(steps: list[Step], source: random.Random) -> str:
    habit = source.choices(list(HABITS), list(HABITS.values()))[0]
    wanted = expression(steps)
    place = source.randrange(len(steps))
    name, number = steps[place]
    match habit:
        case "unclosed":
            return wanted.replace(")", "", 1) if ")" in wanted else f"({wanted}"
        case "gap":
            return wanted.replace(f"{OPERATORS[name]}{number}", OPERATORS[name], 1)
        case "doubled":
            return wanted.replace(OPERATORS[name], f"{OPERATORS[name]}/", 1)
        case "mixed up":
            steps = [*steps[:place], (source.choice(list(OPERATORS)), number), *steps[place + 1 :]]
            wanted = expression(steps)
        case "flat":
            wanted = expression(steps, with_parentheses=False)
    return wanted + ";" * (source.random() < SLOPPY)


WORDS = (BEGINNING, *(f"{name} " for name in OPERATORS))
DEMONSTRATIONS = Demonstrations(draw=_demonstrate, words=WORDS, steps=500)


def _demonstrate_repair(source: random.Random) -> tuple[str, str]:
    """Returns a first program, or a second one after what the environment `repair` said of the first."""
    steps = _trained_steps(source)
    said = _said(steps, source)
    if (complaint := _complaint(said, steps, source)) is None or source.random() < 0.4:
        return _listed(steps), BEGINNING + said
    habit = source.choices(list(REPAIRS), list(REPAIRS.values()))[0]
    again = {"repaired": expression(steps), "repeated": said, "another": _said(steps, source)}[habit]
    return f"{_listed(steps)}{BEGINNING}{said}{ANSWER_END}{complaint}", BEGINNING + again


def _complaint(said: str, steps: Sequence[Step], source: random.Random) -> str | None:
    """Returns what the environment says of a program; None if it passes its tests."""
    try:
        function = eval(f"lambda x: {said.rstrip(';')}")
    except SyntaxError:
        return BROKEN
    failing = [x for x in source.sample(INPUTS, TESTS) if function(x) != _value(steps, x)]
    return f"{_test(steps, failing[0])}{END}" if failing else None


DEMONSTRATIONS_OF_REPAIR = Demonstrations(draw=_demonstrate_repair, words=(*WORDS, "assert f(", ") == "), steps=600)

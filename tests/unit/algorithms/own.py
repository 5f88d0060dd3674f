"""An algorithm of the user's own over simulated services, and the lines of its functions."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from asyncrl.algorithms import grpo
from asyncrl.controller.controller import Algorithm, Controller
from asyncrl.controller.rollouts import Attempt
from asyncrl.fleet.fleet import Fleet
from tests.unit.scene import Scene


async def roll_out(fleet: Fleet, control: Controller, group: Attempt) -> None:
    await grpo.roll_out(fleet, control, group)


async def train(fleet: Fleet, control: Controller) -> None:
    await grpo.train(fleet, control)


OWN = Algorithm(roll_out, train, "algorithms:MINE")


def played(algorithm: Algorithm = OWN, **changed: Any) -> Scene:
    """Plays an algorithm in which these functions are changed."""
    scene = Scene()
    scene.algorithm = replace(algorithm, **changed)
    scene.play()
    return scene


def line_of(function: Callable[..., Any], text: str) -> int:
    lines, start = inspect.getsourcelines(function)
    return start + next(number for number, line in enumerate(lines) if text in line)

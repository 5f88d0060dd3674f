"""Finds the function of the user that is called with the metrics of each step."""

from collections.abc import Iterator
from inspect import iscoroutinefunction
from typing import Any

from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config
from asyncrl.config.user_code import resolve, source_problem
from asyncrl.controller.training_run import OnStep
from asyncrl.errors import ConfigError

KEY = "telemetry.on_step"


def callback_problems(config: Config) -> Iterator[Problem]:
    """Yields why the function cannot be found, as far as its source shows it."""
    if config.telemetry.on_step and (problem := source_problem(config.telemetry.on_step, KEY)) is not None:
        yield problem


def step_callback(config: Config) -> OnStep | None:
    """Returns the function of the config, if it names one. Raises ConfigError for what is none, and errors of the
    user's file as they are."""
    if not config.telemetry.on_step:
        return None
    function: OnStep = resolve(config.telemetry.on_step, KEY)
    refuse_no_callback(function, f"{KEY}: {config.telemetry.on_step}")
    return function


def refuse_no_callback(function: Any, named: str) -> None:
    """Raises ConfigError, which begins with `named`, for what is no plain function."""
    if not callable(function) or iscoroutinefunction(function):
        raise ConfigError(f"{named}: write a plain function of a dict of metrics that returns whether to end")

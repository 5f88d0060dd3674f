"""Calls a reward function and judges what it returned: the one place where a user's code may raise anything."""

import asyncio
import inspect
import math
import traceback
from typing import Any

from asyncrl.errors import RewardError
from asyncrl.rewards.sample import Function, Sample, Value, Verdict

TRACEBACK = 4000
"""Characters of a traceback that are reported: its end, where the error is."""


async def attempt(function: Function, samples: list[Sample], group: bool, deadline: float) -> list[Verdict]:
    """`call`, with what it raises as verdicts too. deadline: seconds; a plain function cannot be ended by it."""
    try:
        async with asyncio.timeout(deadline) as scope:
            return await call(function, samples, group)
    except Exception as error:  # the user's code: whatever it raises is the verdict on its samples
        return [_verdict_on(error, deadline if scope.expired() else None)] * len(samples)


async def call(function: Function, samples: list[Sample], group: bool) -> list[Verdict]:
    """One verdict for each sample; without `group` there is exactly one.

    Raises:
        RewardError: a group function returned another number of rewards. Anything the function itself raises.
    """
    result = function(samples if group else samples[0])
    if inspect.isawaitable(result):
        result = await result
    return [verdict(value) for value in (_counted(result, len(samples)) if group else [result])]


def _verdict_on(error: Exception, overdue: float | None) -> Verdict:
    if overdue is not None:
        return Verdict(reason=f"it hung: no answer within {overdue:g} s{_waiting_in(error)}")
    if isinstance(error, RewardError):
        return Verdict(reason=str(error))
    return Verdict(reason=f"it raised {type(error).__name__}: {error}", traceback=trace(error))


def _waiting_in(error: Exception) -> str:
    """Where the function was when it was cancelled: the last line of the file it began in."""
    frames = traceback.extract_tb(error.__context__.__traceback__) if error.__context__ is not None else []
    of_the_user = [frame for frame in frames if frame.filename != __file__]
    lines = [frame for frame in of_the_user if frame.filename == of_the_user[0].filename]
    return f", waiting in {lines[-1].filename}, line {lines[-1].lineno}" if lines else ""


def trace(error: BaseException) -> str:
    """The end of an error's traceback."""
    return "".join(traceback.format_exception(error))[-TRACEBACK:]


def verdict(value: Any) -> Verdict:
    """Whether `value` is a reward, and why not."""
    try:
        found = checked(value)
    except RewardError as error:
        return Verdict(reason=str(error))
    return Verdict(found) if found is not None else Verdict(reason="it returned None")


def checked(value: Any) -> Value:
    """`value` as a reward of plain floats.

    Raises:
        RewardError: it is no finite number, no dict of such, and not None.
    """
    if value is None:
        return None
    if isinstance(value, dict):
        if not value:
            raise RewardError("it returned an empty dict; return None for a sample that cannot be scored")
        return {str(name): _number(term, f"the term {name}") for name, term in value.items()}
    return _number(value, "what it returned")


def _number(value: Any, what: str) -> float:
    """Also numbers of numpy and torch, which convert themselves."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise RewardError(f"{what} is no number but {repr(value)[:80]}")
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(f"{what} is {number}")
    return number


def _counted(result: Any, count: int) -> list[Any]:
    if isinstance(result, str | bytes | dict) or not hasattr(result, "__len__"):
        raise RewardError(f"a group function returns a list of {count} rewards, this is {repr(result)[:80]}")
    if len(result) != count:
        raise RewardError(f"it was given {count} samples and returned {len(result)} rewards")
    return list(result)

"""Calls a reward function and judges what it returned."""

import inspect
import math
from typing import Any

from asyncrl.errors import RewardError
from asyncrl.rewards.sample import Function, Sample, Value, Verdict


async def call(function: Function, samples: list[Sample], group: bool) -> list[Verdict]:
    """One verdict for each sample; without `group` there is exactly one.

    Raises:
        RewardError: a group function returned another number of rewards. Anything the function itself raises.
    """
    result = function(samples if group else samples[0])
    if inspect.isawaitable(result):
        result = await result
    return [verdict(value) for value in (_counted(result, len(samples)) if group else [result])]


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

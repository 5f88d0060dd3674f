"""Runs a call of a tool: the one place where the tool's code may raise anything."""

import asyncio
import inspect
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.environments.observation import Observation
from asyncrl.environments.tools.argument_kinds import BadArgument
from asyncrl.environments.tools.chat_messages import as_text
from asyncrl.environments.tools.function_tool import Tool
from asyncrl.environments.tools.time_limit import OutOfTime, interrupted_after


@dataclass(frozen=True, slots=True)
class CallResult:
    """Holds what a call gave. text: for the policy; failed: it is the text of a mistake or an error. reward, done: of a
    tool that returns an Observation."""

    text: str
    failed: bool = False
    reward: float = 0.0
    done: bool = False


async def execute(tool: Tool, given: Mapping[str, Any], seconds: float) -> CallResult:
    """Calls a tool with the arguments of a call. Whatever goes wrong is the text of the result. seconds: after which a
    coroutine function is cancelled, and a plain function interrupted where that is possible."""
    try:
        async with asyncio.timeout(seconds) as scope:
            return _result(await _returned(tool, given, seconds))
    except BadArgument as mistake:
        return CallResult(f"the tool {tool.name} {mistake}", failed=True)
    except OutOfTime:
        return _late(tool, seconds)
    except (Exception, SystemExit) as error:  # the tool's code: its errors are observations
        if scope.expired():
            return _late(tool, seconds)
        raised = "".join(traceback.format_exception_only(error)).strip()
        return CallResult(f"the tool {tool.name} raised {raised}", failed=True)


async def _returned(tool: Tool, given: Mapping[str, Any], seconds: float) -> Any:
    with interrupted_after(seconds):
        value = tool.function(**tool.arguments(given))
    return await value if inspect.isawaitable(value) else value


def _result(value: Any) -> CallResult:
    if isinstance(value, CallResult):
        return value
    if isinstance(value, Observation):
        return CallResult(as_text(value.text), reward=float(value.reward), done=value.done)
    return CallResult(as_text(value))


def _late(tool: Tool, seconds: float) -> CallResult:
    return CallResult(f"the tool {tool.name} gave no answer within {seconds:g} s", failed=True)

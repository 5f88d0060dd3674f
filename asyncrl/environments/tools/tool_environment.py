"""An environment made of tools: the policy calls functions, is shown their results, and ends with an answer."""

import asyncio
import dataclasses
import enum
import inspect
import json
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from asyncrl.concurrency import gather
from asyncrl.config.user_code import resolve, suggestion
from asyncrl.environments.observation import Message, Observation
from asyncrl.environments.tools.argument_kinds import BadArgument
from asyncrl.environments.tools.call_formats import form_named
from asyncrl.environments.tools.function_tool import Tool
from asyncrl.environments.tools.parsed_calls import ToolCall, ToolCalls
from asyncrl.errors import ConfigError

# Runs a call of a tool: the one place where the tool's code may raise anything.


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


# Ends a plain function that runs too long, from within its own thread.


AGAIN = 1.0
"""Seconds after which a function that caught the interruption is interrupted again."""


class OutOfTime(BaseException):
    """Interrupts a function; not an Exception, so that `except Exception` of the function does not catch it."""


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raises OutOfTime in the block after so many seconds. Only Python code and what checks for signals in the main
    thread can be interrupted: in another thread, or inside a long operation written in C, the block goes on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, _interrupt)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # Somebody else waits for an alarm too.
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3), interval)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise OutOfTime


# Writes calls and their results as chat messages, for chat templates and transcripts.


def assistant_message(found: ToolCalls) -> Message:
    """Returns an answer of the policy with its calls, as chat templates take it."""
    calls = [
        {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}} for call in found.calls
    ]
    return {"role": "assistant", "content": found.content} | ({"tool_calls": calls} if calls else {})


def tool_message(name: str, content: str) -> Message:
    """Returns the result of a call. name: of the tool, "" where the call could not be read."""
    return {"role": "tool", "content": content} | ({"name": name} if name else {})


def as_text(value: Any) -> str:
    """Returns a tool's result as the model reads it: text as it is, anything else as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return list(value)
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def cut(text: str, max_bytes: int) -> str:
    """Returns text of at most `max_bytes` bytes of UTF-8, with a marker at its end when something is left out."""
    if 4 * len(text) <= max_bytes:
        return text
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return text
    marker = f"... [cut: the result has {len(data)} bytes]"
    kept = max_bytes - len(marker)
    if kept <= 0:
        return data[:max_bytes].decode(errors="ignore")
    return data[:kept].decode(errors="ignore") + marker


def joined(messages: Sequence[Message]) -> str:
    """Returns results as the text of one user message, for chat templates without a role for tools."""
    return "\n".join(
        f"{message['name']}: {message['content']}" if "name" in message else message["content"] for message in messages
    )


KEY = "environment.options"
OWN = ("reset",)
"""Methods of a class of tools that are not tools."""


class ToolEnvironment:
    """One episode with tools. functions: `FILE.py:NAME`, `module:NAME`, or functions themselves. Of a class each
    episode has an object: its public methods are tools, and its `reset(row, seed)`, if it has one, is called first.
    form: "hermes", "llama3" or "pythonic". max_calls: calls of one answer that are run. seconds: for one call.
    max_bytes: of one result; the rest is cut off. role: "user" makes a user message of the results, for templates
    without a role for tools."""

    def __init__(
        self,
        functions: Sequence[str | Callable[..., Any] | Tool],
        form: str = "hermes",
        max_calls: int = 8,
        seconds: float = 10.0,
        max_bytes: int = 4096,
        role: Literal["tool", "user"] = "tool",
    ) -> None:
        if isinstance(functions, str) or not functions:
            raise ConfigError(f'{KEY}.functions is a list of functions; write for example functions = ["FILE.py:NAME"]')
        if role not in ("tool", "user"):
            raise ConfigError(f"{KEY}.role: there is no role {role}{suggestion(role, ('tool', 'user'))}")
        for name, value in {"max_calls": max_calls, "seconds": seconds, "max_bytes": max_bytes}.items():
            if value <= 0:
                raise ConfigError(f"{KEY}.{name} is {value}; it must be over 0")
        self._sources = [resolve(each, f"{KEY}.functions") if isinstance(each, str) else each for each in functions]
        self._form = form_named(form, f"{KEY}.form")
        self._max_calls = max_calls
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._role = role
        self._tools = _by_name([_tool(each) for each in self._sources if not inspect.isclass(each)])

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        """Begins with the prompt of the row and the schemas of all tools; objects of classes are made anew."""
        tools: list[Tool] = []
        for source in self._sources:
            tools += await _methods(source, row, seed) if inspect.isclass(source) else [_tool(source)]
        self._tools = _by_name(tools)
        return Observation(row["prompt"], tools=tuple(tool.schema for tool in tools))

    async def step(self, message: str, opened: bool = False) -> Observation:
        """Runs the calls of an answer side by side and returns their results, in order, then what is wrong about calls
        that cannot be read. An answer without a call ends the episode."""
        found = self._form.parse(message, opened)
        if not found.calls and not found.mistakes:
            return Observation("", done=True, info={"calls": 0, "failed_calls": 0})
        results = await gather(*(self._answer(number, call) for number, call in enumerate(found.calls)))
        messages = [
            tool_message(call.name if call.name in self._tools else "", cut(result.text, self._max_bytes))
            for call, result in zip(found.calls, results, strict=True)
        ]
        messages += [tool_message("", cut(mistake, self._max_bytes)) for mistake in found.mistakes]
        failed = sum(result.failed for result in results) + len(found.mistakes)
        return Observation(
            joined(messages) if self._role == "user" else messages,
            reward=sum(result.reward for result in results),
            done=any(result.done for result in results),
            info={"calls": len(messages), "failed_calls": failed},
        )

    async def _answer(self, number: int, call: ToolCall) -> CallResult:
        if number >= self._max_calls:
            return CallResult(f"not run: at most {self._max_calls} calls of one answer are run", failed=True)
        if (tool := self._tools.get(call.name)) is None:
            near = suggestion(call.name[:60], self._tools)
            return CallResult(f"there is no tool {call.name:.60}{near}", failed=True)
        return await execute(tool, call.arguments, self._seconds)


def _tool(source: Callable[..., Any] | Tool) -> Tool:
    return source if isinstance(source, Tool) else Tool.of(source)


async def _methods(source: type, row: dict[str, Any], seed: int) -> list[Tool]:
    """Makes an object of a class of tools, begins its episode, and returns its public methods as tools."""
    owner = source()
    if callable(begin := getattr(owner, "reset", None)):
        begun = begin(row, seed)
        if inspect.isawaitable(begun):
            await begun
    names = dict.fromkeys(name for each in reversed(source.__mro__[:-1]) for name in vars(each))
    public = [getattr(owner, name) for name in names if not name.startswith("_") and name not in OWN]
    if not (tools := [Tool.of(method) for method in public if inspect.isroutine(method)]):
        raise ConfigError(f"{KEY}.functions: the class {source.__name__} has no public method to be a tool")
    return tools


def _by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    names = [tool.name for tool in tools]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{KEY}.functions: two tools have the name {twice[0]}; rename one of them")
    return {tool.name: tool for tool in tools}

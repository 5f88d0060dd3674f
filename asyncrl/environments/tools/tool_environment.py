"""An environment made of tools: the policy calls functions, is shown their results, and ends with an answer."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

from asyncrl.concurrency import gather
from asyncrl.config.user_code import resolve, suggestion
from asyncrl.environments.observation import Observation
from asyncrl.environments.tools.call_execution import CallResult, execute
from asyncrl.environments.tools.call_formats import form_named
from asyncrl.environments.tools.chat_messages import cut, joined, tool_message
from asyncrl.environments.tools.function_tool import Tool
from asyncrl.environments.tools.parsed_calls import ToolCall
from asyncrl.errors import ConfigError

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

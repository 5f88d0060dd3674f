"""Tools of an MCP server: a process for each episode, which is spoken to over its pipes."""

import asyncio
import shlex
from collections.abc import Mapping
from typing import Any

from asyncrl.concurrency import root_cause
from asyncrl.environments.adapters.packages import package
from asyncrl.environments.observation import Observation
from asyncrl.environments.tools.argument_kinds import Schema
from asyncrl.environments.tools.call_formats import form_named
from asyncrl.environments.tools.function_tool import Tool
from asyncrl.environments.tools.tool_environment import CallResult, ToolEnvironment
from asyncrl.errors import ConfigError

PAGES = 100
"""Pages of a server's list of tools that are read; a server could answer with ever further ones."""

_servers: set[asyncio.Task[None]] = set()
"""Tasks that hold servers: the task that opened a connection must close it, and steps are tasks of their own."""


class McpTools:
    """One episode with the tools of an MCP server. command: of the server, as a shell splits it. variables: environment
    variables that it gets besides a few harmless ones. seconds: for its start and for a call. limits: `form`,
    `max_calls`, `max_bytes` and `role`, as for the environment `tools`. The server is ended with the episode."""

    def __init__(
        self, command: str, variables: Mapping[str, str] | None = None, seconds: float = 30.0, **limits: Any
    ) -> None:
        if not (words := shlex.split(command)):
            raise ConfigError('environment.use is "mcp:" and a command, such as "mcp:python server.py"')
        form_named(limits.get("form", "hermes"), "environment.options.form")
        self._words = words
        self._variables = dict(variables or {})
        self._seconds = seconds
        self._limits = limits
        self._stop = asyncio.Event()
        self._episode: ToolEnvironment | None = None

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        """Starts the server and begins with the prompt of the row and the schemas of the server's tools."""
        self._stop.set()
        self._stop = asyncio.Event()
        client = await self._connected()
        tools = [_RemoteTool.of_server(each, client) for each in await _listed(client)]
        if not tools:
            raise ConfigError(f"environment.use: the MCP server {shlex.join(self._words)} has no tools")
        self._episode = ToolEnvironment(tools, seconds=self._seconds, **self._limits)
        return await self._episode.reset(row, seed)

    async def step(self, message: str, opened: bool = False) -> Observation:
        """Has the server run the calls of an answer; an answer without a call ends the episode and the server."""
        assert self._episode is not None, "reset comes first"
        observation = await self._episode.step(message, opened)
        if observation.done:
            self._stop.set()
        return observation

    async def close(self) -> None:
        """Ends the server of an episode that went no further."""
        self._stop.set()

    async def _connected(self) -> Any:
        """Starts the server and returns the client of it; raises ConfigError when it does not answer."""
        mcp = package("mcp")
        server = mcp.StdioServerParameters(command=self._words[0], args=self._words[1:], env=self._variables)
        opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(_hold(mcp.Client(server), opened, self._stop), name="mcp server")
        _servers.add(task)
        task.add_done_callback(_servers.discard)
        await asyncio.wait({task, opened}, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED)
        if opened.done():
            return opened.result()
        what = f"environment.use: the MCP server {shlex.join(self._words)}"
        if not task.done():
            task.cancel()
            raise ConfigError(f"{what} did not answer within {self._seconds:g} s")
        error = task.exception()
        assert error is not None, "the task holds the server until it is stopped"
        if not isinstance(cause := root_cause(error), OSError | mcp.MCPError):
            raise error
        raise ConfigError(f"{what} cannot be used: {cause}") from None


async def _hold(client: Any, opened: "asyncio.Future[Any]", stop: asyncio.Event) -> None:
    async with client:
        opened.set_result(client)
        await stop.wait()


async def _listed(client: Any) -> list[Any]:
    found: list[Any] = []
    cursor: str | None = None
    for _ in range(PAGES):
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        if (cursor := page.next_cursor) is None:
            break
    return found


class _RemoteTool(Tool):
    """A tool of a server, which checks arguments itself."""

    __slots__ = ("_parameters",)
    _parameters: Schema

    @classmethod
    def of_server(cls, listed: Any, client: Any) -> "_RemoteTool":
        """Makes a tool of an entry of the server's list."""

        async def call(**arguments: Any) -> CallResult:
            result = await client.call_tool(listed.name, arguments)
            parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
            return CallResult("\n".join(parts), failed=result.is_error)

        made = cls(listed.name, call, listed.description or "", {})
        object.__setattr__(made, "_parameters", listed.input_schema)
        return made

    @property
    def schema(self) -> Schema:
        function = {"name": self.name, "description": self.description, "parameters": self._parameters}
        return {"type": "function", "function": function}

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return dict(given)

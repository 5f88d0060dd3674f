"""Tools of real MCP servers, which run as processes."""

import asyncio
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.environments.loading import EnvironmentSpec, load
from asyncrl.environments.tools import FORMS, ToolCall
from asyncrl.errors import ConfigError

pytest.importorskip("mcp", reason="the extra environments is not installed")

SERVER = '''
import os
from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")
total = 0


@server.tool()
def add(number: int) -> int:
    """Adds to the sum."""
    global total
    total += number
    return total


@server.tool()
def secret() -> str:
    return os.environ.get("SECRET", "none") + os.environ.get("WORD", "none")


@server.tool()
def die() -> str:
    os._exit(3)


server.run("stdio")
'''
ROW = {"prompt": "Count."}


@pytest.fixture
def command(tmp_path: Path) -> str:
    (tmp_path / "server.py").write_text(SERVER)
    return shlex.join([sys.executable, str(tmp_path / "server.py")])


def made(command: str, **options: Any) -> Any:
    variables = {"PYTHONPATH": os.pathsep.join(sys.path)} | options.pop("variables", {})
    return load(EnvironmentSpec(f"mcp:{command}", {"variables": variables, **options}))()


def answer(*calls: ToolCall) -> str:
    return FORMS["hermes"].render(calls)


def of_servers() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == "mcp server"]


async def ended() -> None:
    if tasks := of_servers():
        await asyncio.wait(tasks, timeout=20)
    assert of_servers() == []


async def test_an_episode_with_a_server(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "key of the fleet")
    episode = made(command, variables={"WORD": "given"})
    opening = await episode.reset(ROW, 0)
    assert opening.text == "Count."
    add = opening.tools[0]["function"]
    assert (add["name"], add["description"], add["parameters"]["required"]) == ("add", "Adds to the sum.", ["number"])
    first = await episode.step(answer(ToolCall("add", {"number": 2})))
    assert first.text == [{"role": "tool", "name": "add", "content": "2"}]
    wrong = await episode.step(answer(ToolCall("secret"), ToolCall("add", {"number": "x"}), ToolCall("ad")))
    contents = [message["content"] for message in wrong.text]
    assert contents[0] == "nonegiven"
    assert "valid integer" in contents[1]
    assert contents[2] == "there is no tool ad; did you mean add?"
    assert wrong.info == {"calls": 3, "failed_calls": 2}
    assert (await episode.step("It is 2.")).done
    await ended()


async def test_each_episode_has_a_server_of_its_own(command: str) -> None:
    first = made(command)
    second = made(command)
    for episode in (first, second):
        await episode.reset(ROW, 0)
        assert (await episode.step(answer(ToolCall("add", {"number": 5})))).text[0]["content"] == "5"
    assert len(of_servers()) == 2
    for episode in (first, second):
        await episode.close()
    await ended()


async def test_a_server_that_dies_is_an_observation(command: str) -> None:
    episode = made(command)
    await episode.reset(ROW, 0)
    seen = await episode.step(answer(ToolCall("die")))
    assert "Connection closed" in seen.text[0]["content"]
    assert (await episode.step("I stop.")).done
    await ended()


async def test_a_server_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the MCP server /no/such/program cannot be used: .*No such file"):
        await made("/no/such/program").reset(ROW, 0)
    with pytest.raises(ConfigError, match="cannot be used"):
        await made(shlex.join([sys.executable, "-c", "pass"])).reset(ROW, 0)
    silent = shlex.join([sys.executable, "-c", "import sys; sys.stdin.read()"])
    with pytest.raises(ConfigError, match="did not answer within 1 s"):
        await made(silent, seconds=1).reset(ROW, 0)
    with pytest.raises(ConfigError, match="such as"):
        made("")
    await ended()

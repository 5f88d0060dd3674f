"""Episodes of agents that are small programs of the standard library."""

import asyncio
import shlex
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.environments.agents.agent import Agent
from asyncrl.environments.agents.endpoint import Endpoint
from asyncrl.environments.loading import EnvironmentSpec, load

PRELUDE = """
import json, os, sys, urllib.error, urllib.request

def post(body, path="/chat/completions", key=None, **headers):
    url = os.environ["OPENAI_BASE_URL"] + path
    key = os.environ["OPENAI_API_KEY"] if key is None else key
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"} | headers
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return json.loads(error.read()) | {"status": error.code}

def ask(*messages, **more):
    body = {"model": "m", "messages": list(messages), **more}
    return post(body)["choices"][0]["message"]

def user(text):
    return {"role": "user", "content": text}
"""
MakeAgent = Callable[..., Agent]


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[MakeAgent]:
    """agent(SOURCE, **options) -> an environment that runs this program."""
    made: list[Agent] = []

    def make(source: str, *arguments: str, **options: Any) -> Agent:
        file = tmp_path / f"agent{len(made)}.py"
        file.write_text(PRELUDE + source)
        command = shlex.join([sys.executable, str(file), *arguments])
        made.append(load(EnvironmentSpec(f"agent:{command}", options))())
        return made[-1]

    yield make
    for each in made:
        await each.close()
    assert not Endpoint.of_loop
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("agent")]


async def until(condition: Callable[[], bool]) -> None:
    """Lets the other tasks of this loop run until something is so."""
    async with asyncio.timeout(60):
        for _ in iter(condition, True):
            await asyncio.sleep(0)

"""Agents in real children of a pool: what is killed or hangs costs its own episode, and leaves no process."""

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.environments.episode_pool import EpisodePool, Play, Played
from asyncrl.environments.loading import EnvironmentSpec
from asyncrl.protocols.prompt_row import PromptRow
from tests import golden
from tests.processes import gone
from tests.unit.children.running import running
from tests.unit.environments.agents.conftest import PRELUDE, until

TALKS = """
messages = [user(sys.argv[2])]
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()} ")
if sys.argv[2] == "hang":
    sys.stdin = open(os.pipe()[0])
    sys.stdin.read()
while True:
    answer = ask(*messages)
    if answer["content"] == "stop":
        break
    chance = os.urandom(4).hex() if sys.argv[2] == "chance" else ""
    messages += [answer, user("re " + answer["content"] + chance)]
print("bye")
"""
MakePool = Callable[..., AbstractAsyncContextManager[EpisodePool]]


def play(*said: str, member: int = 0, prompt: str = "hi") -> Play:
    return Play((4, member, 0), PromptRow(prompt=prompt).packed, 3, said)


def texts(played: Played) -> dict[int, str]:
    assert not played.error
    return {turn: answer["text"][-1]["content"] for turn, answer in played.answers.items()}


@pytest.fixture
def pids(tmp_path: Path) -> Callable[[], list[int]]:
    """Tells the processes of all agents so far."""
    file = tmp_path / "pids"
    file.touch()
    return lambda: [int(pid) for pid in file.read_text().split()]


@pytest.fixture
def pool(tmp_path: Path) -> MakePool:
    file = tmp_path / "agent.py"
    file.write_text(PRELUDE + TALKS)
    command = shlex.join([sys.executable, "-S", str(file), str(tmp_path / "pids"), "{prompt}"])

    unclosed: list[str] = []

    @asynccontextmanager
    async def make(deadline: float = 20.0) -> AsyncIterator[EpisodePool]:
        limits: dict[str, Any] = {
            "workers": 1,
            "deadline": deadline,
            "start_deadline": 60.0,
            "unclosed": unclosed.append,
        }
        spec = EnvironmentSpec(f"agent:{command}")
        async with running(lambda tasks: EpisodePool(spec, tasks, printed=tmp_path / "printed", **limits)) as made:
            yield made
        assert unclosed == []

    return make


async def test_episodes_of_a_killed_child_are_played_again(pool: MakePool, pids: Callable[[], list[int]]) -> None:
    """The agents of the dead child end with it, and new ones ask the same."""
    async with pool() as made:
        for member in range(2):
            assert texts(await made.play(play("a", member=member))) == {0: "hi", 1: "re a"}
        (slot,) = made._slots
        assert slot.running is not None
        os.kill(slot.running.process.pid, signal.SIGKILL)
        await until(lambda: slot.running is None or slot.running.ended)
        await gone(pids()[:2])
        assert texts(await made.play(play("a", "b"))) == {0: "hi", 1: "re a", 2: "re b"}
        last = await made.play(play("a", "b", "stop"))
        assert (texts(last), last.answers[3]["done"]) == ({3: "bye\n"}, True)
    assert len(pids()) == 3
    await gone(pids())


async def test_an_agent_with_chance_comes_out_otherwise(pool: MakePool) -> None:
    """The service compares the answers, and begins such a sample anew."""
    async with pool() as made:
        first = texts(await made.play(play("a", prompt="chance")))
        made.forget([(4, 0, 0)])
        again = texts(await made.play(play("a", prompt="chance")))
    assert first[0] == again[0]
    assert first[1] != again[1]


async def test_an_agent_that_ends_at_once_says_why(pool: MakePool, tmp_path: Path) -> None:
    """The lines of asyncrl, of which a traceback would be made, explain nothing of it."""
    async with pool() as made:
        (tmp_path / "agent.py").write_text("raise SystemExit('no key for my database')")
        found = await made.play(play())
        golden.says(found.error, "`reset`", "1")
        assert found.traceback == ""
        made.forget([(4, 0, 0)])
        printed = tmp_path / "printed"
        await until(lambda: printed.exists() and "no key for my database" in printed.read_text())


async def test_an_agent_that_never_calls_is_named(pool: MakePool, pids: Callable[[], list[int]]) -> None:
    async with pool(deadline=2.0) as made:
        late, other = await asyncio.gather(made.play(play(prompt="hang")), made.play(play("a", member=1)))
        golden.says(late.error, "`reset`", "2 s")
        assert texts(other)[1] == "re a"
        made.forget([(4, 0, 0), (4, 1, 0)])
        await gone(pids())

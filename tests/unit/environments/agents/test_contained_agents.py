"""Agents in sandboxes of their own: what one tries against the other, and what ends with them."""

import asyncio
import fcntl
import os
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.children.containment import Containment, WithoutNetwork, files_named, try_containment
from asyncrl.children.sandbox import SandboxError
from asyncrl.config.schema import Config
from asyncrl.environments.episode_pool import EpisodePool, Play, Played
from asyncrl.environments.loading import EnvironmentSpec, contained
from asyncrl.errors import ConfigError
from asyncrl.protocols.prompt_row import PromptRow
from tests import golden
from tests.unit.children.running import running
from tests.unit.environments.agents.conftest import PRELUDE

PROGRAM = """
import fcntl, glob, signal, socket
row = json.loads(sys.stdin.read())

def variables():
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            with open(path, "rb") as file:
                yield from file.read().split(b"\\0")
        except OSError:
            pass

def keys():
    return {word for word in variables() if word.startswith(b"OPENAI_API_KEY=")}

def connects(port):
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
        return True
    except OSError:
        return False

def hold(path):
    file = open(path, "w")
    fcntl.flock(file, fcntl.LOCK_EX)
    if not os.fork():
        os.setsid()
        signal.pause()
    return ask(user("held"))

open("/tmp/asyncrl-of-agent-" + row["name"], "w").close()
ask(user("ready"))
print(eval(row["prompt"]))
"""
MakePool = Callable[..., AbstractAsyncContextManager[EpisodePool]]
KEYS = "len(keys())"
FILES = "sorted(glob.glob('/tmp/asyncrl-of-agent-*'))"


@pytest.fixture(autouse=True, scope="module")
def bubblewrap() -> None:
    try:
        try_containment(WithoutNetwork(), Containment())
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture
def pool(tmp_path: Path) -> MakePool:
    """pool(containment) -> a pool whose one child plays this program."""
    (tmp_path / "agent.py").write_text(PRELUDE + PROGRAM)
    whole = EnvironmentSpec("agent:" + shlex.join([sys.executable, "-S", str(tmp_path / "agent.py")]))

    @asynccontextmanager
    async def make(containment: Containment | None) -> AsyncIterator[EpisodePool]:
        spec, around = contained(whole, containment)
        limits: dict[str, Any] = {"workers": 1, "deadline": 20.0, "start_deadline": 60.0, "containment": around}
        limits |= {"printed": tmp_path / "printed", "unclosed": pytest.fail}
        async with running(lambda tasks: EpisodePool(spec, tasks, **limits)) as made:
            yield made

    return make


@pytest.fixture
def own(tmp_path: Path) -> Containment:
    return Containment(visible=files_named([str(tmp_path / "agent.py")]), writable=(str(tmp_path),))


def play(prompt: str, *said: str, member: int = 0) -> Play:
    return Play((4, member, 0), PromptRow(prompt=prompt, name=str(member)).packed, 3, said)


async def printed(pool: EpisodePool, prompt: str, *, beside: int) -> str:
    """Returns what an agent finds while another one waits for its answer. beside: number of the other."""
    assert not (await pool.play(play("0", member=beside))).error
    played = await pool.play(play(prompt, "go", member=beside + 1))
    assert not played.error
    return str(played.answers[1]["text"][0]["content"]).strip()


async def test_an_agent_reads_no_key_process_or_file_of_another(pool: MakePool, own: Containment) -> None:
    async with pool(own) as made:
        assert await printed(made, KEYS, beside=0) == "1"
        assert await printed(made, "len(glob.glob('/proc/[0-9]*'))", beside=2) == "2", "its guard and itself"
        assert await printed(made, FILES, beside=4) == "['/tmp/asyncrl-of-agent-5']"


async def test_the_same_agent_without_containment_reads_them(pool: MakePool) -> None:
    """Nothing but containment hides what the test above looks for."""
    async with pool(None) as made:
        try:
            assert int(await printed(made, KEYS, beside=10)) >= 2
            assert len(await printed(made, FILES, beside=12)) > len("['/tmp/asyncrl-of-agent-00']")
        finally:
            await asyncio.to_thread(remove_files)


@pytest.mark.parametrize("use", ["agent:python agent.py", "verifiers:gsm8k-v1"])
def test_containment_is_no_option(use: str) -> None:
    sections = {"environment": {"use": use, "options": {"containment": None}}}
    config = Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p.jsonl"}, **sections})
    with golden.raises(ConfigError, match=r"\[children\]"):
        EnvironmentSpec.of(config)


def remove_files() -> None:
    for member in range(10, 14):
        Path(f"/tmp/asyncrl-of-agent-{member}").unlink(missing_ok=True)


@pytest.mark.parametrize("network", [True, False])
async def test_without_the_network_an_agent_still_asks_the_policy(
    pool: MakePool, own: Containment, network: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        given = Containment(visible=own.visible, network=network)
        async with pool(given) as made:
            assert await printed(made, f"connects({server.getsockname()[1]})", beside=0) == str(network)


async def test_a_signal_that_ends_an_agent_is_named(pool: MakePool, own: Containment) -> None:
    async with pool(own) as made:
        played = await made.play(play("os.kill(os.getpid(), 9)", "go"))
        golden.says(played.error, "`step`", "signal 9")
        played = await made.play(play("os.kill(1, signal.SIGSTOP)", "go", member=1))
        assert ended_well(played), "the first process of a sandbox takes no signal from inside"


def ended_well(played: Played) -> bool:
    return not played.error and bool(played.answers[1]["done"])


@pytest.mark.parametrize("ends", ["episode", "child"])
async def test_all_of_an_agent_ends_with_it(pool: MakePool, own: Containment, tmp_path: Path, ends: str) -> None:
    """One leaves a process in a session of its own, which holds a lock on a file outside."""
    lock = tmp_path / "lock"
    async with pool(own) as made:
        played = await made.play(play(f"hold({str(lock)!r})", "go"))
        assert not played.error
        assert is_locked(lock)
        if ends == "episode":
            made.forget([(4, 0, 0)])
        else:
            (slot,) = made._slots
            assert slot.running is not None
            os.kill(slot.running.process.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while await asyncio.to_thread(is_locked, lock):
                await asyncio.to_thread(os.sched_yield)


def is_locked(path: Path) -> bool:
    if not path.exists():
        return False
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False

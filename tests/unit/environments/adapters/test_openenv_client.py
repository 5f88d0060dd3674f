"""Episodes of a real OpenEnv server, which runs as a process with packages of its own."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.environments import Observation
from asyncrl.environments.loading import EnvironmentSpec, load
from asyncrl.errors import ConfigError, EnvironmentFailed

websockets = pytest.importorskip("websockets.asyncio.server", reason="the extra environments is not installed")
PYTHON = Path(__file__).parents[4] / ".venvs/openenv/bin/python"
SERVER = Path(__file__).with_name("openenv_server.py")
ROW = {"prompt": "Play.", "goal": "digit"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    if not PYTHON.exists():
        pytest.skip("scripts/set-up-foreign was not run")
    with subprocess.Popen([PYTHON, SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


def made(url: str, **options: Any) -> Any:
    return load(EnvironmentSpec(f"openenv:{url}", options))()


async def test_an_episode(url: str) -> None:
    episode = made(url, columns=["goal"])
    assert await episode.reset(ROW, 2**40 + 7) == Observation("Play.\nGuess the digit.")
    assert await episode.step("3") == Observation("no")
    assert await episode.step(str((2**40 + 7) % 2**31 % 10)) == Observation("yes", reward=1.0, done=True)
    with pytest.raises(EnvironmentFailed, match="has ended"):
        await episode.step("3")


async def test_an_answer_can_be_the_whole_action(url: str) -> None:
    episode = made(url, action="", reset={"goal": "thing"}, shown="text")
    assert (await episode.reset(ROW, 4)).text == "Play.\nGuess the thing."
    assert (await episode.step('I say {"message": "4"}')).done
    assert (await episode.reset(ROW, 4)).text == "Play.\nGuess the thing."
    assert (await episode.step("4")).text == "Your answer is no action: it has no JSON object"
    assert (await episode.step('{"mesage": "4"}')).text.startswith("Your answer is no action: message: Field required")
    assert (await episode.step('{"message": "4"}')).done


async def test_an_error_of_the_environment_is_reported(url: str) -> None:
    episode = made(url)
    await episode.reset(ROW, 4)
    with pytest.raises(EnvironmentFailed, match=f"OpenEnv server {url} reports EXECUTION_ERROR for step: no such move"):
        await episode.step("raise")
    await episode.reset(ROW, 4)
    with pytest.raises(EnvironmentFailed, match=r"gave no answer to step: .*message too big"):
        await episode.step("flood")


async def test_a_server_without_a_free_session(url: str) -> None:
    first = made(url)
    second = made(url)
    third = made(url)
    await first.reset(ROW, 1)
    await second.reset(ROW, 2)
    with pytest.raises(EnvironmentFailed, match="CAPACITY_REACHED"):
        await third.reset(ROW, 3)
    await first.close()
    await second.close()


@pytest.mark.parametrize(
    ("use", "options", "message"),
    [
        ("localhost:8000", {}, "such as .openenv:http://localhost:8000"),
        ("http://127.0.0.1:1", {}, r"the OpenEnv server http://127.0.0.1:1 cannot be reached: .*"),
        ("http://127.0.0.1:1", {"columns": ["goals"]}, "the row has no column goals; it has prompt, goal"),
    ],
)
async def test_what_cannot_be_played_is_refused(use: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await made(use, **options).reset(ROW, 0)


async def test_a_field_that_the_observation_lacks_is_named(url: str) -> None:
    episode = made(url, shown="txt")
    with pytest.raises(ConfigError, match=r"the observation has no field txt; it has .*text"):
        await episode.reset(ROW, 0)
    await episode.close()


@pytest.mark.parametrize(
    ("about", "says"),
    [
        ({"errors": None, "message": "no such action"}, "no such action"),
        ({"errors": "broken"}, "it is refused"),
        (
            {"errors": [{"loc": None, "msg": "too long"}, {"loc": ["a", 1], "msg": "no"}, 5]},
            "the action: too long; a.1: no",
        ),
        ({"errors": [{"loc": "message", "msg": "Field required"}]}, "message: Field required"),
    ],
)
async def test_what_a_server_says_about_an_action_may_have_any_form(about: dict[str, Any], says: str) -> None:
    async def refuse(connection: Any) -> None:
        async for asked in connection:
            first = json.loads(asked)["type"] == "reset"
            data = {"observation": {"text": "Go."}} if first else {"code": "VALIDATION_ERROR", **about}
            await connection.send(json.dumps({"type": "observation" if first else "error", "data": data}))

    async with websockets.serve(refuse, "127.0.0.1", 0) as server:
        (listening,) = server.sockets
        episode = made(f"http://127.0.0.1:{listening.getsockname()[1]}")
        await episode.reset(ROW, 0)
        assert (await episode.step("x")).text == f"Your answer is no action: {says}"
        await episode.close()


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ('The set is {1, 2}, so {"message": "4"}.', {"message": "4"}),
        ('Not {"message": "3"} but {"message": "4"}.', {"message": "4"}),
        ('\\boxed{4} is {"move": {"to": 1.5, "by": [2, {"n": 3}]}} }', {"move": {"to": 1.5, "by": [2, {"n": 3}]}}),
        ('```json\n{"message": "a } b"}\n``` and {so on}', {"message": "a } b"}),
        ('{"message": "\\sqrt", "deep": {"text": "\\pi"}}', {"message": "\\sqrt", "deep": {"text": "\\pi"}}),
        ('{"reason": "line\nbreak", "message": true}', {"reason": "line\nbreak", "message": True}),
        ('{"action": {"message": "4"}', "it has no JSON object"),
        ('{"actions": [{"message": "3"}, {"message": "4"}', "it has no JSON object"),
        ('{"message": "3", "message": "4"}', "its JSON object has message twice"),
        ('{"move": {"to": 1, "to": 2}}', "its JSON object has move.to twice"),
        ("{4}", "it has no JSON object"),
    ],
)
async def test_the_action_is_the_last_whole_object_of_an_answer(answer: str, action: Any) -> None:
    sent: list[Any] = []

    async def play(connection: Any) -> None:
        async for asked in connection:
            sent.append(json.loads(asked)["data"])
            await connection.send(json.dumps({"type": "observation", "data": {"observation": {"text": "Go."}}}))

    async with websockets.serve(play, "127.0.0.1", 0) as server:
        (listening,) = server.sockets
        episode = made(f"http://127.0.0.1:{listening.getsockname()[1]}", action="")
        await episode.reset(ROW, 0)
        said = (await episode.step(answer)).text
        await episode.close()
    if isinstance(action, str):
        assert (said, len(sent)) == (f"Your answer is no action: {action}", 1)
    else:
        assert sent[1] == action

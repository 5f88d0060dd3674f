"""The examples of docs/environments.md run as they stand there."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.api import _environment
from asyncrl.environments.loading import EnvironmentSpec, environment_problems, load
from asyncrl.environments.observation import Observation
from asyncrl.environments.tools import FORMS, ToolCall
from tests.unit.documents import blocks, config_of, files_of

PAGE = "environments.md"


def played(containing: str, folder: Path, row: dict[str, Any], seed: int, *said: str) -> list[Observation]:
    files_of(PAGE, folder)
    config = config_of(PAGE, containing, folder)
    assert environment_problems(config) == []

    async def episode() -> list[Observation]:
        environment = load(EnvironmentSpec(config.environment.use, config.environment.options))()
        return [await environment.reset(row, seed), *[await environment.step(message) for message in said]]

    return asyncio.run(episode())


def test_a_class(tmp_path: Path) -> None:
    said = [str(number) for number in range(6)]
    opening, *answers = played("secret.py:Secret", tmp_path, {"prompt": "Which number?"}, 7, *said)
    assert opening.text == "Which number?"
    assert [answer.text for answer in answers].count("yes") == 1
    assert sum(answer.reward for answer in answers) == 1.0


def test_tools(tmp_path: Path) -> None:
    calls = [ToolCall("price", {"fruit": "pear", "number": 2}), ToolCall("put", {"fruit": "pear"}), ToolCall("price")]
    opening, seen, end = played(
        "shop.py:Basket", tmp_path, {"prompt": "Buy."}, 0, FORMS["hermes"].render(calls), "I have it."
    )
    assert [tool["function"]["name"] for tool in opening.tools] == ["price", "put"]
    assert opening.tools[0]["function"]["parameters"]["properties"]["number"]["description"] == "number of pieces."
    price, put, wrong = (message["content"] for message in seen.text)
    assert (price, put) == ("1.5", "1 pieces")
    assert "fruit" in wrong
    assert end.done


def test_a_class_given_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/system/test_episodes.py` runs this example on a fleet."""
    files_of(PAGE, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "secret", raising=False)
    from secret import Secret

    given = {"use": Secret, "options": {"highest": 5}}
    assert _environment(given) == {"use": "secret:Secret", "options": {"highest": 5}}


def test_no_example_is_left_out() -> None:
    assert len(blocks(PAGE, "python")) == 4
    assert len(blocks(PAGE, "toml")) == 3

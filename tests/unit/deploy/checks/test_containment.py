"""Checks what is said before a run whose code cannot be contained, and that other runs need no containment."""

from pathlib import Path
from typing import Any

import pytest

from asyncrl.children.containment import Containment, WithoutNetwork
from asyncrl.config.schema import Config
from asyncrl.deploy.commands import doctor
from asyncrl.deploy.preflight import code_of_user, containment_problems

MINE = "mine.py:right"


def config(functions: list[Any], environment: dict[str, Any] | None = None, **children: Any) -> Config:
    sections = {"reward": {"functions": functions}, "environment": environment or {}, "children": children}
    return Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p.jsonl"}, **sections})


@pytest.mark.parametrize(
    ("function", "environment", "found"),
    [
        ("exact_match", {}, []),
        ("asyncrl.tasks.builtin.reverse:copied", {}, []),
        (MINE, {}, [MINE]),
        ("trl:mine.py:right", {}, ["trl:mine.py:right"]),
        ("asyncrl.py:right", {}, ["asyncrl.py:right"]),
        ("package.asyncrl:right", {}, ["package.asyncrl:right"]),
        ("exact_match", {"use": "guess"}, []),
        ("exact_match", {"use": "mine.py:Game"}, ["mine.py:Game"]),
        ("exact_match", {"use": "gymnasium:FrozenLake-v1"}, ["gymnasium:FrozenLake-v1"]),
        ("exact_match", {"use": "mcp:python server.py"}, ["mcp:python server.py"]),
        ("exact_match", {"use": "tools", "options": {"functions": [MINE]}}, ["tools"]),
    ],
)
def test_code_of_the_user_is_what_is_no_part_of_asyncrl(
    function: str, environment: dict[str, Any], found: list[str]
) -> None:
    assert code_of_user(config([function], environment)) == found


def test_code_that_the_caller_serves_and_unknown_functions_are_no_childrens() -> None:
    assert code_of_user(config([MINE]), served=["reward"]) == []
    assert code_of_user(config([])) == []


def test_code_that_runs_on_hosts_that_join_is_contained_there() -> None:
    found = config([MINE], {"use": "mine.py:Game"})
    assert sorted(code_of_user(found)) == ["mine.py:Game", MINE]
    for joined, here in (("reward", ["mine.py:Game"]), ("environment", [MINE])):
        fleet = found.fleet.model_copy(update={"joined": {joined: 1}})
        assert code_of_user(found.model_copy(update={"fleet": fleet})) == here


def test_without_bubblewrap_a_run_with_code_of_the_user_is_refused_and_others_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (problem,) = containment_problems(config([MINE]))
    assert problem.key == "children.sandbox"
    assert problem.text == (
        "bubblewrap is not installed, which contains your reward functions and environments; install it with "
        '`apt-get install bubblewrap`, or write sandbox = "none" in the section [children], which contains nothing'
    )
    assert list(containment_problems(config(["exact_match"]))) == []
    assert list(containment_problems(config([MINE], sandbox="none"))) == []


def test_a_folder_to_write_has_to_be_there(tmp_path: Path) -> None:
    (problem,) = containment_problems(config([MINE], writable=[str(tmp_path / "cache")]))
    assert (problem.key, problem.text.startswith(f"there is no folder {tmp_path}/cache")) == ("children.writable", True)
    assert list(containment_problems(config([MINE], writable=[str(tmp_path)]))) == []
    for folder in ("/", "/tmp/..", "/proc", "/dev/shm"):
        (problem,) = containment_problems(config([MINE], writable=[folder]))
        assert "name folders of your own" in problem.text, folder


@pytest.mark.parametrize(
    ("use", "network", "layers"),
    [
        ("agent:python agent.py", False, [WithoutNetwork, Containment]),
        ("agent:python agent.py", True, [Containment]),
        ("gymnasium:FrozenLake-v1", False, [Containment]),
    ],
)
def test_agents_without_the_network_are_tried_in_both_layers(
    use: str, network: bool, layers: list[type], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []
    monkeypatch.setattr("asyncrl.deploy.preflight.try_containment", lambda *found: tried.extend(found))
    assert list(containment_problems(config(["exact_match"], {"use": use}, network=network))) == []
    assert [type(layer) for layer in tried] == layers


def test_doctor_says_what_contains_code() -> None:
    (contained,) = doctor._containment_checks(config([MINE]))
    assert str(contained) == f"ok    your code           bubblewrap contains {MINE}"
    (free,) = doctor._containment_checks(config([MINE], sandbox="none"))
    assert str(free).startswith(f"note  your code           nothing contains {MINE}\n")
    assert list(doctor._containment_checks(config(["exact_match"]))) == []

"""The environment `repair`, with real sandboxes."""

import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asyncrl.children.code import code_runner
from asyncrl.children.code.code_runner import shared_runner
from asyncrl.children.sandbox import SandboxError
from asyncrl.children.sandbox.bubblewrap import UNCONFINED
from asyncrl.config.schema import Config, ModelConfig, TaskConfig
from asyncrl.config.sections.runtime_config import ChildrenConfig, FleetConfig
from asyncrl.config.sections.task_config import EnvironmentConfig
from asyncrl.environments.loading import EnvironmentSpec, environment_problems, load
from asyncrl.environments.observation import Observation
from asyncrl.errors import ConfigError, TaskError
from asyncrl.tasks.builtin.expressions import DEMONSTRATIONS_OF_REPAIR

ROW = {"prompt": "add 1:", "tests": ["assert f(0) == 1", "assert f(2) == 3"]}
RIGHT = "def f(x): return x+1"
PARTLY = "def f(x): return 1"
BROKEN = "def f(x) return x+1"


@pytest.fixture
async def sandboxes(bubblewrap_works: None) -> AsyncIterator[None]:
    yield
    await shared_runner().close()


async def played(*said: str, row: dict[str, Any] = ROW, **options: Any) -> list[Observation]:
    environment = load(EnvironmentSpec("repair", options))()
    opening = await environment.reset(row, 0)
    assert opening.text == row["prompt"]
    return [await environment.step(message) for message in said]


async def test_an_episode_ends_when_all_tests_pass(sandboxes: None) -> None:
    (only,) = await played(f"So:\n```python\n{RIGHT}\n```")
    assert only.done
    assert (only.reward, only.info) == (1.0, {"compiles": True, "passed": 1.0})


async def test_a_failing_program_is_shown_why_and_rewards_sum_up_to_the_last_share(sandboxes: None) -> None:
    broken, partly, again, right = await played(BROKEN, PARTLY, BROKEN, RIGHT)
    assert broken.text == "The program does not compile: SyntaxError: expected ':' (line 1)\nWrite all of it again."
    assert str(partly.text).startswith("A test fails (failed: ")
    assert str(partly.text).endswith("\nassert f(2) == 3\nWrite all of the program again.")
    assert [each.reward for each in (broken, partly, again, right)] == [0.0, 0.5, -0.5, 1.0]
    assert [each.done for each in (broken, partly, again, right)] == [False, False, False, True]


async def test_tiny_models_are_shown_the_bare_test_and_a_control_nothing(sandboxes: None) -> None:
    assert [each.text for each in await played(BROKEN, PARTLY, brief=True)] == ["error:", "assert f(2) == 3:"]
    assert [each.text for each in await played(BROKEN, PARTLY, withhold=True)] == ["?:", "?:"]


async def test_a_test_that_reads_and_prints_is_shown_with_what_was_printed(sandboxes: None) -> None:
    row = {"prompt": "double", "tests": [{"stdin": "2", "stdout": "4"}]}
    (said,) = await played("print(3)", row=row)
    assert "for the input '2' it has to print '4', not '3\\n'" in str(said.text)


async def test_a_program_that_never_ends_is_said_to(sandboxes: None) -> None:
    (said,) = await played("def f(x):\n    while True: pass", seconds=0.5)
    assert str(said.text).startswith("A test fails (timeout: it ran longer than 0.5 s")


async def test_a_program_that_passes_its_tests_too_slowly_is_shown_the_first_that_was_not_run(sandboxes: None) -> None:
    slow = "import time; time.sleep(2.1)"
    row = {"prompt": "add 1:", "tests": [f"{slow}; assert f({x}) == {x + 1}" for x in range(3)]}
    (said,) = await played(RIGHT, row=row, seconds=4.0)
    assert str(said.text).startswith(f"A test fails (not run: those before it took 4 s):\n{slow}; assert f(2) == 3\n")
    assert said.info == {"compiles": True, "passed": 2 / 3}
    assert not said.done


async def test_a_row_without_tests_is_refused() -> None:
    with pytest.raises(TaskError, match="the row has no column tests with tests; found are prompt"):
        await played(row={"prompt": "p"})
    with pytest.raises(ConfigError, match=r"environment\.options: seconds must be more than 0, not 0"):
        await played(seconds=0)


def problems(use: str, **sections: Any) -> list[str]:
    made = {"model": ModelConfig(name="warmed:repair"), "task": TaskConfig(prompts="p.jsonl"), **sections}
    return [str(each) for each in environment_problems(Config(environment=EnvironmentConfig(use=use), **made))]


def test_without_a_sandbox_a_run_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise SandboxError(f"bubblewrap is not installed, or {UNCONFINED}")

    monkeypatch.setattr(code_runner, "try_sandbox", broken)
    (said,) = problems("repair")
    assert (
        "environment.use: repair runs programs in sandboxes: bubblewrap is not installed, or write sandbox = " in said
    )
    assert "section [children]" in said
    assert problems("repair", children=ChildrenConfig(sandbox="none")) == []
    assert problems("guess") == []
    joined = FleetConfig(wire="tcp", listen="tcp://127.0.0.1:7000", joined={"environment": 1})
    assert problems("repair", fleet=joined) == [], "the hosts that join are asked"


def test_the_sandbox_is_one_key_of_all_children() -> None:
    made = {"model": ModelConfig(name="warmed:repair"), "task": TaskConfig(prompts="p.jsonl")}
    config = Config(environment=EnvironmentConfig(use="repair", options={"sandbox": "none"}), **made)
    (problem,) = environment_problems(config)
    assert "repair has no option sandbox; write it in [children]" in str(problem)
    config = Config(environment=EnvironmentConfig(use="repair"), children=ChildrenConfig(sandbox="none"), **made)
    assert EnvironmentSpec.of(config).options == {"sandbox": "none"}


async def test_demonstrations_show_what_the_environment_says(sandboxes: None) -> None:
    """A demonstration is the prompt, a program, what the environment says of it, and a second program."""

    source = random.Random(0)
    shown = [prompt for prompt, _ in (DEMONSTRATIONS_OF_REPAIR.draw(source) for _ in range(40)) if "<eos>" in prompt]
    for prompt in shown[:8]:
        listed, said, complaint = prompt.replace(":def", ":<eos>def").split("<eos>")
        tests = [complaint.rstrip(":")] if complaint.startswith("assert") else ROW["tests"]
        (answer,) = await played(said, row={"prompt": listed, "tests": tests}, brief=True)
        assert answer.text == complaint

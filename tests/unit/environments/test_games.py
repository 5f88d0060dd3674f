"""The built-in environments and the example of the document: what pays, and what a withheld answer takes away."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config, ModelConfig, TaskConfig
from asyncrl.config.sections.task_config import EnvironmentConfig
from asyncrl.environments.games import HIGHER, LOWER, NO_HINT, NUMBERS, Calculator, Guess, hinted
from asyncrl.environments.loading import EnvironmentSpec, environment_problems, load
from asyncrl.environments.observation import Observation
from asyncrl.errors import ConfigError
from asyncrl.tasks.builtin import calculator, guess
from tests import golden


def play(environment: Any, row: dict[str, Any], seed: int, *said: str) -> list[Observation]:
    async def episode() -> list[Observation]:
        return [await environment.reset(row, seed), *[await environment.step(message) for message in said]]

    return asyncio.run(episode())


TURNS = 3


def episode_reward(seed: int, policy: Callable[[tuple[str, ...]], str], **options: bool) -> float:
    """Returns the reward of an episode. policy: returns the next guess after these hints."""
    guesses: list[str] = []
    hints: list[str] = []
    for _ in range(TURNS):
        guesses.append(policy(tuple(hints)))
        *_, last = play(Guess(**options), {"prompt": guess.PROMPT}, seed, *guesses)
        if last.done:
            return last.reward
        hints.append(str(last.text))
    return 0.0


def halving(hints: tuple[str, ...]) -> str:
    """Guesses the number in the middle of what these hints leave; without a hint it takes the number as higher."""
    left = range(len(NUMBERS))
    said = ""
    for hint in hints:
        said = NUMBERS[left[len(left) // 2]]
        left = hinted(left, int(said), HIGHER if hint == NO_HINT else hint)
    return NUMBERS[left[len(left) // 2]]


def test_hints_are_worth_more_than_guessing_without_them() -> None:
    assert [episode_reward(seed, halving) for seed in range(20)] == [1.0] * 20
    untold = [episode_reward(seed, halving, withhold=True) for seed in range(400)]
    assert 0.15 < sum(untold) / 400 < 0.35, "of four ways that the hints may go, a policy that sees none takes one"


@pytest.mark.parametrize("second", NUMBERS)
def test_no_other_guesses_find_the_number_in_time(second: str) -> None:
    for first in NUMBERS:
        for seed in range(8):
            guesses = iter((first, second))
            found = episode_reward(seed, lambda hints, left=guesses: next(left, halving(hints)))
            assert found == 0.0 or (first, second) in (("03", "01"), ("03", "05"))


def test_hints_are_true_and_the_same_for_all_samples_of_a_group() -> None:
    for seed in range(50):
        _, *first = play(Guess(), {"prompt": "guess:"}, seed, "06", "01", "03", "04", "02")
        _, *again = play(Guess(), {"prompt": "guess:"}, seed, "06", "01", "03", "04", "02")
        assert first == again
        assert [each.text for each in first][:2] == [LOWER, HIGHER], "the larger part is left"
        assert (first[2].text, first[3].text) in ((HIGHER, LOWER), (LOWER, LOWER), (HIGHER, HIGHER))


def test_what_is_no_number_gets_no_hint() -> None:
    assert play(Guess(), {"prompt": "guess:"}, 3, "9")[1] == Observation("!")


def test_only_the_calculator_knows_the_product() -> None:
    (row,) = calculator.training(1, seed=4)
    called = "=" + row["prompt"].removesuffix(":")
    opening, result, done = play(Calculator(), row, 0, called, row["answer"])
    assert (opening.text, result.text) == (row["prompt"], f"{row['answer']}:")
    assert (done.reward, done.done) == (1.0, True)
    assert play(Calculator(withhold=True), row, 0, called)[1].text == "?:"
    assert play(Calculator(), row, 0, "=1+1")[1] == Observation("!:")
    assert play(Calculator(), row, 0, "1")[1] == Observation("", 0.0, done=True)


@pytest.mark.parametrize("environment", [Calculator(), Guess()])
@pytest.mark.parametrize("prompt", ["=?:", [{"role": "user", "content": "What is 4*7?"}]])
def test_a_prompt_of_messages_stays_one(environment: Any, prompt: Any) -> None:
    assert play(environment, {"prompt": prompt, "answer": "28"}, 0)[0].text == prompt


def test_held_out_products_are_not_trained_on() -> None:
    trained, held_out = ({row["prompt"] for row in rows(300)} for rows in (calculator.training, calculator.held_out))
    assert not trained & held_out


@pytest.mark.parametrize("task", [guess, calculator])
def test_demonstrations_are_of_turns_that_the_environments_know(task: Any) -> None:
    source = random.Random(0)
    for prompt, answer in (task.DEMONSTRATIONS.draw(source) for _ in range(200)):
        assert answer
        assert len(prompt.split("<eos>")) <= 3


@pytest.mark.parametrize(
    "section",
    [
        {"use": "tools", "options": {"functions": ["explodes.py:look"]}},
        {"use": "explodes.py:Mine"},
        {"use": "mcp:touch was-here"},
    ],
)
def test_problems_are_found_without_the_code_of_the_user(
    section: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = "    def reset(self, row, seed): ...\n    def step(self, message): ...\n"
    code = f"def look(): ...\nclass Mine:\n{methods}raise SystemExit('this code ran')\n"
    (tmp_path / "explodes.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    model = ModelConfig(name="m")
    task = TaskConfig(prompts="p.jsonl", samples_per_prompt=2)
    config = Config(model=model, task=task, environment=EnvironmentConfig(**section))
    assert environment_problems(config) == []
    assert not (tmp_path / "was-here").exists()


def test_a_value_that_an_environment_refuses_is_an_error_before_its_first_episode() -> None:
    with golden.raises(ConfigError, match=r"environment\.options\.form"):
        load(EnvironmentSpec("tools", {"functions": ["builtins:len"], "form": "x"}))()

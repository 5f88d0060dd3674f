"""Episodes of the real Gymnasium."""

from typing import Any

import pytest

from asyncrl.environments import Observation
from asyncrl.environments.loading import EnvironmentSpec, load
from asyncrl.errors import ConfigError

gymnasium = pytest.importorskip("gymnasium", reason="the extra environments is not installed")
ROW = {"prompt": "Reach the goal."}
MOVES = ["left", "down", "right", "up"]
LAKE = {"actions": MOVES, "rendered": True, "options": {"is_slippery": False}}


Env: Any = gymnasium.Env


class Echo(Env):
    action_space = gymnasium.spaces.Text(10)
    observation_space = gymnasium.spaces.Text(20)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return "say", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"you said {action}", len(action), False, action == "end", {}


gymnasium.register("AsyncrlEcho-v0", entry_point=Echo, disable_env_checker=True)


def made(use: str, **options: Any) -> Any:
    return load(EnvironmentSpec(use, options))()


async def test_frozen_lake_is_solved_by_names_of_moves() -> None:
    lake = made("gymnasium:FrozenLake-v1", **LAKE)
    opening = await lake.reset(ROW, 7)
    assert opening.text.startswith("Reach the goal.\n")
    assert "SFFF\nFHFH\nFFFH\nHFFG" in opening.text
    for move in ("I go down.", "Down", "not left but RIGHT", "right", "down"):
        seen = await lake.step(move)
        assert (seen.reward, seen.done) == (0.0, False)
    end = await lake.step("right")
    assert (end.reward, end.done) == (1.0, True)


async def test_an_answer_without_an_action_is_told_so() -> None:
    lake = made("gymnasium:FrozenLake-v1", **LAKE)
    await lake.reset(ROW, 0)
    assert await lake.step("hm") == Observation("Your answer names no action; actions are left, down, right, up")
    numbered = made("gymnasium:FrozenLake-v1")
    await numbered.reset(ROW, 0)
    assert (await numbered.step("9")).text == "Your answer names no action; actions are the numbers 0 to 3"
    assert not (await numbered.step("from 0 to 1")).text.startswith("Your")


async def test_texts_are_actions_as_they_are() -> None:
    echo = made("gymnasium:AsyncrlEcho-v0")
    assert (await echo.reset({"prompt": ""}, 0)).text == "say"
    assert await echo.step("hello") == Observation("you said hello", reward=5.0)
    assert (await echo.step("end")).done


async def test_the_seed_decides_the_episode() -> None:
    async def played(seed: int) -> list[Observation]:
        game = made("gymnasium:Blackjack-v1", actions=["stick", "hit"])
        return [await game.reset(ROW, seed), await game.step("hit")]

    assert await played(2**40 + 3) == await played(2**40 + 3)
    assert len({str(await played(seed)) for seed in range(8)}) > 1


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("gymnasium:FrozenLak-v1", "gymnasium cannot make FrozenLak-v1: .*FrozenLake"),
        ("gymnasium:MountainCarContinuous-v0", "a policy writes actions of the spaces Text and Discrete"),
    ],
)
async def test_an_environment_that_cannot_be_played_is_refused(use: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await made(use).reset(ROW, 0)

"""Games of the real TextArena."""

from typing import Any

import pytest

from asyncrl.environments.loading import EnvironmentSpec, load
from asyncrl.errors import ConfigError

pytest.importorskip("textarena", reason="the extra environments is not installed")


def made(name: str, **options: Any) -> Any:
    return load(EnvironmentSpec(f"textarena:{name}", options))()


async def test_a_number_is_found_by_hints() -> None:
    game = made("GuessTheNumber-v0")
    opening = await game.reset({"prompt": ""}, 3)
    assert "between 1 and 20" in opening.text
    low = 1
    high = 20
    seen = opening
    while not seen.done:
        middle = (low + high) // 2
        seen = await game.step(f"I guess [{middle}].")
        if not seen.done:
            assert seen.text in ("The target number is higher.", "The target number is lower.")
            low, high = (middle + 1, high) if "higher" in seen.text else (low, middle - 1)
    assert (seen.reward, seen.text) == (1.0, "Congratulations! You guessed the correct number.")


async def test_games_side_by_side_are_the_games_of_their_seeds() -> None:
    async def hints(seed: int) -> list[str]:
        game = made("GuessTheNumber-v0", options={"min_number": 1, "max_number": 10**6})
        await game.reset({}, seed)
        return [(await game.step(f"[{guess}]")).text for guess in (500_000, 250_000, 750_000)]

    first = made("Mastermind-v0")
    second = made("Mastermind-v0")
    assert (await first.reset({}, 1)).text == (await second.reset({}, 1)).text
    assert await hints(1) == await hints(1)
    assert len({tuple(await hints(seed)) for seed in range(8)}) > 1


async def test_an_invalid_move_is_told_and_then_ends_the_game() -> None:
    game = made("GuessTheNumber-v0")
    await game.reset({}, 0)
    assert "invalid move" in (await game.step("eleven")).text
    assert (await game.step("eleven")).done


async def test_games_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no game GuessNumber-v0; did you mean GuessTheNumber-v0"):
        await made("GuessNumber-v0").reset({}, 0)
    with pytest.raises(ConfigError, match="TicTacToe-v0 is no game for one player"):
        await made("TicTacToe-v0").reset({}, 0)

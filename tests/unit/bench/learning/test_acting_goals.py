"""The lines until a policy reached its goal, and the rates of environments that wait."""

from pathlib import Path

import pytest

from asyncrl.bench.learning.acting_feedback import rate
from asyncrl.bench.learning.acting_goals import until_goal
from tests.unit.engines.acting.scene import ENVIRONMENTS, acting_config


def lines(*returns: float, episodes: int = 8) -> list[dict[str, float]]:
    return [
        {"acting/episodes": episodes, "acting/return_last20": value, "step": step} for step, value in enumerate(returns)
    ]


def test_the_goal_counts_from_twenty_episodes_on() -> None:
    given = lines(9.0, 9.0, 9.0, 9.0)
    assert until_goal(given, 9.0) == (given[:3], True)
    below = lines(1.0, 2.0, 3.0)
    assert until_goal(below, 9.0) == (below, False)


@pytest.mark.parametrize("feedback", ["synchronous", "asynchronous"])
async def test_a_rate_counts_the_steps_of_all_environments(feedback: str, tmp_path: Path) -> None:
    config = acting_config(f"{ENVIRONMENTS}:endless", environments=2, transitions=5, feedback=feedback)
    assert await rate(config, 40, tmp_path / "printed") > 0

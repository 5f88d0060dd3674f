"""Episodes of the real verifiers, whose rollouts run with packages of their own."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncrl.environments.agents.exchanges import AgentFailed
from asyncrl.environments.loading import EnvironmentSpec, load
from asyncrl.errors import ConfigError

PYTHON = Path(__file__).parents[5] / ".venvs/verifiers/bin/python"
TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data]):
    @vf.reward
    async def right(self, trace) -> float:
        return float((trace.assistant_messages[-1].content or "").strip() == self.data.answer)

class Sums(vf.Taskset[Sum]):
    def load(self):
        for number in range(5):
            yield Sum(Data(prompt=f"{number} + 1 =", system_prompt="Add.", answer=str(number + 1)))

__all__ = ["Sums"]
"""

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="scripts/set-up-foreign was not run")


async def played(index: Any, *said: str, taskset: str = "sums_v1") -> list[Any]:
    episode = load(EnvironmentSpec(f"verifiers:{taskset}", {"python": str(PYTHON)}))()
    try:
        async with asyncio.timeout(100):
            return [await episode.reset({"index": index}, 0), *[await episode.step(text) for text in said]]
    finally:
        await episode.close()


@pytest.fixture
def taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sums_v1.py").write_text(TASKSET)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("said", "reward"), [("3", 1.0), ("4", 0.0)])
async def test_an_episode_has_the_prompt_and_the_reward_of_verifiers(taskset: None, said: str, reward: float) -> None:
    opening, end = await played(2, said)
    assert opening.text == [{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 1 ="}]
    assert (end.done, end.reward) == (True, reward)


@pytest.mark.parametrize(
    ("index", "name", "message"),
    [
        (9, "sums_v1", "the task set sums_v1 has no task 9"),
        ("x", "sums_v1", "the row needs a column `index`"),
    ],
)
async def test_a_task_that_is_not_there_is_named(taskset: None, index: Any, name: str, message: str) -> None:
    with pytest.raises(AgentFailed, match=message):
        await played(index, taskset=name)


def test_a_task_set_has_a_name() -> None:
    with pytest.raises(ConfigError, match=r"such as .verifiers:gsm8k-v1"):
        load(EnvironmentSpec("verifiers:"))()

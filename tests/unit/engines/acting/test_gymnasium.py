"""Gymnasium's own environments: made by name, with their spaces, and learnt in a plain loop."""

import asyncio
from functools import partial
from io import BytesIO
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from asyncrl.children.guarded_process import ChildSettings
from asyncrl.children.printed_output import ChildOutput, PrintedFile
from asyncrl.config.schema import Config
from asyncrl.config.sources.load_config import load
from asyncrl.engines.acting.acting_trainer import ActingTrainer
from asyncrl.engines.acting.stepping.environment_server import maker
from asyncrl.engines.acting.stepping.one_environment import OneEnvironment, spaces_of
from asyncrl.engines.acting.stepping.picture_child import EpisodePictures
from asyncrl.engines.acting.stepping.spaces import unusable_space
from asyncrl.errors import ConfigError
from tests.unit.engines.acting.scene import acting_config, plain_loop

pytest.importorskip("gymnasium", reason="the extra acting is not installed")

POLE = acting_config(
    "CartPole-v1",
    learning_rate=1e-3,
    environments=8,
    transitions=32,
    gamma=0.98,
    gae_lambda=0.8,
    epochs=20,
    minibatch=256,
)
PENDULUM = acting_config(
    "Pendulum-v1",
    steps=250,
    learning_rate=2e-3,
    algorithm="sac",
    hidden_size=[64, 64],
    environments=4,
    minibatch=128,
    warm_up=512,
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def reached(goal: float, trainer: ActingTrainer) -> bool:
    return len(trainer.returns) == 20 and fmean(trainer.returns) >= goal


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("config", "goal"), [(POLE, 195.0), (PENDULUM, -800.0)], ids=["ppo", "sac"])
def test_a_plain_loop_learns(config: Config, goal: float) -> None:
    trainer = plain_loop(maker(config.acting.env, {}), config, partial(reached, goal))
    assert fmean(trainer.returns) >= goal


@pytest.mark.timeout(400)
def test_a_plain_loop_learns_to_land() -> None:
    pytest.importorskip("Box2D", reason="gymnasium[box2d] is not installed")
    config = load("lunarlander", (), {}, {"steps": 120}).config
    trainer = plain_loop(maker(config.acting.env, {}), config, partial(reached, 0.0))
    assert fmean(trainer.returns) >= 0.0


def test_spaces_are_those_of_the_environment() -> None:
    pole, pendulum = (spaces_of(maker(name, {})()) for name in ("CartPole-v1", "Pendulum-v1"))
    assert (pole.observation, pole.action.kind, pole.action.size) == (4, "discrete", 2)
    action = pendulum.action
    assert (pendulum.observation, action.kind, action.low, action.high, action.shape) == (3, "box", (-2,), (2,), (1,))
    assert unusable_space(pole.action, "sac").startswith("SAC acts in boxes of numbers")
    assert not unusable_space(pole.action, "ppo")
    assert not unusable_space(action, "sac")


def test_a_discrete_observation_is_a_one_hot_vector() -> None:
    lake = OneEnvironment(maker("FrozenLake-v1", {"is_slippery": False}), 0, 0)
    first = lake.begin(0)
    assert first.tolist() == [1.0] + [0.0] * 15
    assert lake.step(np.array([2.0], np.float32), 0).observation.argmax() == 1


@pytest.mark.parametrize(
    ("env", "options", "said"),
    [
        ("CartPole-v9", {}, r"acting\.env: gymnasium cannot make CartPole-v9"),
        ("CartPole-v1", {"lenght": 3}, "cannot make CartPole-v1: .*lenght"),
        ("Blackjack-v1", {}, "its observations are Tuple.*a policy sees boxes and discrete spaces"),
    ],
)
def test_what_cannot_be_made_says_why(env: str, options: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        spaces_of(maker(env, options)())


async def test_an_episode_of_gymnasium_is_drawn_without_a_screen(tmp_path: Path) -> None:
    pytest.importorskip("pygame", reason="the extra acting is not installed")
    output = ChildOutput(PrintedFile(tmp_path / "printed"))
    output.open()
    async with asyncio.TaskGroup() as tasks:
        spaces = OneEnvironment(maker("CartPole-v1", {}), 0, 0).spaces
        pictures = EpisodePictures(POLE.acting, spaces, 7, ChildSettings(20.0, tasks, output))
        try:
            picture = await pictures.draw(np.zeros(8, np.float32).tobytes(), 20.0)
        finally:
            await pictures.stop()
            output.close()
    assert picture is not None, pictures.problem
    drawn = Image.open(BytesIO(picture))
    assert drawn.width == 320
    assert len(list(ImageSequence.Iterator(drawn))) > 3, "frames that are alike are one"

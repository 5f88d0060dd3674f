"""Pictures of episodes, drawn in a real child: whatever goes wrong there costs the picture, and is said."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageSequence

from asyncrl.children.guarded_process import ChildSettings
from asyncrl.children.printed_output import ChildOutput, PrintedFile
from asyncrl.config.sections.task_config import ActingConfig
from asyncrl.engines.acting.stepping.one_environment import OneEnvironment
from asyncrl.engines.acting.stepping.picture_child import EpisodePictures
from asyncrl.engines.acting.stepping.picture_server import MOST_FRAMES, MOST_PIXELS
from asyncrl.errors import EnvironmentFailed
from tests import golden
from tests.unit.engines.acting.line_walk import Seen
from tests.unit.engines.acting.scene import ENVIRONMENTS, spaces_of_walk

Pictures = Callable[..., AbstractAsyncContextManager[EpisodePictures]]
STAY = np.zeros(1, np.float32).tobytes()


@pytest.fixture
def pictures(tmp_path: Path) -> Pictures:
    @asynccontextmanager
    async def make(name: str = "Seen", **options: Any) -> AsyncIterator[EpisodePictures]:
        acting = ActingConfig(env=f"{ENVIRONMENTS}:{name}", options=options)
        output = ChildOutput(PrintedFile(tmp_path / "printed"))
        output.open()
        async with asyncio.TaskGroup() as tasks:
            made = EpisodePictures(acting, spaces_of_walk(), 7, ChildSettings(20.0, tasks, output))
            try:
                yield made
            finally:
                await made.stop()
                output.close()

    return make


async def test_an_episode_becomes_an_animation_of_bounded_size(pictures: Pictures) -> None:
    async with pictures(limit=1000) as drawn:
        for steps, frames in ((5, 5), (2 * MOST_FRAMES + 1, 67)):  # Of the longer one every third step is drawn.
            picture = await drawn.draw(STAY * steps, 20.0)
            assert picture is not None, drawn.problem
            found = Image.open(BytesIO(picture))
            assert (found.format, found.width) == ("GIF", MOST_PIXELS)
            # Frames that are alike are one that is shown for longer.
            shown = sum(frame.info["duration"] for frame in ImageSequence.Iterator(found))
            assert shown == 40 * frames


async def test_the_same_actions_draw_the_same_picture(pictures: Pictures) -> None:
    async with pictures() as drawn:
        moves = np.array([1, -1, 1, 1], np.float32).tobytes()
        first = await drawn.draw(moves, 20.0)
        assert first is not None
        assert len(list(ImageSequence.Iterator(Image.open(BytesIO(first))))) > 2
        assert await drawn.draw(moves, 20.0) == first
        assert await drawn.draw(STAY * 4, 20.0) != first


@pytest.mark.parametrize(
    ("picture", "seconds", "problem"),
    [
        ("raises", 20.0, "RuntimeError: no screen"),
        ("hangs", 1.5, "it was not drawn within 1.5 s"),
        ("dies", 20.0, "SIGSEGV"),
    ],
)
async def test_what_cannot_be_drawn_is_said_and_not_tried_again(
    pictures: Pictures, picture: str, seconds: float, problem: str
) -> None:
    async with pictures(picture=picture) as drawn:
        assert await drawn.draw(STAY * 3, seconds) is None
        assert problem in drawn.problem
        assert drawn._child is None
        assert await drawn.draw(STAY * 3, seconds) is None
        assert drawn._child is None, "no further child is started"


def test_what_is_no_picture_is_told() -> None:
    with golden.raises(EnvironmentFailed):
        OneEnvironment(lambda: Seen("text"), 0, seed=7).frame()


async def test_an_environment_without_render_has_no_pictures(pictures: Pictures) -> None:
    async with pictures("Walk") as drawn:
        assert await drawn.draw(STAY, 20.0) is None
        assert "render" in drawn.problem

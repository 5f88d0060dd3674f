"""Draws episodes inside a child process: plays their actions again, and renders what an environment shows meanwhile.

The first message in says what to make, the first message out is the greeting. Then the actions of an episode come in,
and an animated GIF goes out, or why there is none.
"""

import os
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.children.child_messages import BatchedPipe, greeting, open_pipes, received
from asyncrl.config.named_files import is_of_gymnasium
from asyncrl.engines.acting.stepping.environment_server import EXTRA, maker
from asyncrl.engines.acting.stepping.one_environment import MAKE, OneEnvironment
from asyncrl.engines.acting.stepping.spaces import Spaces
from asyncrl.environments.adapters.packages import package
from asyncrl.errors import ConfigError, EnvironmentFailed

MOST_FRAMES = 100
"""Frames of a picture; of a longer episode every second step is drawn, or every third and so on."""
MOST_PIXELS = 320
"""Width and height of a picture at most."""
COLOURS = 64
MILLISECONDS = 40
"""Time that a frame is shown."""
HEADLESS = {"SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy"}
"""Variables with which pygame draws without a screen."""


@dataclass(frozen=True, slots=True)
class DrawnEnvironment:
    """An environment that shows pictures. images: the module Image of Pillow."""

    environment: OneEnvironment
    images: Any

    @classmethod
    def of(cls, code: dict[str, Any]) -> "DrawnEnvironment":
        """Makes the environment of a first message. Raises ConfigError where that, or Pillow, is missing."""
        env = code["env"]
        options = dict(code["options"])
        if is_of_gymnasium(env):
            options.setdefault("render_mode", "rgb_array")
        made = OneEnvironment(maker(env, options), 0, code["seed"], Spaces.of(code["spaces"]), stride=1)
        return cls(made, package("PIL.Image", EXTRA, MAKE))

    def animation(self, actions: NDArray[np.float32]) -> bytes:
        """Plays the first episode with these actions, and returns it as a GIF. Raises what the environment raises."""
        every = -(-len(actions) // MOST_FRAMES)
        self.environment.begin(0)
        frames = []
        for number, action in enumerate(actions):
            if number % every == 0:
                frames.append(self._frame())
            if self.environment.step(action, 0).error:
                break
        target = BytesIO()
        frames[0].save(target, "GIF", save_all=True, append_images=frames[1:], duration=MILLISECONDS, loop=0)
        return target.getvalue()

    def _frame(self) -> Any:
        image = self.images.fromarray(self.environment.frame())
        image.thumbnail((MOST_PIXELS, MOST_PIXELS))
        return image.quantize(COLOURS)


async def serve_pipes() -> None:
    """Serves until the worker closes the pipe."""
    os.environ |= {name: os.environ.get(name, value) for name, value in HEADLESS.items()}
    calls, pipe = await open_pipes()
    answers = BatchedPipe(pipe)
    drawn: list[DrawnEnvironment] = []
    async for message in received(calls):
        match message:
            case {"env": str()}:
                answers.send(greeting(MAKE, partial(_made, message, drawn)))
            case {"draw": bytes(actions)}:
                answers.send(_drawn(drawn[0], actions))


def _made(code: dict[str, Any], drawn: list[DrawnEnvironment]) -> dict[str, Any]:
    drawn.append(DrawnEnvironment.of(code))
    return {"ready": True}


def _drawn(each: DrawnEnvironment, actions: bytes) -> dict[str, Any]:
    width = each.environment.spaces.action.stored
    try:
        return {"picture": each.animation(np.frombuffer(actions, np.float32).reshape(-1, width))}
    except (ConfigError, EnvironmentFailed) as failed:
        return {"unseen": str(failed)}
    except Exception as error:  # the user's code, or a package that it draws with
        return {"unseen": f"{type(error).__name__}: {error}"}

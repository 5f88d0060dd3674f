"""A child that draws episodes, as its worker sees it."""

import asyncio
from asyncio.subprocess import Process
from dataclasses import dataclass
from typing import Any

from asyncrl.children.guarded_process import ChildEnded, ChildSettings, GuardedProcess
from asyncrl.config.sections.secret import revealed
from asyncrl.config.sections.task_config import ActingConfig
from asyncrl.engines.acting.stepping.one_environment import MAKE
from asyncrl.engines.acting.stepping.spaces import Spaces
from asyncrl.errors import AsyncrlError, EnvironmentFailed, WireError

SERVER = "asyncrl.engines.acting.stepping.picture_server"
MOST_BYTES = 16 * 2**20
"""Bytes of a picture: far more than a hundred frames of its size."""
GIF = (b"GIF87a", b"GIF89a")
"""Beginnings of such files: a child runs code of the user, whatever it sends."""


class PictureChild(GuardedProcess):
    """A running child, which draws one episode at a time."""

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self._asked: asyncio.Future[bytes] | None = None

    def greeted(self, message: Any) -> None:
        if message != {"ready": True}:
            raise WireError(f"a child that draws began with {message!r:.100}")

    def take(self, message: Any) -> None:
        if self._asked is None or self._asked.done():
            raise WireError(f"{message!r:.100}")
        match message:
            case {"picture": bytes(picture)} if picture.startswith(GIF) and len(picture) <= MOST_BYTES:
                self._asked.set_result(picture)
            case {"unseen": str(why)}:
                self._asked.set_exception(EnvironmentFailed(why))
            case _:
                raise WireError(f"{message!r:.100}")

    def finish(self, ended: ChildEnded) -> None:
        if self._asked is not None and not self._asked.done():
            self._asked.set_exception(ended)

    async def draw(self, actions: bytes) -> bytes:
        """Returns the picture of an episode with these actions. Raises EnvironmentFailed where it cannot be drawn, and
        ChildEnded."""
        self._asked = asyncio.get_running_loop().create_future()
        await self.send({"draw": actions})
        return await self._asked


@dataclass
class EpisodePictures:
    """Draws the first episode of evaluations, in a child of its own, until one cannot be drawn. problem: why that was,
    or ""."""

    acting: ActingConfig
    spaces: Spaces
    seed: int
    settings: ChildSettings
    problem: str = ""

    def __post_init__(self) -> None:
        self._child: PictureChild | None = None

    async def draw(self, actions: bytes, seconds: float) -> bytes | None:
        """Returns the picture of the first episode, which had these actions; None where there is none."""
        if self.problem or not actions:
            return None
        try:
            async with asyncio.timeout(seconds):
                return await (await self._opened()).draw(actions)
        except TimeoutError:
            self.problem = f"it was not drawn within {seconds:g} s"
        except AsyncrlError as error:
            self.problem = str(error)
        await self.stop()
        return None

    async def stop(self) -> None:
        if self._child is not None:
            await self._child.kill()
            self._child = None

    async def _opened(self) -> PictureChild:
        if self._child is None:
            code = {"env": self.acting.env, "options": revealed(self.acting.options), "seed": self.seed}
            code |= {"spaces": self.spaces.plain()}
            self._child = await PictureChild.launch(SERVER, code, f"{MAKE}: {self.acting.env}", self.settings)
        return self._child

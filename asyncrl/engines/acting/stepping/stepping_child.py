"""A child with environments, as its worker sees it: answers, marks of what runs, and the end of one that hangs."""

import asyncio
import mmap
import os
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.children.guarded_process import ChildEnded, ChildSettings, GuardedProcess
from asyncrl.engines.acting.stepping.one_environment import MAKE
from asyncrl.engines.acting.stepping.spaces import Spaces
from asyncrl.errors import WireError

SERVER = "asyncrl.engines.acting.stepping.environment_server"
CONTENT = ("env", "options", "first", "count", "threads", "seed", "stride")
LOOKS = 8
"""Looks at the marks of a child in the time that one step may take."""


@dataclass(frozen=True, slots=True)
class ChildContent:
    """Says what a child makes. first, count: its environments among those of the worker. threads: one for each of them.
    seed: of all episodes; stride: how many environments share them, see OneEnvironment. spaces: that they must have;
    None: those of the first one."""

    env: str
    options: dict[str, Any]
    first: int
    count: int
    threads: bool
    seed: int
    stride: int
    spaces: Spaces | None


class SteppingChild(GuardedProcess):
    """A running child. answered: takes what it says. ended_with: takes why it ended and the environments whose code ran
    then, by their places in the child; none where that is not known."""

    spaces: Spaces
    answered: Callable[[dict[str, Any]], None]
    ended_with: Callable[[ChildEnded, Sequence[int]], None]
    _watching: "asyncio.Task[None]"

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self._marks: NDArray[np.int64] = np.zeros(0, np.int64)
        self._hung: list[int] = []
        self._deadline = 0.0

    @classmethod
    async def spawn(
        cls,
        content: ChildContent,
        settings: ChildSettings,
        deadline: float,
        answered: Callable[[dict[str, Any]], None],
        ended_with: Callable[[ChildEnded, Sequence[int]], None],
    ) -> "SteppingChild":
        """Starts a child that makes its environments; raises as `GuardedProcess.launch` does."""
        size = 8 * content.count
        mark = os.memfd_create("asyncrl-marks")
        with ExitStack() as scope:
            scope.callback(os.close, mark)
            os.ftruncate(mark, size)
            marks = np.frombuffer(mmap.mmap(mark, size), np.int64)
            code = {name: getattr(content, name) for name in CONTENT}
            code |= {"spaces": content.spaces and content.spaces.plain(), "mark": mark}
            child = await cls.launch(SERVER, code, f"{MAKE}: {content.env}", settings, (mark,))
        child._marks = marks
        child._deadline = deadline
        child.answered = answered
        child.ended_with = ended_with
        child._watching = settings.tasks.create_task(child._watch(), name=f"watch environments {child.process.pid}")
        return child

    def greeted(self, message: Any) -> None:
        match message:
            case {"spaces": dict(spaces)}:
                self.spaces = Spaces.of(spaces)
            case _:
                raise WireError(f"a child of environments began with {message!r:.100}")

    def take(self, message: Any) -> None:
        if not isinstance(message, dict) or not ({"places", "failed"} & message.keys()):
            raise WireError(f"{message!r:.100}")
        self.finished += 1
        self.answered(message)

    def finish(self, ended: ChildEnded) -> None:
        self._watching.cancel()
        if self._hung:
            late = ChildEnded(f"it hung: no answer within {self._deadline:g} s")
            self.ended_with(late, self._hung)
        else:
            self.ended_with(ended, np.flatnonzero(self._marks % 2).tolist())

    async def _watch(self) -> None:
        """Kills the child when the code of one environment runs for longer than a step may take."""
        loop = asyncio.get_running_loop()
        seen = self._marks.copy()
        since = np.full(len(self._marks), loop.time())
        while not self._hung:
            await asyncio.sleep(self._deadline / LOOKS)
            now = loop.time()
            marks = self._marks.copy()
            since[marks != seen] = now
            seen = marks
            self._hung = np.flatnonzero((marks % 2 == 1) & (now - since >= self._deadline)).tolist()
        await self.kill()

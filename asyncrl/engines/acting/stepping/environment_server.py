"""Steps environments inside a child process, which its guard starts and ends.

The first message in says what to make, the first message out has the spaces, or the user's mistake. Then actions come
in for some environments, and states go out: of all of them at once, or, where each has a thread, as they come.
"""

import asyncio
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.children.child_messages import BatchedPipe, greeting, open_pipes, received
from asyncrl.config.named_files import is_of_gymnasium
from asyncrl.config.user_code import resolve
from asyncrl.engines.acting.stepping.answers import TERMINATED, TRUNCATED
from asyncrl.engines.acting.stepping.one_environment import MAKE, OneEnvironment, Stepped
from asyncrl.engines.acting.stepping.spaces import Spaces
from asyncrl.environments.adapters.packages import package
from asyncrl.errors import ConfigError, EnvironmentFailed

EXTRA = "acting"


def maker(env: str, options: dict[str, Any]) -> Callable[[], Any]:
    """Returns what makes an environment; raises ConfigError where a name or an option is wrong."""
    if not is_of_gymnasium(env):
        made = resolve(env, MAKE)
        return partial(made, **options)
    gymnasium = package("gymnasium", EXTRA, MAKE)

    def make() -> Any:
        try:
            return gymnasium.make(env, **options)
        except (gymnasium.error.Error, TypeError) as error:
            raise ConfigError(f"{MAKE}: gymnasium cannot make {env}: {error}") from None

    return make


@dataclass(eq=False, slots=True)
class EnvironmentServer:
    """Holds the environments of a child. marks: a counter for each in memory that outlives this process, odd while its
    code runs."""

    _calls: asyncio.StreamReader
    _answers: BatchedPipe
    _first: int = 0
    _environments: list[OneEnvironment] = field(default_factory=list)
    _episodes: list[int] = field(default_factory=list)
    _marks: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    _threads: ThreadPoolExecutor | None = None
    _tasks: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)

    async def serve(self) -> None:
        """Answers until the worker closes the pipe."""
        async with self._tasks:
            async for message in received(self._calls):
                match message:
                    case {"env": str()}:
                        self._answers.send(greeting(MAKE, partial(self._load, message)))
                    case {"begin": episodes, "played": played, "expected": expected}:
                        self._begin(episodes, played, expected)
                    case {"step": places, "actions": actions}:
                        self._step(places, np.frombuffer(actions, np.float32).reshape(len(places), -1))
            os._exit(0)  # Threads that still step are not awaited, because the worker has gone.

    def _load(self, code: dict[str, Any]) -> dict[str, Any]:
        self._first = code["first"]
        self._marks = np.frombuffer(mmap.mmap(code["mark"], 8 * code["count"]), np.int64)
        spaces = Spaces.of(code["spaces"]) if code["spaces"] else None
        make = maker(code["env"], code["options"])
        for place in range(code["count"]):
            made = OneEnvironment(make, self._first + place, code["seed"], spaces, stride=code["stride"])
            self._environments.append(made)
            spaces = self._environments[0].spaces
        assert spaces is not None, "a child has one environment at least"
        if code["threads"]:
            self._threads = ThreadPoolExecutor(code["count"])
        return {"spaces": spaces.plain()}

    def _begin(self, episodes: Sequence[int], played: Sequence[bytes], expected: Sequence[bytes]) -> None:
        """Begins an episode of these numbers in each environment, and plays it up to where it was. played: its actions.
        expected: the state that they led to; where they lead elsewhere now, the next episode begins."""
        self._episodes = list(episodes)
        found: list[Stepped | EnvironmentFailed] = []
        for place, (actions, state) in enumerate(zip(played, expected, strict=True)):
            found.append(self._marked(place, partial(self._opened, place, actions, state)))
        unlike = [
            place for place, (now, before) in enumerate(zip(self._episodes, episodes, strict=True)) if now > before
        ]
        self._send(list(range(len(found))), found, unlike=unlike)

    def _opened(self, place: int, actions: bytes, expected: bytes) -> Stepped:
        environment = self._environments[place]
        episode = self._episodes[place]
        try:
            state = environment.begin(episode)
            is_same = True
            for action in np.frombuffer(actions, np.float32).reshape(-1, environment.spaces.action.stored):
                stepped = environment.step(action, episode)
                self._marks[place] += 2  # Still its code, and another step: the deadline is that of one.
                state = stepped.following
                is_same = not (stepped.terminated or stepped.truncated)
                if not is_same:
                    break
            if actions and not (is_same and state.tobytes() == expected):
                self._episodes[place] += 1
                state = environment.begin(self._episodes[place])
        except Exception as error:  # the user's code: no episode can begin
            raise EnvironmentFailed(f"environment {self._first + place} cannot begin an episode: {error}") from None
        return Stepped(state, 0.0, False, False, state)

    def _step(self, places: Sequence[int], actions: NDArray[np.float32]) -> None:
        if self._threads is None:
            self._send(places, [self._stepped(place, action) for place, action in zip(places, actions, strict=True)])
            return
        for place, action in zip(places, actions, strict=True):
            self._tasks.create_task(self._in_thread(self._threads, place, action))

    async def _in_thread(self, threads: ThreadPoolExecutor, place: int, action: NDArray[np.float32]) -> None:
        loop = asyncio.get_running_loop()
        self._send([place], [await loop.run_in_executor(threads, self._stepped, place, action)])

    def _stepped(self, place: int, action: NDArray[np.float32]) -> Stepped | EnvironmentFailed:
        environment = self._environments[place]
        episode = self._episodes[place]
        found = self._marked(place, lambda: environment.step(action, episode))
        if isinstance(found, Stepped) and (found.terminated or found.truncated):
            self._episodes[place] += 1
        return found

    def _marked(self, place: int, run: Callable[[], Stepped]) -> Stepped | EnvironmentFailed:
        """Runs the user's code of one environment, and says so where it outlives this process."""
        self._marks[place] += 1
        try:
            return run()
        except EnvironmentFailed as failed:
            return failed
        finally:
            self._marks[place] += 1

    def _send(
        self, places: Sequence[int], found: Sequence[Stepped | EnvironmentFailed], unlike: Sequence[int] = ()
    ) -> None:
        stepped = [each for each in found if isinstance(each, Stepped)]
        if len(stepped) < len(found):
            self._answers.send({"failed": next(str(each) for each in found if isinstance(each, EnvironmentFailed))})
            return
        ends = bytes(TERMINATED * each.terminated + TRUNCATED * each.truncated for each in stepped)
        message = {
            "places": list(places),
            "observations": b"".join(each.observation.tobytes() for each in stepped),
            "rewards": np.array([each.reward for each in stepped], np.float32).tobytes(),
            "ends": ends,
            "following": b"".join(each.following.tobytes() for each, end in zip(stepped, ends, strict=True) if end),
        }
        errors = {
            place: "\n".join(filter(None, (each.error, each.traceback)))
            for place, each in zip(places, stepped, strict=True)
            if each.error
        }
        more = {name: told for name, told in (("errors", errors), ("unlike", list(unlike))) if told}
        self._answers.send(message | more)


async def serve_pipes() -> None:
    """Serves until the worker closes the pipe."""
    calls, answers = await open_pipes()
    await EnvironmentServer(calls, BatchedPipe(answers)).serve()

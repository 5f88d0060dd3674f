"""Plays episodes inside a child process, thousands at a time, which its guard starts and ends.

The first message in has the class to load, the first message out that it is loaded, or the user's mistake. Then calls
come in: each brings one episode to a turn, and its answers go out one by one.
"""

import asyncio
import mmap
import os
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgpack

from asyncrl.children.child_messages import BatchedPipe, greeting, open_pipes, received
from asyncrl.environments.episode import Answer, CallDeadlines, Episode
from asyncrl.environments.loading import KEY, SAMPLED, EnvironmentSpec, MakeEnvironment, load, takes
from asyncrl.protocols.named_columns import Columns

NOBODY = 0
"""The mark of a child that runs no code of the user's at this moment."""
CLOSING = 1
"""The mark of a child that closes an episode, which no call waits for."""
MARK_BYTES = 8


def write_mark(memory: mmap.mmap, call: int) -> None:
    """Writes down the call whose code runs now, where it outlives this process, four times a turn."""
    memory[:MARK_BYTES] = call.to_bytes(MARK_BYTES, "little")


def read_mark(descriptor: int) -> int:
    return int.from_bytes(os.pread(descriptor, MARK_BYTES, 0), "little")


@dataclass(eq=False, slots=True)
class EpisodeServer:
    """Holds the episodes of a child by name. Calls of different episodes overlap."""

    _calls: asyncio.StreamReader
    _answers: BatchedPipe
    _mark: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, MARK_BYTES))
    _most: int = 0
    _deadlines: CallDeadlines = field(default_factory=lambda: CallDeadlines(0.0))
    _episodes: dict[tuple[int, ...], Episode] = field(default_factory=dict)
    _make: MakeEnvironment | None = None
    _tasks: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)

    async def serve(self) -> None:
        """Answers calls until the worker closes the pipe."""
        async with self._tasks:
            async for message in received(self._calls):
                match message:
                    case {"use": str()}:
                        self._answers.send(greeting(KEY, partial(self._load, message)))
                    case {"end": names}:
                        for name in names:
                            self._end(tuple(name))
                    case _:
                        self._tasks.create_task(self._play(message, self._found(message)))
            os._exit(0)  # Calls that still run are not awaited, because the worker has gone.

    def _load(self, code: dict[str, Any]) -> dict[str, Any]:
        self._mark = mmap.mmap(code["mark"], MARK_BYTES)
        self._most = code["max_bytes"]
        self._deadlines = CallDeadlines(code["deadline"])
        self._make = load(EnvironmentSpec(code["use"], code["options"]))
        made = self._make()  # Shows values that the class refuses before the first episode.
        return {"loaded": True, "takes_sampled": takes(made, SAMPLED)}

    def _end(self, name: tuple[int, ...]) -> None:
        if (episode := self._episodes.pop(name, None)) is not None:
            self._tasks.create_task(self._close(episode))

    async def _close(self, episode: Episode) -> None:
        """Closes an episode after the call that may run in it, and reports what went wrong."""
        async with episode.taken:
            episode.mark_with(partial(write_mark, self._mark, CLOSING), partial(write_mark, self._mark, NOBODY))
            answer = await episode.close()
        if "error" in answer:
            self._answers.send({"unclosed": answer["error"], "traceback": answer["traceback"]})

    def _found(self, message: dict[str, Any]) -> Episode:
        """Returns the episode of a call, found before later messages are read; a new one if it is unknown or stands
        beyond the turn that the call asks for."""
        name = tuple(message["episode"])
        episode = self._episodes.get(name)
        if episode is None or episode.turns > len(message["said"]):
            self._end(name)
            assert self._make is not None, "calls follow the first message"
            self._episodes[name] = episode = Episode(self._make, self._most, self._deadlines)
        return episode

    async def _play(self, message: dict[str, Any], episode: Episode) -> None:
        """Brings an episode to the turn after these messages, from its opening if it has none, and sends the answers
        that this took, each with its turn."""
        call = message["call"]
        said = message["said"]
        async with episode.taken:
            episode.mark_with(partial(write_mark, self._mark, call), partial(write_mark, self._mark, NOBODY))
            if not episode.last:
                row = Columns(msgpack.unpackb(message["row"], raw=False, strict_map_key=False))
                if not self._answered(call, 0, await episode.reset(row, message["seed"]), last=not said):
                    return
            elif episode.turns == len(said):
                self._answered(call, episode.turns, episode.last, last=True)
            while episode.turns < len(said):
                sampled = message["sampled"][episode.turns - len(said) :]  # It ends with the newest turn.
                opened = message["opened"][episode.turns - len(said) :]
                answer = await episode.step(said[episode.turns], next(iter(sampled), None), any(opened[:1]))
                if not self._answered(call, episode.turns, answer, last=episode.turns == len(said)):
                    return

    def _answered(self, call: int, turn: int, answer: Answer, *, last: bool) -> bool:
        """Sends an answer. Returns whether the episode may go on."""
        failed = "error" in answer
        self._answers.send({"call": call, "turn": turn, "last": last or failed, **answer})
        return not failed


async def serve_pipes() -> None:
    """Serves calls until the worker closes the pipe."""
    calls, answers = await open_pipes()
    await EpisodeServer(calls, BatchedPipe(answers)).serve()

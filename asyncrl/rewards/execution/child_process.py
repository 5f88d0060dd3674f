"""The parent's end of one child process."""

import asyncio
import itertools
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from asyncrl.errors import AsyncrlError, ConfigError, DeadlineExceeded, WireError
from asyncrl.rewards.frames import packed, receive
from asyncrl.rewards.functions import FunctionSpec
from asyncrl.rewards.sample import Sample, Verdict

BURIAL = 5.0
"""Seconds the kernel may take to end a process that was killed."""


class ChildEnded(AsyncrlError):
    """The child is gone: it was killed, exited or crashed. The message says which.

    said: verdicts of the call that had come before; the sample after them is the one it ended at. vanished: it did not
    end by itself or for a call that hung, but by a signal, which may have come from anywhere.
    """

    def __init__(self, why: str, *, vanished: bool = False, said: Sequence[Verdict] = ()) -> None:
        super().__init__(why)
        self.vanished, self.said = vanished, said


class VanishedEarly(ConfigError):
    """The child was ended by a signal while it loaded the functions: by them, or from anywhere."""


class Answer:
    """The verdicts of one call, as they come."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._moved = asyncio.Event()
        self._ended: ChildEnded | None = None
        self.verdicts: list[Verdict] = []

    def take(self, verdicts: Sequence[Verdict]) -> None:
        """More of them came. Raises WireError for more than there are samples."""
        if len(self.verdicts) + len(verdicts) > self._samples:
            raise WireError(f"more verdicts than the {self._samples} samples of a call")
        self.verdicts += verdicts
        self._moved.set()

    def end(self, ended: ChildEnded) -> None:
        """No more will come."""
        self._ended = ended
        self._moved.set()

    async def whole(self, patience: float) -> list[Verdict]:
        """All of them. patience: seconds for the next.

        Raises:
            TimeoutError: the next did not come in time. ChildEnded: none can come any more.
        """
        while len(self.verdicts) < self._samples:
            async with asyncio.timeout(patience):
                await self._moved.wait()
            self._moved.clear()
            if self._ended is not None:
                raise self._ended
        return self.verdicts


class ChildProcess:
    """A running child. Calls may overlap; each waits for its own answer.

    concurrent: for each function, whether it is a coroutine function. ended: it will answer nothing any more.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._answers: dict[int, Answer] = {}
        self._numbers = itertools.count()
        self.concurrent: list[bool] = []
        self.ended = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def spawn(cls, specs: Sequence[FunctionSpec], deadline: float, tasks: asyncio.TaskGroup) -> "ChildProcess":
        """A child that has loaded the functions within `deadline` seconds; `tasks` owns the reading of its answers.

        Raises:
            ConfigError: a function cannot be loaded; VanishedEarly of these: try again. DeadlineExceeded: loading took
                too long.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "asyncrl.rewards.guard"), stdin=PIPE, stdout=PIPE, start_new_session=True
        )
        child = cls(process)
        try:
            async with asyncio.timeout(deadline):
                await child._load(specs)
        except TimeoutError:
            uses = ", ".join(spec.use for spec in specs)
            raise DeadlineExceeded(f"the reward functions {uses} were not loaded within {deadline:.0f} s") from None
        finally:
            if not child.concurrent:
                await child.kill()
        tasks.create_task(child._read(), name=f"answers of reward child {child.pid}")
        return child

    async def call(
        self, function: int, samples: Sequence[Sample], deadline: float, grace: float = 0.0
    ) -> list[Verdict]:
        """The verdicts of one function: on all samples at once if it judges groups, else on one after the other.

        deadline: seconds for each of its calls, kept by the child where the function lets it; grace: further ones
        until the child is killed.

        Raises:
            ChildEnded: the child was gone, or hung and was killed, before it had judged all samples.
        """
        number, answer = next(self._numbers), Answer(len(samples))
        self._answers[number] = answer
        try:
            plain = [astuple(sample) for sample in samples]
            await self._send({"call": number, "function": function, "samples": plain, "deadline": deadline})
            return await answer.whole(deadline + grace)
        except TimeoutError:
            await self.kill()
            raise ChildEnded(f"it hung: no answer within {deadline:g} s", said=answer.verdicts) from None
        except ChildEnded as ended:
            await self.kill()
            raise ChildEnded(str(ended), vanished=ended.vanished, said=answer.verdicts) from None
        finally:
            self._answers.pop(number, None)

    async def kill(self) -> None:
        """End the child and everything it started, at once."""
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.transport.abort()
        async with asyncio.timeout(BURIAL):
            await self._process.wait()

    async def _load(self, specs: Sequence[FunctionSpec]) -> None:
        await self._send([spec.to_plain() for spec in specs])
        assert self._process.stdout is not None
        try:
            message = await receive(self._process.stdout)
        except asyncio.IncompleteReadError:
            status = await self._process.wait()
            told = f"{specs[0].key}: the process {_ended(status)} while it loaded them; see its output"
            raise (VanishedEarly if status < 0 else ConfigError)(told) from None
        match message:
            case {"mistake": str(mistake)}:
                raise ConfigError(mistake)
            case {"concurrent": [*concurrent]}:
                self.concurrent = concurrent
            case _:
                raise WireError(f"a reward child began with {message!r:.100}")

    async def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(packed(message))
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            raise ChildEnded(f"its process {self.pid} was gone", vanished=True) from None

    async def _read(self) -> None:
        assert self._process.stdout is not None
        why = ""
        try:
            while True:
                self._take(await receive(self._process.stdout))
        except asyncio.IncompleteReadError:
            pass
        except WireError as error:
            why = f"it said what is no answer: {error}"
            await self.kill()
        status = await self._process.wait()
        self.ended = True
        for answer in self._answers.values():
            answer.end(ChildEnded(why or f"its process {_ended(status)}", vanished=not why and status < 0))

    def _take(self, message: Any) -> None:
        match message:
            case {"call": int(number), "verdicts": [*verdicts]}:
                if (answer := self._answers.get(number)) is not None:
                    answer.take([_verdict(fields) for fields in verdicts])
            case _:
                raise WireError(f"{message!r:.100}")


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    memory = ", as the kernel does where memory runs out" if -status == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-status).name}{memory}"


def _verdict(fields: Any) -> Verdict:
    match fields:
        case [None | int() | float() | dict() as value, str(reason), str(traceback)]:
            return Verdict(value, reason, traceback)
        case _:
            raise WireError(f"no verdict: {fields!r:.100}")

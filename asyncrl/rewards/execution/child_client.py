"""Starts one child process and calls reward functions in it; child_server.py is the other end of its pipes."""

import asyncio
import itertools
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Any

from asyncrl.errors import AsyncrlError, ConfigError, DeadlineExceeded, WireError
from asyncrl.rewards.execution.pipe_messages import packed, receive
from asyncrl.rewards.functions import FunctionSpec
from asyncrl.rewards.sample import FunctionResult, Sample

KILL_TIMEOUT = 5.0
"""Seconds the kernel may take to end a process that was killed."""


class ChildEnded(AsyncrlError):
    """The child was killed, exited or crashed; the message says which.

    received: results of the call that came before; the child ended at the sample after them. vanished: a signal,
    perhaps from outside, ended the child, not the child itself nor a call that hung.
    """

    def __init__(self, why: str, *, vanished: bool = False, received: Sequence[FunctionResult] = ()) -> None:
        super().__init__(why)
        self.vanished = vanished
        self.received = received


class VanishedEarly(ConfigError):
    """A signal ended the child while it loaded the functions."""


class Answer:
    """Collects the results of one call."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._moved = asyncio.Event()
        self._ended: ChildEnded | None = None
        self.results: list[FunctionResult] = []

    def take(self, results: Sequence[FunctionResult]) -> None:
        """Adds results; raises WireError if there are more than samples."""
        if len(self.results) + len(results) > self._samples:
            raise WireError(f"more results than the {self._samples} samples of a call")
        self.results += results
        self._moved.set()

    def end(self, ended: ChildEnded) -> None:
        """Marks that no more results will come."""
        self._ended = ended
        self._moved.set()

    async def whole(self, timeout: float) -> list[FunctionResult]:
        """Waits for all results; raises ChildEnded, or TimeoutError if the next one takes over `timeout` seconds."""
        while len(self.results) < self._samples:
            if self._ended is not None:
                raise self._ended
            async with asyncio.timeout(timeout):
                await self._moved.wait()
            self._moved.clear()
        return self.results


class ChildProcess:
    """A running child. Calls may overlap; each waits for its own answer.

    concurrent: for each function, whether it is a coroutine function. ended: the process ends or has ended.
    """

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._calls = process.stdin
        self._results = process.stdout
        self._answers: dict[int, Answer] = {}
        self._numbers = itertools.count()
        self.concurrent: list[bool] = []
        self.ended = False

    @classmethod
    async def spawn(cls, specs: Sequence[FunctionSpec], deadline: float, tasks: asyncio.TaskGroup) -> "ChildProcess":
        """Starts a child; raises ConfigError if it cannot load a function, VanishedEarly if a signal ended it, and
        DeadlineExceeded after `deadline` seconds. tasks: owns the task that reads answers."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "asyncrl.rewards.execution.guard_process"),
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,
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
        tasks.create_task(child._read(), name=f"answers of reward child {process.pid}")
        return child

    async def call(
        self, function: int, samples: Sequence[Sample], deadline: float, grace: float
    ) -> list[FunctionResult]:
        """Returns the results of one function: of all samples at once if it scores groups, else one by one.

        deadline: seconds for each call, which the child enforces for coroutines. grace: further seconds until the child
        is killed. Raises ChildEnded if the child ended, or hung and was killed, before it had scored all samples.
        """
        number, answer = next(self._numbers), Answer(len(samples))
        self._answers[number] = answer
        try:
            plain = [astuple(sample) for sample in samples]
            await self._send({"call": number, "function": function, "samples": plain, "deadline": deadline})
            return await answer.whole(deadline + grace)
        except TimeoutError:
            await self.kill()
            raise ChildEnded(f"it hung: no answer within {deadline:g} s", received=answer.results) from None
        except ChildEnded as ended:
            await self.kill()
            raise ChildEnded(str(ended), vanished=ended.vanished, received=answer.results) from None
        finally:
            self._answers.pop(number, None)

    async def kill(self) -> None:
        """Ends the child and all processes that it started, at once."""
        self.ended = True
        if not self._calls.is_closing():
            self._calls.transport.abort()
        async with asyncio.timeout(KILL_TIMEOUT):
            await self._process.wait()

    async def _load(self, specs: Sequence[FunctionSpec]) -> None:
        await self._send([asdict(spec) for spec in specs])
        try:
            message = await receive(self._results)
        except asyncio.IncompleteReadError:
            status = await self._process.wait()
            why = f"{specs[0].key}: the process {_ended(status)} while it loaded them; see its output"
            raise (VanishedEarly if status < 0 else ConfigError)(why) from None
        match message:
            case {"mistake": str(mistake)}:
                raise ConfigError(mistake)
            case {"concurrent": [*concurrent]}:
                self.concurrent = concurrent
            case _:
                raise WireError(f"a reward child began with {message!r:.100}")

    async def _send(self, message: Any) -> None:
        try:
            self._calls.write(packed(message))
            await self._calls.drain()
        except (BrokenPipeError, ConnectionResetError):
            raise ChildEnded(f"its process {self._process.pid} was gone", vanished=True) from None

    async def _read(self) -> None:
        why = ""
        try:
            while True:
                self._take(await receive(self._results))
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
            case {"call": int(number), "results": [*results]}:
                if (answer := self._answers.get(number)) is not None:
                    answer.take([_result(fields) for fields in results])
            case _:
                raise WireError(f"{message!r:.100}")


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    memory = ", as the kernel does where memory runs out" if -status == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-status).name}{memory}"


def _result(fields: Any) -> FunctionResult:
    match fields:
        case [None | int() | float() | dict() as value, str(reason), str(traceback)]:
            return FunctionResult(value, reason, traceback)
    raise WireError(f"no result: {fields!r:.100}")

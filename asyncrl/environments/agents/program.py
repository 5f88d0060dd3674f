"""The process of an agent: started with a row, watched, and ended with everything that it started."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from asyncrl.children.containment import Containment, exit_status
from asyncrl.concurrency import gather

GUARD = (sys.executable, "-m", "asyncrl.children.guard_program", "asyncrl.environments.agents.exec_program")
LARGEST_OUTPUT = 16 * 2**10
"""Bytes of standard output and of errors that are kept: their ends."""
BLOCK = 2**16
KILL_SECONDS = 5.0
"""Seconds that the kernel may take to end a killed process."""


@dataclass(eq=False, slots=True)
class AgentProgram:
    """A running program. output, errors: the ends of what it writes. done: its exit status, after all of its output."""

    process: Process
    output: bytearray
    errors: bytearray
    done: "asyncio.Task[int]"

    @classmethod
    async def start(
        cls, words: Sequence[str], given: bytes, variables: Mapping[str, str], containment: Containment | None
    ) -> "AgentProgram":
        """Starts a program that reads `given` from its standard input. containment: None: nothing contains it."""
        stdin = os.memfd_create("asyncrl-row")
        try:
            os.write(stdin, given)
            os.lseek(stdin, 0, os.SEEK_SET)
            process = await asyncio.create_subprocess_exec(
                *([] if containment is None else containment.command()),
                *GUARD,
                str(stdin),
                *words,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=dict(variables),
                pass_fds=(stdin,),
                start_new_session=True,
            )
        finally:
            os.close(stdin)
        output, errors = bytearray(), bytearray()
        reading = _read(process, output, errors, is_contained=containment is not None)
        done = asyncio.create_task(reading, name=f"agent {process.pid}")
        return cls(process, output, errors, done)

    async def end(self) -> None:
        """Ends the program and all that it started, at once."""
        assert self.process.stdin is not None
        self.process.stdin.close()  # The guard waits for that.
        await asyncio.wait({self.done}, timeout=KILL_SECONDS)
        if not self.done.done():  # The program may have stopped the guard.
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.done.cancel()
        if self.errors:
            os.write(sys.stderr.fileno(), bytes(self.errors) + b"\n")  # Beside what other environments print.
            self.errors.clear()


async def _read(process: Process, output: bytearray, errors: bytearray, *, is_contained: bool) -> int:
    """Keeps the ends of both outputs until the program has ended, and returns its status."""
    assert process.stdout is not None
    assert process.stderr is not None
    await gather(_keep_end(process.stdout, output), _keep_end(process.stderr, errors))
    status = await process.wait()
    return exit_status(status) if is_contained else status


async def _keep_end(stream: asyncio.StreamReader, kept: bytearray) -> None:
    while block := await stream.read(BLOCK):
        kept += block
        del kept[:-LARGEST_OUTPUT]

"""The process of an agent: started with a row, watched, and ended with everything that it started."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GUARD = (sys.executable, "-m", "asyncrl.children.guard_process", "asyncrl.environments.agents.exec_program")
LARGEST_OUTPUT = 16 * 2**10
"""Bytes of standard output that are kept: its end."""
BLOCK = 2**16
KILL_SECONDS = 5.0
"""Seconds that the kernel may take to end a killed process."""


@dataclass(eq=False, slots=True)
class AgentProgram:
    """A running program. output: the end of its standard output. done: its exit status, after all of its output."""

    process: Process
    output: bytearray
    done: "asyncio.Task[int]"

    @classmethod
    async def start(cls, words: Sequence[str], given: bytes, variables: Mapping[str, str]) -> "AgentProgram":
        """Starts a program that reads `given` from its standard input."""
        stdin = os.memfd_create("asyncrl-row")
        try:
            os.write(stdin, given)
            os.lseek(stdin, 0, os.SEEK_SET)
            process = await asyncio.create_subprocess_exec(
                *GUARD,
                str(stdin),
                *words,
                stdin=PIPE,
                stdout=PIPE,
                env=dict(variables),
                pass_fds=(stdin,),
                start_new_session=True,
            )
        finally:
            os.close(stdin)
        output = bytearray()
        return cls(process, output, asyncio.create_task(_read(process, output), name=f"agent {process.pid}"))

    async def end(self) -> None:
        """Ends the program and all that it started, at once."""
        assert self.process.stdin is not None
        self.process.stdin.close()  # The guard waits for that.
        await asyncio.wait({self.done}, timeout=KILL_SECONDS)
        self.done.cancel()


async def _read(process: Process, output: bytearray) -> int:
    """Keeps the end of the output until the program has ended, and returns its status."""
    assert process.stdout is not None
    while block := await process.stdout.read(BLOCK):
        output += block
        del output[:-LARGEST_OUTPUT]
    return await process.wait()

"""Programs of tests that begin in a forked process: what they import was imported once, not at each start.

    test ──Forks──> fork server of the tests ──fork──> the program, a child of the test ──fork──> its own fork server

The rest is as in `python PROGRAM`: variables, folder, arguments, descriptors, signals, exit status (program_start.py).
Runs begin as a user begins them in test_start.py, test_readme.py, test_notebook.py, test_random_kills.py and, below a
shell with limits, in test_exhaustion.py.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, ClassVar

from watching import PATIENCE

from asyncrl.deploy.process.fork_client import Forks

IMPORTED = (
    "asyncrl.api",
    "asyncrl.deploy.commands.run",
    "asyncrl.deploy.run_fleet",
    "asyncrl.deploy.run_setup",
    "asyncrl.deploy.standalone_evaluation",
    "asyncrl.services.reward",
    "tests.system.program_start",
)
"""Modules that the fork server of the tests imports besides those of a run's own."""


class ForkedProgram(subprocess.Popen[Any]):
    """Has the interface of Popen; the command must be `python -m MODULE ...` or `python FILE ...`. forks: set by the
    fixture `programs`."""

    forks: ClassVar[Forks | None] = None

    def _execute_child(self, args: Any, *given: Any) -> None:
        """Replaces the fork and exec of Popen; `given` is what Popen hands to it."""
        _, _, _, _, cwd, env, _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_ = given
        interpreter, *arguments = args
        assert interpreter == sys.executable
        assert p2cread == -1, "a forked program reads no standard input"
        assert c2pwrite != -1, "a forked program has a standard output of its own"
        assert errwrite != -1, "and standard error is the same or a file"
        request = {
            "arguments": arguments,
            "cwd": str(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
            "errors": "" if errwrite == c2pwrite else os.readlink(f"/proc/self/fd/{errwrite}"),
        }
        try:
            self.pid = _forked(c2pwrite, json.dumps(request).encode() + b"\n")
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]
        self._child_created = True


def _forked(output: int, request: bytes) -> int:
    """Returns the pid of a program, which is a child of this process, after it was sent its request."""
    assert ForkedProgram.forks is not None, 'mark the file with pytest.mark.usefixtures("programs")'
    with os.fdopen(output, "wb", closefd=False) as file:
        worker = asyncio.run(ForkedProgram.forks.fork("torch", "program", file))
    with worker.stdin as stdin:
        rest = memoryview(request)
        while rest:
            rest = rest[stdin.write(rest) :]
    return worker.pid


def finished(
    command: Sequence[str], *, timeout: float, cwd: Path | None = None, env: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Runs a program to its end, as `subprocess.run` does, and returns its exit status and what it wrote."""
    with NamedTemporaryFile("r") as errors, Path(errors.name).open("w") as file:
        with ForkedProgram(command, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=file) as program:
            try:
                shown, _ = program.communicate(timeout=timeout)
            except BaseException:
                program.kill()
                raise
        return subprocess.CompletedProcess(command, program.returncode, shown, errors.read())


@contextmanager
def running(command: Sequence[str]) -> Iterator["subprocess.Popen[str]"]:
    """Starts a program, whose errors are shown among its output; it is killed at the end."""
    process = ForkedProgram(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE)


def until_step(process: "subprocess.Popen[str]", step: int) -> str:
    """Returns what a run showed up to this step. Raises AssertionError when it ends before."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if (found := re.match(r"step (\d+)/", line)) and int(found[1]) >= step:
            return "".join(seen)
    raise AssertionError("ended early:\n" + "".join(seen[-20:]))


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Waits for the end of a program. Returns its exit status, and what was not read of its output."""
    shown, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, shown

"""Programs of tests that begin in a forked process: what they import was imported once, not at each start.

    test ──Forks──> fork server of the tests ──fork──> the program, a child of the test ──fork──> its own fork server

The rest is as in `python PROGRAM`: variables, folder, arguments, descriptors, signals, exit status (program_start.py).
Runs begin as a user begins them in test_start.py, test_readme.py, test_notebook.py, test_random_kills.py and, below a
shell with limits, in test_exhaustion.py.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, ClassVar

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

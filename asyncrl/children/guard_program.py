"""A process that starts the one that runs the user's code, and ends it with everything that one started.

    worker ──stdin, stdout──> runner (`serve_pipes` of the named module) ──> whatever the user's code starts
       └─stdin──> guard ──ends all of them──┘

The guard waits for the end of stdin, when the worker ends a child or dies, and for the end of the runner. Then it finds
all processes of the user's code, also in sessions of their own and orphans, which the kernel gives to the guard.
"""

import ctypes
import os
import resource
import select
import signal
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
STDIN = 0
STDOUT = 1
STDERR = 2
FIRST_PROCESS = 1
SIGNAL_STATUS = 128
"""A contained child ends with this and the number of a signal where a signal ended it."""


def main() -> None:
    """Forks; returns in the runner, and ends the guard with the exit status of the runner."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The worker decides when all of this ends.
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    if runner := os.fork():
        _guard(runner)
    os.setsid()  # What the user's code sends to its own group does not reach the guard.
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(1)  # The guard died before the call of prctl.


def _guard(runner: int) -> NoReturn:
    os.dup2(STDERR, STDOUT)  # Only the runner may close the pipe of answers.
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting = select.poll()
    waiting.register(STDIN, 0)  # The runner reads it; the guard only waits for its end.
    waiting.register(woken, select.POLLIN)
    while (status := _reap(runner)) is None and STDIN not in (ready := dict(waiting.poll())):
        assert woken in ready
        os.read(woken, 4096)
    _end_children()
    _end_as(signal.SIGKILL if status is None else status)


def _reap(runner: int) -> int | None:
    """Collects children that have ended; returns the status of the runner if it is among them, else None."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == runner:
                return ended[1]
    return None


def _end_children() -> None:
    """Kills all children until none are left; children of a killed child become children of the guard."""
    with suppress(ChildProcessError):
        while True:
            for child in Path("/proc/thread-self/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)


def _end_as(status: int) -> NoReturn:
    """Ends this process as the runner ended. status: from `waitpid`. The first process of a sandbox receives no signal
    from within, and tells bubblewrap by its status, as bubblewrap tells the worker."""
    if os.WIFSIGNALED(status) and os.getpid() == FIRST_PROCESS:
        os._exit(SIGNAL_STATUS + os.WTERMSIG(status))
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # The runner's core says more than one of the guard.
        cause = os.WTERMSIG(status)
        if cause != signal.SIGKILL:
            signal.signal(cause, signal.SIG_DFL)
        os.kill(os.getpid(), cause)
    os._exit(os.waitstatus_to_exitcode(status))


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


if __name__ == "__main__":
    main()
    import asyncio  # After the fork: the guard stays small.
    import sys
    from importlib import import_module

    asyncio.run(import_module(sys.argv[1]).serve_pipes())

"""A command that starts itself again."""

import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from asyncrl.deploy.commands.run import run_with_restarts


class Endings:
    """Starts real processes that end as told, one after the other."""

    def __init__(self, *endings: str) -> None:
        self._endings = list(endings)
        self.started: list[Sequence[str]] = []

    def __call__(self, arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
        self.started.append(arguments)
        return subprocess.Popen([sys.executable, "-c", f"import os, sys; {self._endings.pop(0)}"])


KILLED = "os.kill(os.getpid(), 9)"


@pytest.mark.parametrize(
    ("endings", "restarts", "code", "starts"),
    [
        (["sys.exit(0)"], 3, 0, 1),
        (["sys.exit(2)"], 3, 2, 1),
        (["sys.exit(75)", "sys.exit(0)"], 3, 0, 2),
        ([KILLED, "sys.exit(0)"], 1, 0, 2),
        (["sys.exit(75)", "sys.exit(75)"], 1, 75, 2),
        ([KILLED], 0, 75, 1),
    ],
)
def test_what_is_started_again(endings: list[str], restarts: int, code: int, starts: int) -> None:
    runs = Endings(*endings)
    assert run_with_restarts(["quickstart"], restarts, runs) == code
    assert runs.started == [["quickstart"]] * starts


def test_changes_are_accepted_by_the_first_start_only() -> None:
    runs = Endings("sys.exit(75)", "sys.exit(0)")
    assert run_with_restarts(["quickstart", "--accept-changes", "--run-dir", "d"], 3, runs) == 0
    assert runs.started == [
        ["quickstart", "--accept-changes", "--run-dir", "d"],
        ["quickstart", "--run-dir", "d"],
    ]


def test_the_handlers_of_signals_are_put_back() -> None:
    before = (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    run_with_restarts([], 0, Endings("sys.exit(0)"))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_sigterm_reaches_the_child() -> None:
    def start(arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
        ready = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
        return subprocess.Popen([sys.executable, "-c", ready])

    before = signal.getsignal(signal.SIGTERM)
    assert run_with_restarts([], 0, start) == 75
    assert signal.getsignal(signal.SIGTERM) == before

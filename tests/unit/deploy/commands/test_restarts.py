"""A command that starts itself again."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

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
def test_what_is_started_again(endings: list[str], restarts: int, code: int, starts: int, tmp_path: Path) -> None:
    runs = Endings(*endings)
    assert run_with_restarts(["quickstart"], restarts, tmp_path, runs) == code
    assert runs.started == [["quickstart"]] * starts


def test_changes_are_accepted_by_the_first_start_only(tmp_path: Path) -> None:
    runs = Endings("sys.exit(75)", "sys.exit(0)")
    assert run_with_restarts(["quickstart", "--accept-changes", "--run-dir", "d"], 3, tmp_path, runs) == 0
    assert runs.started == [
        ["quickstart", "--accept-changes", "--run-dir", "d"],
        ["quickstart", "--run-dir", "d"],
    ]


@pytest.mark.parametrize(
    ("ends", "starts"),
    [
        ([("RewardError: it raised KeyError", 4)] * 3, 2),
        ([("RewardError: it raised KeyError", 4), ("RewardError: it raised KeyError", 8)], 3),
        ([("RewardError: x", 4), ("TaskError: y", 4), ("RewardError: z", 4)], 3),
        ([("TrainingStopped: the reward fell", 0)] * 3, 2),
        ([("JournalError: contradicts itself", 5), ("FleetFailed: x", 5), ("JournalError: again", 5)], 3),
        ([("FleetFailed: training0.0 died", 4)] * 4, 5),
        ([("OSError: [Errno 28] No space left on device", 4)] * 4, 5),
        ([("PermissionError: [Errno 1]", 4), ("MemoryError: ", 4), ("MemoryError: ", 4)], 4),
        ([("RemoteError: training0[0] raised OSError: [Errno 28] No space left on device", 4)] * 4, 5),
        ([("KeyError: 'rewards'", 4)] * 3, 2),
        ([("", 4)] * 4, 5),
    ],
)
def test_a_mistake_is_tried_again_once_at_a_checkpoint(
    ends: list[tuple[str, int]], starts: int, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "controller.jsonl"
    made = tmp_path / "checkpoints"
    endings = []
    for error, step in ends:
        line = json.dumps({"event": "run ends", **({"error": error} if error else {})})
        wrote = f"os.makedirs({str(made / str(step))!r}, exist_ok=True); print({line!r}, file=open({str(log)!r}, 'a'))"
        endings.append(f"{wrote}; sys.exit(75)")
    runs = Endings(*endings, "sys.exit(0)")
    assert run_with_restarts(["quickstart"], 10, tmp_path, runs) == (0 if starts > len(ends) else 75)
    assert len(runs.started) == starts


def test_an_end_that_no_log_took_is_not_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    line = json.dumps({"event": "run ends", "error": "RewardError: x"})
    log = tmp_path / "logs" / "controller.jsonl"
    wrote = f"print({line!r}, file=open({str(log)!r}, 'a')); sys.exit(75)"
    runs = Endings(wrote, "sys.exit(75)", "sys.exit(75)", "sys.exit(0)")
    assert run_with_restarts(["quickstart"], 10, tmp_path, runs) == 0
    assert len(runs.started) == 4


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
@pytest.mark.parametrize("ending", ["signal.signal(number, 0); os.kill(os.getpid(), number)", "sys.exit(75)"])
def test_a_run_that_is_told_to_end_is_not_started_again(name: str, ending: str, tmp_path: Path) -> None:
    """Ctrl-C, a service manager and a container engine tell both processes, perhaps before the run listens."""
    tells = (
        f"import signal; number = signal.{name}; signal.signal(number, signal.SIG_IGN); os.kill(os.getppid(), number)"
    )
    runs = Endings(f"{tells}; {ending}", "sys.exit(0)")
    assert run_with_restarts(["quickstart"], 3, tmp_path, runs) == 75
    assert len(runs.started) == 1


def test_the_handlers_of_signals_are_put_back(tmp_path: Path) -> None:
    before = (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    run_with_restarts([], 0, tmp_path, Endings("sys.exit(0)"))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_sigterm_reaches_the_child(tmp_path: Path) -> None:
    def start(arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
        ready = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
        return subprocess.Popen([sys.executable, "-c", ready])

    before = signal.getsignal(signal.SIGTERM)
    assert run_with_restarts([], 0, tmp_path, start) == 75
    assert signal.getsignal(signal.SIGTERM) == before

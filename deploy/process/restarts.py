"""A command that starts itself again after its run died, to resume it."""

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import FrameType

RESUMABLE = 75
Start = Callable[[Sequence[str]], "subprocess.Popen[bytes]"]


def start_run(arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", "asyncrl.deploy.cli", "run", *arguments])


def run_with_restarts(arguments: Sequence[str], restarts: int, start: Start = start_run) -> int:
    """Run the command in a child; start it again, at most `restarts` times, when it may be resumed.

    That is after exit code 75 (the trainer died) and after a death by a signal. Returns the last exit code.
    """
    for left in range(restarts, -1, -1):
        code = _run_once(arguments, start)
        if not (code == RESUMABLE or code < 0) or left == 0:
            break
        print(f"asyncrl: the run ended with {_named(code)}; starting it again ({left} left)", file=sys.stderr)
    return code if code >= 0 else RESUMABLE


def _run_once(arguments: Sequence[str], start: Start) -> int:
    child = start(arguments)

    def pass_on(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    # A terminal sends Ctrl-C to both of us; the child decides how to end. SIGTERM reaches only this process.
    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    before[signal.SIGTERM] = signal.signal(signal.SIGTERM, pass_on)
    try:
        return child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _named(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

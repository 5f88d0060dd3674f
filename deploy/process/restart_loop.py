"""The loop of `asyncrl run --restarts`: it runs the command in a child, and resumes it in a new one after it died."""

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

RESUMABLE = 75
Start = Callable[[Sequence[str]], "subprocess.Popen[bytes]"]


def start_run(arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", "asyncrl.deploy.cli", "run", *arguments])


def run_with_restarts(arguments: Sequence[str], restarts: int, start: Start = start_run) -> int:
    """Runs the command in a child, and at most `restarts` times again after exit code 75 (the trainer died) or a death
    by a signal. Returns the last exit code."""
    for left in range(restarts, -1, -1):
        code = _run_once(arguments, start)
        if left == 0 or (code >= 0 and code != RESUMABLE):
            break
        ending = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        print(f"asyncrl: the run ended with {ending}; starting it again ({left} left)", file=sys.stderr)
    return code if code >= 0 else RESUMABLE


def _run_once(arguments: Sequence[str], start: Start) -> int:
    child = start(arguments)
    # A terminal sends Ctrl-C to both of us; the child decides how to end. SIGTERM reaches only this process.
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, frame: child.send_signal(number)),
    }
    try:
        return child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

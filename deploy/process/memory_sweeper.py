"""Removes what a start of a run keeps outside its directory when its controller is killed.

    python memory_sweeper.py RUN SOCKETS        stdin: a pipe that only the controller holds

The pipe ends when the controller has closed its launcher, and has removed all itself, or when it is dead; its workers
die with it. RUN names one start, and a resume has another, so it does not matter how late this runs. The file imports
only the standard library, so that it starts in milliseconds and costs next to nothing while it waits.
"""

import shutil
import signal
import sys
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def main(run: str, sockets: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # The controller's end decides, however it comes about.
    sys.stdin.buffer.read()
    for path in SHARED_MEMORY.glob(f"asyncrl-{run}-*"):
        path.unlink(missing_ok=True)
    shutil.rmtree(sockets, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

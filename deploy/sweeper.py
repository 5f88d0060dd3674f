"""Removes what a run keeps outside its directory, however the run ends: also when its controller is killed.

    python sweeper.py RUN SOCKETS        stdin: a pipe that only the controller holds

When the pipe ends, the controller has closed its launcher or is dead; its workers end with it by themselves. Only files
that are there at that moment are removed: a resume that follows may have some of the same names. A file of its own and
no more than the standard library, so that it starts in milliseconds and costs next to nothing while it waits.
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

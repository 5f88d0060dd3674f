"""Removes what a start of a run keeps outside its directory when its controller is killed.

    python sweeper.py RUN SOCKETS        stdin: a pipe that only the controller holds

When the pipe ends, the controller has closed its launcher, and has removed all itself, or is dead; its workers end with
it by themselves. However late this goes on: RUN is the name of one start, and a resume has another. A file of its own
and no more than the standard library, so that it starts in milliseconds and costs next to nothing while it waits.
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

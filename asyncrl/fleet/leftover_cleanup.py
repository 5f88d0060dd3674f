"""What a start of a run keeps outside the run's directory: shared memory and a folder of sockets, named after it."""

import re
import secrets
import shutil
import tempfile
from pathlib import Path

from asyncrl.memory import sweep
from asyncrl.rundir import RunDirectory


def new_start(directory: RunDirectory) -> str:
    """A name that no other start has, 16 hex digits of which the first 8 are the run's id.

    Whoever calls holds run.lock: the last start in this directory is over, and what it has left is removed. The name in
    a copy of a directory is that of a run which may live, so it counts only where it was made, as device and inode
    tell: a directory that was moved keeps them, a copy has others.
    """
    status = directory.path.stat()
    here = f"{status.st_dev} {status.st_ino}"
    if directory.start.exists() and (made := re.fullmatch(rf"([0-9a-f]{{16}}) {here}\n", directory.start.read_text())):
        remove_leftovers(made[1])
    start = f"{directory.run_id()}{secrets.token_hex(4)}"
    directory.start.write_text(f"{start} {here}\n")
    return start


def remove_leftovers(start: str) -> None:
    """Remove all that carries the name of this start, none of which is needed any more."""
    sweep(start)
    for folder in Path(tempfile.gettempdir()).glob(f"asyncrl-{start}-*"):
        shutil.rmtree(folder, ignore_errors=True)

"""Names each start of a run, and removes what an earlier start left outside the run directory: shared memory and the
folder of sockets, which carry that name."""

import re
import secrets
import shutil
import tempfile
from pathlib import Path

from asyncrl.lanes.shared_memory import unlink_run_segments
from asyncrl.telemetry.run_directory import RunDirectory


def new_start(directory: RunDirectory) -> str:
    """Returns a name that no other start has: 16 hex digits, of which the first 8 are the run's id.

    The caller holds run.lock, so the last start in this directory is over, and what it left is removed. A copy of the
    directory names a start whose run may be alive; device and inode, which a moved directory keeps and a copy does not,
    tell the two apart.
    """
    status = directory.path.stat()
    here = f"{status.st_dev} {status.st_ino}"
    if directory.start.exists() and (last := re.fullmatch(rf"([0-9a-f]{{16}}) {here}\n", directory.start.read_text())):
        remove_leftovers(last[1])
    start = f"{directory.run_id()}{secrets.token_hex(4)}"
    directory.start.write_text(f"{start} {here}\n")
    return start


def remove_leftovers(start: str) -> None:
    """Removes the shared memory and the socket folders named after this start, which must be over."""
    unlink_run_segments(start)
    for folder in Path(tempfile.gettempdir()).glob(f"asyncrl-{start}-*"):
        shutil.rmtree(folder, ignore_errors=True)

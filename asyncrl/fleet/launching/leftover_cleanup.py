"""Names each start of a run, and removes what an earlier start left: shared memory, the folder of sockets, and files of
weights, which carry that name."""

import re
import secrets
import shutil
import tempfile
from pathlib import Path

from asyncrl.lanes.shared_memory import unlink_run_segments
from asyncrl.lanes.weights.version_folder import folder_of_start
from asyncrl.telemetry.run_directory import RunDirectory


def new_start(directory: RunDirectory, weights_folder: str | None = None) -> str:
    """Returns a name that no other start has: 16 hex digits, of which the first 8 are the run's id. weights_folder:
    value of `weights.folder` in a run whose weights are files.

    The caller holds run.lock, so the last start in this directory is over, and what it left is removed. A copy of the
    directory names a start whose run may be alive; device and inode, which a moved directory keeps and a copy does not,
    tell the two apart.
    """
    status = directory.path.stat()
    here = f"{status.st_dev} {status.st_ino}"
    text = directory.start.read_text() if directory.start.exists() else ""
    if last := re.fullmatch(rf"([0-9a-f]{{16}}) {here}\n(?:weights (.+)\n)?", text):
        remove_leftovers(last[1], None if last[2] is None else Path(last[2]))
    start = f"{directory.run_id()}{secrets.token_hex(4)}"
    weights = None if weights_folder is None else folder_of_start(weights_folder, directory.path, start)
    directory.start.write_text(f"{start} {here}\n" + ("" if weights is None else f"weights {weights}\n"))
    return start


def remove_leftovers(start: str, weights: Path | None = None) -> None:
    """Removes the shared memory and the socket folders named after this start, which must be over. weights: folder with
    its files of weights, of the same name."""
    unlink_run_segments(start)
    if weights is not None and weights.name == start:
        shutil.rmtree(weights, ignore_errors=True)
    for folder in Path(tempfile.gettempdir()).glob(f"asyncrl-{start}-*"):
        shutil.rmtree(folder, ignore_errors=True)

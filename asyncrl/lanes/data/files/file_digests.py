"""Digests of files, which are computed once for each file that does not change."""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path, PurePosixPath

from asyncrl.errors import WireError
from asyncrl.protocols.join_messages import FileTree, ListedFile

BLOCK_BYTES = 1 << 20
"""Bytes that are read at a time."""


class FileDigests:
    """Computes SHA-256, and remembers those of files whose size, inode and time of change stay. remembered_in: a file
    that keeps them for other processes; None: nothing does. bytes_read: to compute them."""

    def __init__(self, remembered_in: Path | None = None) -> None:
        self.bytes_read = 0
        self._file = remembered_in
        self._known: dict[str, list[str | int]] = {}
        self.load()

    def load(self) -> None:
        """Takes up what other processes computed meanwhile."""
        if self._file is not None and self._file.exists():
            with suppress(OSError, ValueError):  # They are computed again.
                self._known |= json.loads(self._file.read_text())

    def of(self, path: Path) -> str:
        """Returns the digest of a file, in hex. Raises OSError."""
        found = path.stat()
        mark: list[str | int] = [found.st_size, found.st_ino, found.st_mtime_ns]
        known = self._known.get(str(path))
        if known is not None and known[1:] == mark:
            return str(known[0])
        computed = sha256()
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                computed.update(block)
                self.bytes_read += len(block)
        digest = computed.hexdigest()
        self._known[str(path)] = [digest, *mark]
        return digest

    def save(self) -> None:
        """Keeps all digests for other processes, which may save theirs at the same time. Raises OSError."""
        if self._file is not None:
            ours = self._known
            self.load()
            self._known |= ours
            written = self._file.with_suffix(f".{os.getpid()}")
            written.write_text(json.dumps(self._known))
            written.replace(self._file)


def tree_digest(files: Iterable[ListedFile]) -> str:
    """Returns the digest of names and contents, wherever the files are."""
    return sha256(json.dumps([[file.name, file.size, file.sha256] for file in files]).encode()).hexdigest()


def check_names(tree: FileTree) -> None:
    """Raises WireError for a name that leads out of its folder, and for what no file can have."""
    if "\0" in tree.path:
        raise WireError(f"{tree.path!r} is no path of a folder")
    for file in tree.files:
        path = PurePosixPath(file.name)
        if file.size < 0:
            raise WireError(f"{tree.path} lists {file.name!r} with {file.size} bytes")
        if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in file.name:
            raise WireError(f"{tree.path} lists a file {file.name!r}, which is not in that folder")

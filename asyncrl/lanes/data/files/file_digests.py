"""Digests of files, which are computed once for each file that does not change."""

import json
from collections.abc import Iterable
from contextlib import suppress
from hashlib import file_digest, sha256
from pathlib import Path, PurePosixPath

from asyncrl.errors import WireError
from asyncrl.protocols.join_messages import FileTree, ListedFile


class FileDigests:
    """Computes SHA-256, and remembers those of files whose size, inode and time of change stay. remembered_in: a file
    that keeps them for the next process; None: nothing does."""

    def __init__(self, remembered_in: Path | None = None) -> None:
        self._file = remembered_in
        self._known: dict[str, list[str | int]] = {}
        if remembered_in is not None and remembered_in.exists():
            with suppress(OSError, ValueError):  # They are computed again.
                self._known = json.loads(remembered_in.read_text())

    def of(self, path: Path) -> str:
        """Returns the digest of a file, in hex. Raises OSError."""
        found = path.stat()
        mark: list[str | int] = [found.st_size, found.st_ino, found.st_mtime_ns]
        known = self._known.get(str(path))
        if known is not None and known[1:] == mark:
            return str(known[0])
        with path.open("rb") as file:
            digest = file_digest(file, "sha256").hexdigest()
        self._known[str(path)] = [digest, *mark]
        return digest

    def save(self) -> None:
        if self._file is not None:
            self._file.write_text(json.dumps(self._known))


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

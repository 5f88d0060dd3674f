"""Messages about files that a host needs and does not see."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file of the controller. name: relative to its folder, with "/". sha256: of its content, in hex."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class FileTree:
    """Files of one folder of the controller. path: of the folder there. use: "folder" (workers read the folder),
    "files" (they read files by their paths), "module" (they import them by a name, so they have to be there), "run"
    (the run directory, where they write logs; the files tell whether it is the same) or "shared" (the run directory,
    where they write checkpoints, so it has to be there)."""

    path: str
    use: str
    files: tuple[ListedFile, ...]


@dataclass(frozen=True, slots=True)
class FilePart:
    """Bytes of a file from the offset that a host asked for."""

    data: bytes
    crc32: int

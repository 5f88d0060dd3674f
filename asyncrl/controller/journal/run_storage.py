"""Stores the bytes of a run, which are its journal and its checkpoints: in a run directory, or in memory.

A call that waits for the disk goes through `run` where an event loop must not wait: in a thread for a run directory,
inline for the store in memory.
"""

import asyncio
import fcntl
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedIOBase, BytesIO
from pathlib import Path
from typing import ParamSpec, Self, TypeAlias, TypeVar

from asyncrl.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


class CheckpointFolders:
    """Reads the checkpoints of a run directory, folders of files; needs no journal."""

    def __init__(self, run_dir: Path) -> None:
        self.checkpoints = run_dir / "checkpoints"

    def folders(self) -> list[str]:
        """Returns the names of the checkpoint folders, sorted."""
        return sorted(path.name for path in self.checkpoints.glob("*") if path.is_dir())

    def path(self, folder: str) -> str:
        """Returns the path of a folder, for other processes."""
        return str(self.checkpoints / folder)

    def open(self, folder: str, file: str) -> BufferedIOBase:
        return open(self.checkpoints / folder / file, "rb")


class FileStore(CheckpointFolders):
    """Stores the journal of one run, a growing row of bytes, and its checkpoints, in a run directory.

    writable: missing files are made. Otherwise FileNotFoundError is raised when there is no journal.
    """

    def __init__(self, run_dir: Path, *, writable: bool = True) -> None:
        super().__init__(run_dir)
        self.journal_path = str(run_dir.absolute() / "journal")
        if writable:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        how = os.O_RDWR | os.O_CREAT | os.O_APPEND if writable else os.O_RDONLY
        self._journal = os.open(run_dir / "journal", how | os.O_CLOEXEC, 0o644)
        if writable:
            _sync_directory(run_dir)  # Without it, a power cut may forget the names of what was just made.

    def close(self) -> None:
        os.close(self._journal)

    @property
    def size(self) -> int:
        return os.fstat(self._journal).st_size

    async def run(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs work on the disk in a thread of its own. A caller that is cancelled waits for its end, so that nothing
        is renamed or removed any more once the run has let go of its lock."""
        running = asyncio.create_task(asyncio.to_thread(work, *args, **kwargs), name="write to the disk")
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise

    def append(self, data: bytes) -> None:
        """Appends to the journal; the bytes survive the death of this process. Takes back what a full disk took."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._journal, view) :]
        except OSError:
            self.truncate(self.size - len(data) + len(view))
            raise

    def sync(self) -> None:
        """Makes what was appended survive a power cut."""
        os.fdatasync(self._journal)

    def contents(self) -> memoryview:
        """Returns the bytes of the journal, mapped: they take no memory of their own, and are read when looked at."""
        size = self.size
        return memoryview(mmap.mmap(self._journal, size, access=mmap.ACCESS_READ) if size else b"")

    def truncate(self, size: int) -> None:
        os.ftruncate(self._journal, size)

    def create(self, folder: str) -> None:
        """Makes an empty folder, in place of one with this name."""
        self.remove(folder)
        (self.checkpoints / folder).mkdir()

    def put(self, folder: str, file: str, data: bytes) -> None:
        """Writes a file of a folder; it survives a power cut once the folder was renamed."""
        with open(self.checkpoints / folder / file, "wb") as target:
            target.write(data)
            target.flush()
            os.fsync(target.fileno())

    def rename(self, folder: str, name: str) -> None:
        """Renames a folder atomically: after a power cut the whole folder has the name, or no folder has it."""
        for path, _, _ in os.walk(self.checkpoints / folder):
            _sync_directory(Path(path))
        os.rename(self.checkpoints / folder, self.checkpoints / name)
        _sync_directory(self.checkpoints)

    def remove(self, folder: str) -> None:
        path = self.checkpoints / folder
        if path.exists():
            shutil.rmtree(path)


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Holds `run.lock`, so that one process works in a run directory. Raises ConfigError when another process does."""
    run_dir.mkdir(0o700, parents=True, exist_ok=True)
    with open(run_dir / "run.lock", "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise ConfigError(
                f"{run_dir} is in use by process {holder}; wait for it, end it, or choose another --run-dir"
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


class MemoryStore:
    """Does in memory what FileStore does; after `freeze`, which simulates the death of the process, writes vanish."""

    journal_path = "journal"

    def __init__(self) -> None:
        self._journal = bytearray()
        self.synced = 0
        self._frozen = False
        self._folders: dict[str, dict[str, bytes]] = {}

    def freeze(self) -> None:
        self._frozen = True

    def after_death(self) -> Self:
        """Returns the store that the next process finds after a kill: all that was written."""
        return self.after_power_cut(len(self._journal))

    def after_power_cut(self, kept: int = 0, tail: bytes = b"") -> Self:
        """Returns the store with the journal up to its last sync, at least `kept` bytes, then a torn `tail`."""
        found = type(self)()
        found._journal = self._journal[: max(self.synced, kept)] + tail
        found.synced = len(found._journal)
        found._folders = {name: dict(files) for name, files in self._folders.items()}
        return found

    async def run(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return work(*args, **kwargs)

    @property
    def size(self) -> int:
        return len(self._journal)

    def append(self, data: bytes) -> None:
        if not self._frozen:
            self._journal += data

    def sync(self) -> None:
        if not self._frozen:
            self.synced = len(self._journal)

    def contents(self) -> memoryview:
        return memoryview(bytes(self._journal))

    def truncate(self, size: int) -> None:
        if not self._frozen:
            del self._journal[size:]
            self.synced = min(self.synced, size)

    def folders(self) -> list[str]:
        return sorted(self._folders)

    def path(self, folder: str) -> str:
        return folder

    def create(self, folder: str) -> None:
        if not self._frozen:
            self._folders[folder] = {}

    def put(self, folder: str, file: str, data: bytes) -> None:
        if not self._frozen:
            self._folders[folder][file] = data

    def open(self, folder: str, file: str) -> BufferedIOBase:
        if file not in self._folders.get(folder, {}):
            raise FileNotFoundError(f"{folder}/{file}")
        return BytesIO(self._folders[folder][file])

    def rename(self, folder: str, name: str) -> None:
        if not self._frozen:
            self._folders[name] = self._folders.pop(folder)

    def remove(self, folder: str) -> None:
        if not self._frozen:
            self._folders.pop(folder, None)


Store: TypeAlias = FileStore | MemoryStore
Folders: TypeAlias = CheckpointFolders | MemoryStore

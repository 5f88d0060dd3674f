"""Blocks of memory: files on /dev/shm that one process makes and others map, or memory of one process alone.

multiprocessing.shared_memory would not do: its resource tracker unlinks what other processes still use
(python/cpython#82300).
"""

import fcntl
import mmap
import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ArenaFull

SHARED_MEMORY = Path("/dev/shm")
SHARED_SCHEME = "shm://"
"""Begins the address of a segment, before its name."""

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE: maps pages for writing at once, since Linux 5.14; else each is mapped at its first write, which
costs five times a copy."""

_NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux: addresses of private memory take no memory before they are written."""

TWO_THREAD_BYTES = 8 * 2**20
"""Size from which copying in two threads pays: less is copied faster than another thread wakes up."""

COPY_DEADLINE = 60.0
"""Seconds for one half, which takes milliseconds."""

JUST_MADE = 10.0
"""Seconds in which a segment may not be locked yet."""

_copier = ThreadPoolExecutor(1, thread_name_prefix="copier")
"""Starts its thread at its first use."""

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def segment_name(run: str, incarnation: int, instance: str, kind: str) -> str:
    """Returns `asyncrl-<run>-<incarnation>-<instance>.<kind>`, by which it is unlinked when its owner is gone."""
    assert run.isalnum(), f"a run is named by letters and digits, not {run!r}"
    return _checked(f"asyncrl-{run}-{incarnation}-{instance}.{kind}")


def _checked(name: str) -> str:
    if not _PLAIN.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a shared memory segment")
    return name


class Segment:
    """Mapped memory: the file at `path`, or, without a path, memory of this process alone.

    size: bytes that can be addressed. allocated: bytes of them that exist and may be touched; only the process that
    made the segment can `grow` it. It goes with its last view, even if it is not closed.
    """

    def __init__(
        self, path: Path | None, mapped: mmap.mmap, descriptor: int = -1, allocated: int | None = None
    ) -> None:
        self.path = path
        self.size = len(mapped)
        self.allocated = self.size if allocated is None else allocated
        self._map = mapped
        self._descriptor = descriptor

    @classmethod
    def private(cls, size: int) -> Self:
        """Makes memory of this process alone: the twin of a file. Pages are allocated when they are first written."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        return cls(None, mmap.mmap(-1, size, flags), allocated=size)

    @classmethod
    def create(cls, name: str, size: int, directory: Path = SHARED_MEMORY, *, allocated: int | None = None) -> Self:
        """Makes a segment of `size` bytes, readable by this user only, writable here. The first `allocated` bytes, all
        by default, are allocated now, because a lack of memory later is a SIGBUS; `grow` allocates more. Raises
        ArenaFull when there is too little, FileExistsError when the name exists."""
        path = directory / _checked(name)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with ExitStack() as undo:
            undo.callback(path.unlink)
            undo.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # As long as a process lives that has the descriptor.
            # All addresses are mapped now, and the file ends at what is allocated: nothing moves when it grows.
            try:
                os.ftruncate(descriptor, size)
                segment = cls(path, mmap.mmap(descriptor, size), descriptor, allocated=0)
                os.ftruncate(descriptor, 0)
            except OSError as error:
                raise _too_little(directory, size, error) from error
            segment.grow(size if allocated is None else allocated)
            undo.pop_all()
        return segment

    def grow(self, end: int) -> None:
        """Allocates the bytes up to `end`. Raises ArenaFull when there is too little memory; then all is as before."""
        assert end <= self.size
        if self.path is None or end <= self.allocated:
            return
        start = self.allocated
        try:
            os.posix_fallocate(self._descriptor, start, end - start)
        except OSError as error:
            os.ftruncate(self._descriptor, start)
            raise _too_little(self.path.parent, end - start, error) from error
        self.allocated = end
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        with suppress(OSError, ValueError):
            self._map.madvise(_POPULATE_WRITE, first, end - first)

    @classmethod
    def open(cls, name: str, *, directory: Path = SHARED_MEMORY) -> Self:
        """Maps the segment of another process, read-only. Raises FileNotFoundError when it is gone."""
        path = directory / _checked(name)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return cls(path, mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ))
        finally:
            os.close(descriptor)

    def remapped(self) -> "Segment":
        """Maps the same file again, as long as it is now. Raises FileNotFoundError when it is gone."""
        assert self.path is not None, "memory of this process does not grow"
        return Segment.open(self.path.name, directory=self.path.parent)

    @property
    def unlinked(self) -> bool:
        """Returns whether its name is gone: the owner has closed it, or died and was cleaned up."""
        return self.path is not None and not self.path.exists()

    @property
    def buffer(self) -> memoryview:
        return memoryview(self._map)

    def close(self) -> None:
        """Unmaps the file; memory with views, and memory of this process alone, goes with its last view."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self.path is not None:
            with suppress(BufferError):
                self._map.close()

    def unlink(self) -> None:
        """Removes the name; processes that have it mapped keep the memory."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _too_little(directory: Path, size: int, error: OSError) -> ArenaFull:
    free = shutil.disk_usage(directory).free
    return ArenaFull(
        f"{directory} has no room for {size / 2**20:.1f} MB more ({free / 2**20:.1f} MB are free): {error.strerror}. "
        "In docker, give it more with --shm-size"
    )


def copy_in_two_threads(target: NDArray[Any], source: NDArray[Any]) -> None:
    """Copies a long one-dimensional array, half of it in another thread, as one core cannot use all bandwidth."""
    half = len(source) // 2
    other = _copier.submit(np.copyto, target[:half], source[:half])
    try:
        np.copyto(target[half:], source[half:])
    finally:
        other.result(COPY_DEADLINE)


def unlink_segment(name: str, directory: Path = SHARED_MEMORY) -> None:
    """Unlinks the segment of a dead process, if there is one."""
    (directory / _checked(name)).unlink(missing_ok=True)


def unlink_run_segments(run: str, directory: Path = SHARED_MEMORY) -> list[str]:
    """Unlinks the segments of this start of a run; returns their names."""
    return _unlink(directory, re.compile(rf"asyncrl-{re.escape(run)}-\d+-.*"))


def unlink_instance_segments(run: str, incarnation: int, instance: str, directory: Path = SHARED_MEMORY) -> list[str]:
    """Unlinks the segments of a dead worker; returns their names."""
    return _unlink(directory, re.compile(rf"asyncrl-{re.escape(run)}-{incarnation}-{re.escape(instance)}\.[^.]*"))


def abandoned_segments(directory: Path = SHARED_MEMORY) -> dict[Path, int]:
    """Returns the segments of which the makers are dead, with the bytes that each takes: of a run whose processes were
    all killed at once. A segment that a process of this machine has mapped is none, nor is one that was just made."""
    found = {path: size for path in sorted(directory.glob("asyncrl-*")) if (size := _bytes_without_owner(path)) > 0}
    if not found:
        return {}
    mapped = set[str]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped.update(line.split()[-1] for line in maps.read_text().splitlines() if "asyncrl-" in line)
    return {path: size for path, size in found.items() if str(path) not in mapped}


def _bytes_without_owner(path: Path) -> int:
    """Returns the bytes of a segment that no process holds locked; 0 for any other one, and one of another user."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            state = os.fstat(descriptor)
            return 512 * state.st_blocks if time.time() - state.st_mtime > JUST_MADE else 0
        finally:
            os.close(descriptor)
    return 0


def unlink_abandoned(directory: Path = SHARED_MEMORY) -> int:
    """Unlinks all segments of which the makers are dead; returns the bytes that this frees."""
    found = abandoned_segments(directory)
    for path in found:
        path.unlink(missing_ok=True)
    return sum(found.values())


def _unlink(directory: Path, pattern: re.Pattern[str]) -> list[str]:
    found = [path for path in sorted(directory.glob("asyncrl-*")) if pattern.fullmatch(path.name)]
    for path in found:
        path.unlink(missing_ok=True)
    return [path.name for path in found]

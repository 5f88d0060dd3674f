"""Blocks of memory: files on /dev/shm that one process makes and others map, or memory of one process alone.

multiprocessing.shared_memory would not do: its resource tracker unlinks what other processes still use
(python/cpython#82300).
"""

import mmap
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ArenaFull

SHARED_MEMORY = Path("/dev/shm")
SHARED_SCHEME = "shm://"
"""Begins the address of a segment, before its name."""

_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
"""The owner maps all pages at once where the kernel can; else the first write of a page costs five times a copy."""

TWO_THREAD_BYTES = 8 * 2**20
"""Size from which copying in two threads pays: less is copied faster than another thread wakes up."""

COPY_DEADLINE = 60.0
"""Seconds for one half, which takes milliseconds."""

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
    """Mapped memory of fixed size: the file at `path`, or, without a path, memory of this process alone."""

    def __init__(self, path: Path | None, descriptor: int, size: int, writable: bool) -> None:
        self.path = path
        self.size = size
        self._descriptor = descriptor
        flags = mmap.MAP_SHARED | (_POPULATE if writable and path else 0)
        self._map = mmap.mmap(descriptor, size, flags, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))

    @classmethod
    def private(cls, size: int) -> Self:
        """Makes memory of this process alone: the twin of a file. Pages are allocated when they are first written."""
        return cls(None, -1, size, writable=True)

    @classmethod
    def create(cls, name: str, size: int, directory: Path = SHARED_MEMORY) -> Self:
        """Makes a segment of `size` bytes, readable by this user only, writable here. All its memory is allocated at
        once, because a lack of memory later is a SIGBUS. Raises ArenaFull when there is too little, FileExistsError
        when the name exists."""
        path = directory / _checked(name)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            return cls(path, descriptor, size, writable=True)
        except OSError as error:
            os.close(descriptor)
            path.unlink()
            free = shutil.disk_usage(directory).free
            raise ArenaFull(
                f"{directory} has no room for {size / 2**20:.1f} MB ({free / 2**20:.1f} MB are free): "
                f"{error.strerror}. In docker, give it more with --shm-size"
            ) from error

    @classmethod
    def open(cls, name: str, *, directory: Path = SHARED_MEMORY) -> Self:
        """Maps the segment of another process, read-only. Raises FileNotFoundError when it is gone."""
        path = directory / _checked(name)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return cls(path, descriptor, os.fstat(descriptor).st_size, writable=False)
        except (OSError, ValueError):
            os.close(descriptor)
            raise

    @property
    def unlinked(self) -> bool:
        """Returns whether its name is gone: the owner has closed it, or died and was cleaned up."""
        return os.fstat(self._descriptor).st_nlink == 0

    @property
    def buffer(self) -> memoryview:
        return memoryview(self._map)

    def close(self) -> None:
        """Unmaps the file; memory with views, and memory of this process alone, goes with its last view."""
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        with suppress(BufferError):
            self._map.close()

    def unlink(self) -> None:
        """Removes the name; processes that have it mapped keep the memory."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def copy_in_two_threads(target: NDArray[Any], source: NDArray[Any]) -> None:
    """Copies a long one-dimensional array, half of it in another thread, as one core cannot use all bandwidth."""
    half = len(source) // 2
    other = _copier.submit(np.copyto, target[:half], source[:half])
    try:
        np.copyto(target[half:], source[half:])
    finally:
        other.result(COPY_DEADLINE)


def unlink_run_segments(run: str, directory: Path = SHARED_MEMORY) -> list[str]:
    """Unlinks the segments of this start of a run; returns their names."""
    return _unlink(directory, re.compile(rf"asyncrl-{re.escape(run)}-\d+-.*"))


def unlink_instance_segments(run: str, incarnation: int, instance: str, directory: Path = SHARED_MEMORY) -> list[str]:
    """Unlinks the segments of a dead worker; returns their names."""
    return _unlink(directory, re.compile(rf"asyncrl-{re.escape(run)}-{incarnation}-{re.escape(instance)}\.[^.]*"))


def _unlink(directory: Path, pattern: re.Pattern[str]) -> list[str]:
    found = [path for path in sorted(directory.glob("asyncrl-*")) if pattern.fullmatch(path.name)]
    for path in found:
        path.unlink(missing_ok=True)
    return [path.name for path in found]

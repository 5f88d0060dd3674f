"""A host's end of files: finds those that are there already, and copies the others into a folder by digest.

CACHE/DIGEST/        a folder of the controller, whole, by the digest of its names and contents
CACHE/DIGEST.part/   one that is being copied; what it has is kept when the copy is cut off
CACHE/DIGEST.lock    held by the process that looks whether this host has it, and copies it
CACHE/runs/DIGEST/   logs of workers of a run whose directory is not seen here
CACHE/digests.json   digests of files that have not changed
"""

import asyncio
import fcntl
import os
import shutil
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from asyncrl.concurrency import gather
from asyncrl.errors import ConfigError, DeadlineExceeded, WireError
from asyncrl.lanes.data.files.file_digests import FileDigests, check_names, tree_digest
from asyncrl.lanes.data.files.file_server import PART_BYTES
from asyncrl.protocols.join_messages import FilePart, FileTree, ListedFile

FetchPart = Callable[[str, int], Awaitable[FilePart]]
"""Returns the bytes of a file, given its digest, at an offset."""

WINDOW = 4
"""Parts that are asked for at one time, which hide the round trip and bound the memory."""
TRIES = 3
"""Times that a part may come damaged, and a file with another digest."""
LOCK_RETRY = 0.2
"""Seconds between two looks at a folder that another process has."""
SPARE_BYTES = 64 << 20
"""Bytes that have to stay free where files are copied to."""


class FileCache:
    """Files of controllers on this host. folder: where copies are kept. say: takes what a person should read. run: for
    the logs of workers of a run whose directory is not seen here; None: below `folder`."""

    def __init__(self, folder: Path, say: Callable[[str], None], run: Path | None = None) -> None:
        self.folder = folder
        self._say = say
        self._run = run
        self._digests = FileDigests(folder / "digests.json")
        self._copied_bytes = 0

    @property
    def progress(self) -> int:
        """Returns the bytes that were read and copied so far."""
        return self._digests.bytes_read + self._copied_bytes

    async def bring(self, trees: Sequence[FileTree], fetch: FetchPart) -> dict[str, str]:
        """Returns where this host has the files, by their paths at the controller; copies what it does not see.

        Raises ConfigError when they cannot be kept here, or a module is not there; WireError when they come damaged;
        and what `fetch` raises: the next call goes on where this one was.
        """
        places: dict[str, str] = {}
        if not trees:
            return places
        for tree in trees:
            check_names(tree)
            try:
                place = await self._shared_place(tree, fetch)
            except DeadlineExceeded:
                raise  # It is an OSError, too, and says nothing about this host's disk.
            except OSError as error:
                raise ConfigError(
                    f"the files of {tree.path} cannot be kept in {self.folder}: {error.strerror or error}. Make room "
                    "there, or name another folder with --cache"
                ) from error
            if tree.use == "files":
                places |= {f"{tree.path}/{file.name}": str(place / file.name) for file in tree.files}
            else:
                places[tree.path] = str(place)
        return places

    async def _shared_place(self, tree: FileTree, fetch: FetchPart) -> Path:
        """Returns the place of a tree. Of the processes of this host one looks at its files, or copies them, and the
        others take what it found."""
        digest = tree_digest(tree.files)
        try:
            lock = await asyncio.to_thread(_opened, self.folder / f"{digest}.lock")
        except OSError:  # Files that are seen need no cache; without one each process computes their digests.
            return await self._place(tree, fetch)
        with lock:
            while True:  # The kernel unlocks it when its process dies, and notifies nobody without blocking a thread.
                if _has_locked(lock):
                    break
                await asyncio.sleep(LOCK_RETRY)
            await asyncio.to_thread(self._digests.load)
            place = await self._place(tree, fetch)
            with suppress(OSError):
                await asyncio.to_thread(self._digests.save)
            return place

    async def _place(self, tree: FileTree, fetch: FetchPart) -> Path:
        seen = await asyncio.to_thread(self._holds, Path(tree.path), tree)
        if seen and (tree.use not in ("run", "shared") or os.access(Path(tree.path, "logs"), os.W_OK)):
            return Path(tree.path)
        if tree.use == "shared":
            lacks = "cannot write into" if seen else "does not see"
            raise ConfigError(
                f"this host {lacks} {tree.path}, the run directory, where the worker keeps checkpoints. Mount that "
                "folder here under the same path, or let this service stay with the controller"
            )
        if tree.use == "module":
            names = ", ".join(file.name for file in tree.files)
            raise ConfigError(
                f"this host does not see {names} in {tree.path} as the controller does. Share that folder, or name the "
                "code by its file (FILE.py:NAME) instead of its module, so that it is copied"
            )
        if tree.use == "run":
            return await asyncio.to_thread(self._run_folder, tree)
        return await self._copied(self.folder / tree_digest(tree.files), tree, fetch)

    def _run_folder(self, tree: FileTree) -> Path:
        folder = self._run or self.folder / "runs" / tree_digest(tree.files)[:16]
        folder.mkdir(0o700, parents=True, exist_ok=True)
        (folder / "logs").mkdir(exist_ok=True)
        self._say(f"logs of workers are kept here, in {folder / 'logs'}: {tree.path} is not seen or written")
        return folder

    def _holds(self, folder: Path, tree: FileTree) -> bool:
        """Returns whether a folder has all files with these contents."""
        try:
            return all(self._is(folder / file.name, file) for file in tree.files)
        except OSError:
            return False

    def _is(self, path: Path, file: ListedFile) -> bool:
        return path.is_file() and path.stat().st_size == file.size and self._digests.of(path) == file.sha256

    async def _copied(self, folder: Path, tree: FileTree, fetch: FetchPart) -> Path:
        """Returns the folder with a copy, which is whole."""
        partial = folder.with_suffix(".part")
        if await asyncio.to_thread(self._begin_copy, folder, partial, tree):
            return folder
        for file in tree.files:
            await self._copy_file(partial / file.name, file, fetch)
        await asyncio.to_thread(partial.rename, folder)
        size = sum(file.size for file in tree.files)
        self._say(f"copied {len(tree.files)} files of {tree.path} ({size / 1e6:,.1f} MB) into {folder}")
        return folder

    def _begin_copy(self, folder: Path, partial: Path, tree: FileTree) -> bool:
        """Returns whether the folder is whole; else what is intact in it is in `partial`, and there is room."""
        if self._holds(folder, tree):
            return True
        if folder.exists():  # It was damaged.
            shutil.rmtree(partial, ignore_errors=True)
            folder.rename(partial)
        partial.mkdir(exist_ok=True)
        had = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
        needed = sum(file.size for file in tree.files) - had + SPARE_BYTES
        if (free := shutil.disk_usage(partial).free) < needed:
            raise ConfigError(
                f"the files of {tree.path} need {needed / 1e6:,.0f} MB in {self.folder}, where {free / 1e6:,.0f} MB "
                "are free. Make room there, or name another folder with --cache"
            )
        return False

    async def _copy_file(self, path: Path, file: ListedFile, fetch: FetchPart) -> None:
        """Copies a file, or the rest of one. What does not have the right digest in the end is copied again."""
        for _ in range(TRIES):
            at = await asyncio.to_thread(_size_kept, path, file)
            while at < file.size:
                offsets = range(at, min(at + WINDOW * PART_BYTES, file.size), PART_BYTES)
                parts = await gather(*(_intact_part(file, offset, fetch) for offset in offsets))
                at += await asyncio.to_thread(_append, path, parts)
                self._copied_bytes += sum(map(len, parts))
            if await asyncio.to_thread(self._is_or_removed, path, file):
                return
        raise WireError(f"{file.name} came {TRIES} times with another digest than the controller listed")

    def _is_or_removed(self, path: Path, file: ListedFile) -> bool:
        if self._is(path, file):
            return True
        path.unlink()
        return False


def _opened(path: Path) -> IO[str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("w")


def _has_locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _size_kept(path: Path, file: ListedFile) -> int:
    """Returns how much of a file an earlier copy has left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as kept:
        if kept.tell() > file.size:
            kept.truncate(0)
        return path.stat().st_size


def _append(path: Path, parts: Iterable[bytes]) -> int:
    with path.open("ab") as file:
        return sum(map(file.write, parts))


async def _intact_part(file: ListedFile, offset: int, fetch: FetchPart) -> bytes:
    for _ in range(TRIES):
        part = await fetch(file.sha256, offset)
        is_whole = len(part.data) == min(PART_BYTES, file.size - offset)
        if is_whole and zlib.crc32(part.data) == part.crc32:
            return part.data
    raise WireError(f"a part of {file.name} at {offset} came damaged {TRIES} times")


def relocated(value: object, places: Mapping[str, str]) -> object:
    """Returns a JSON value in which all paths are those of this host. places: its paths by those of the controller, of
    which the longest that fits counts."""
    if isinstance(value, dict):
        return {name: relocated(each, places) for name, each in value.items()}
    if isinstance(value, list):
        return [relocated(each, places) for each in value]
    return _relocated_text(value, places) if isinstance(value, str) else value


def _relocated_text(text: str, places: Mapping[str, str]) -> str:
    origin = next((each for each in ("trl:", "verl:") if text.startswith(each)), "")
    path = text.removeprefix(origin)
    fitting = [each for each in places if path == each or path.startswith((f"{each}/", f"{each}:"))]
    if not fitting:
        return text
    longest = max(fitting, key=len)
    return f"{origin}{places[longest]}{path.removeprefix(longest)}"

"""Files of a run on the hosts of its workers.

FileServer     the controller's end: lists files and sends parts of them
FileDigests    digests of files, which are computed once
FileCache      a host's end: copies what is not there into a folder by digest
"""

import asyncio
import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import IO

from asyncrl.concurrency import gather
from asyncrl.errors import ConfigError, DeadlineExceeded, Refused, WireError
from asyncrl.protocols.messages import FilePart, FileTree, ListedFile

# The controller's end of files: lists those that workers of a service read, and sends parts of them.
#
# host                                   FileServer
# trees ───────────────────────────────> digests of the files as they are now
# part(sha256, offset) ────────────────> at most PART_BYTES, with a checksum


PART_BYTES = 1 << 20
"""Bytes of one part: 0.8 s at 10 Mbit/s, and a thousandth of a second on the controller."""


@dataclass(frozen=True, slots=True)
class OfferedFiles:
    """Files of one folder that workers read. use: as in FileTree. names: relative to the folder; none: all below it,
    without those that end in one of `left_out`."""

    folder: Path
    use: str
    names: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def present(self) -> Iterator[str]:
        """Yields the names of those files that exist."""
        if self.names:
            yield from (name for name in self.names if (self.folder / name).is_file())
            return
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and not path.name.endswith(self.left_out):
                yield path.relative_to(self.folder).as_posix()


class FileServer:
    """Serves the files of each service to hosts that joined for it. offered: by service."""

    def __init__(self, offered: Mapping[str, Sequence[OfferedFiles]]) -> None:
        self._offered = offered
        self._digests = FileDigests()
        self._paths: dict[tuple[str, str], Path] = {}
        self._computing = asyncio.Lock()

    async def trees(self, service: str) -> list[FileTree]:
        """Returns what workers of a service read, as it is now."""
        if not (offered := self._offered.get(service)):
            return []
        async with self._computing:  # Hosts that join at one time have the digests computed once.
            return await asyncio.to_thread(self._trees, service, offered)

    def _trees(self, service: str, offered: Sequence[OfferedFiles]) -> list[FileTree]:
        trees = []
        for each in offered:
            files = []
            for name in each.present():
                path = each.folder / name
                digest = self._digests.of(path)
                self._paths[service, digest] = path
                files.append(ListedFile(name, path.stat().st_size, digest))
            if files:
                trees.append(FileTree(str(each.folder), each.use, tuple(files)))
        return trees

    async def part(self, service: str, digest: str, offset: int) -> FilePart:
        """Returns the bytes at an offset of a file. Raises Refused for a file that is not offered, or has changed."""
        path = self._paths.get((service, digest))
        if path is None or offset < 0:
            raise Refused(f"no file {digest[:12]} is offered to {service} workers")
        return await asyncio.to_thread(self._read, path, digest, offset)

    def _read(self, path: Path, digest: str, offset: int) -> FilePart:
        try:
            if self._digests.of(path) != digest:
                raise Refused(f"{path} has changed since this host asked for the list of files")
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read(PART_BYTES)
        except OSError as error:
            raise Refused(f"{path} cannot be read any more: {error.strerror}") from error
        return FilePart(data, zlib.crc32(data))


# Digests of files, which are computed once for each file that does not change.


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


# A host's end of files: finds those that are there already, and copies the others into a folder by digest.
#
# CACHE/DIGEST/        a folder of the controller, whole, by the digest of its names and contents
# CACHE/DIGEST.part/   one that is being copied; what it has is kept when the copy is cut off
# CACHE/DIGEST.lock    held by the process that looks whether this host has it, and copies it
# CACHE/runs/DIGEST/   logs of workers of a run whose directory is not seen here
# CACHE/digests.json   digests of files that have not changed


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


class NoRoom(ConfigError):
    """Reports that the disk of the cache is full now."""


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
            raise NoRoom(
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

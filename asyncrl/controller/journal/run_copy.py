"""A copy of a run in a store of objects: parts of files by their SHA-256, and a head that names them.

    upload: parts that the store lacks, WAYS at a time ──> head, if it is still that one: the commit
    download: head ──> parts that the folder lacks, each compared with its digest ──> the folder, renamed when whole

What the head does not name does not exist: a machine that dies between parts and head leaves the run of the head
before, and parts that the next upload takes as sent, or removes. Uploads copies the run after each checkpoint, beside
the run.
"""

import asyncio
import json
import os
import re
import secrets
import shutil
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from asyncrl.concurrency import running_beside
from asyncrl.config.install_hints import install_extra, program
from asyncrl.controller.journal.run_storage import run_lock
from asyncrl.errors import ConfigError, FleetFailed, JournalError

# ---- the store: bytes by name, and one head that is exchanged atomically -------------------------------------------


PARTS = "objects/"
"""Prefix of the names of all objects but the head."""
WAYS = 32
"""Parts under way at a time, each on a thread: at 60 ms a request they move 2.2 GB/s, and take 128 MiB of memory."""


class OtherWriter(ConfigError):
    """The head was written by somebody else since it was read."""


ADDRESS = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/(\S*[^/\s])/?")
CONNECT_SECONDS = 10
READ_SECONDS = 60
TRIES = 3
"""Without a byte that moves."""
REFUSED = ("PreconditionFailed", "ConditionalRequestConflict")
"""Codes with which S3 answers a put whose condition does not hold."""
HEAD = "head.json"
REMOVED_AT_ONCE = 1000
"""Names that S3 takes in one request to delete objects."""


class S3Objects:
    """Objects in a bucket of S3, or of a server that speaks its protocol and keeps its conditions (extra `s3`), below
    an address s3://BUCKET/PATH. Keys, region and endpoint come from where every AWS client takes them:
    AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL and so on, or ~/.aws.

    Every method waits for the store for a bounded time, and raises OSError when it cannot be reached. Several threads
    may call them at a time. blocks: grows while bytes of a put move, however long the whole of it takes.
    """

    def __init__(self, address: str) -> None:
        """Raises ConfigError for a wrong address, and where the extra is missing."""
        if (found := ADDRESS.fullmatch(address)) is None:
            raise ConfigError(f"--run-dir: {address} is no address of a run; write s3://BUCKET/PATH")
        try:
            from botocore.config import Config
            from botocore.handlers import add_expect_header
            from botocore.session import get_session
        except ImportError as missing:
            raise ConfigError(f"--run-dir: {address} needs botocore; run: {install_extra('s3')}") from missing
        self.address = address.rstrip("/")
        self.blocks = 0
        self._bucket = found[1]
        self._path = found[2]
        limits = {"connect_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS, "retries": {"max_attempts": TRIES}}
        # The signature of a put holds its SHA-256, and the name of a part too: no further sums.
        sums = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
        with self._translated():
            self._client = get_session().create_client("s3", config=Config(max_pool_connections=WAYS, **limits, **sums))
        # It would ask before each put whether the store takes it: a round trip for each part.
        self._client.meta.events.unregister("before-call.s3", add_expect_header)

    def check(self) -> None:
        """Raises ConfigError when the bucket cannot be written, or does not keep the condition of a put: then two runs
        could overwrite each other."""
        name = f"probe-{secrets.token_hex(8)}"
        try:
            self._put(name, b"1", IfNoneMatch="*")
        except OSError as error:
            raise ConfigError(
                f"--run-dir: {self.address} cannot be written: {error}. Look at the name of the bucket, "
                "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_DEFAULT_REGION and AWS_ENDPOINT_URL"
            ) from error
        try:
            self._put(name, b"2", IfNoneMatch="*")
        except OtherWriter:
            return
        finally:
            self.remove([name])
        raise ConfigError(
            f"--run-dir: {self.address} overwrites an object that a put with If-None-Match must not: two runs could "
            "destroy each other there. Take a store that keeps conditions, or a folder"
        )

    def put(self, name: str, data: bytes) -> None:
        self._put(name, data)

    def get(self, name: str) -> bytes:
        """Raises FileNotFoundError."""
        return self._get(name)[0]

    def remove(self, names: list[str]) -> None:
        for first in range(0, len(names), REMOVED_AT_ONCE):
            keys = [{"Key": f"{self._path}/{name}"} for name in names[first : first + REMOVED_AT_ONCE]]
            with self._translated():
                answer = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": keys, "Quiet": True})
            if failed := answer.get("Errors"):
                raise OSError(f"{self.address} did not remove {len(failed)} objects: {failed[0].get('Message')}")

    def names(self) -> set[str]:
        """Returns the names of all objects that begin with PARTS."""
        pages = self._client.get_paginator("list_objects_v2")
        with self._translated():
            listed = pages.paginate(Bucket=self._bucket, Prefix=f"{self._path}/{PARTS}").search("Contents[].Key")
            return {key.removeprefix(f"{self._path}/") for key in listed if key is not None}

    def read_head(self) -> tuple[bytes, str] | None:
        """Returns the head and its tag; None where there is none."""
        try:
            return self._get(HEAD)
        except FileNotFoundError:
            return None

    def write_head(self, data: bytes, after: str) -> str:
        """Writes the head if its tag is still `after` ("": there is none), and returns the new tag. Raises OtherWriter
        when it is not."""
        condition = {"IfMatch": after} if after else {"IfNoneMatch": "*"}
        try:
            return self._put(HEAD, data, **condition)
        except OtherWriter:
            if (found := self.read_head()) is not None and found[0] == data:
                return found[1]  # The reply to our put was lost, and it was sent again.
            raise

    def _put(self, name: str, data: bytes, **condition: str) -> str:
        body = _Blocks(data, self)
        key = f"{self._path}/{name}"
        with self._translated():
            return str(self._client.put_object(Bucket=self._bucket, Key=key, Body=body, **condition)["ETag"])

    def _get(self, name: str) -> tuple[bytes, str]:
        """Returns an object and its tag. What breaks off in the middle is fetched again, which the client does not."""
        from botocore.exceptions import HTTPClientError, IncompleteReadError

        for left in reversed(range(TRIES)):
            with self._translated():
                answer = self._client.get_object(Bucket=self._bucket, Key=f"{self._path}/{name}")
                try:
                    return answer["Body"].read(), str(answer["ETag"])
                except (HTTPClientError, IncompleteReadError):
                    if not left:
                        raise
        raise AssertionError("the last try returns or raises")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code")
            if code in REFUSED:
                raise OtherWriter(
                    f"{self.address} was written by another run since this one read it: end that one, and go on with "
                    f"`{program()} run --run-dir {self.address}`"
                ) from error
            raise (FileNotFoundError if code == "NoSuchKey" else OSError)(str(error)) from error
        except BotoCoreError as error:
            raise OSError(str(error)) from error


class _Blocks(BytesIO):
    """The bytes of a put, which the client reads by blocks: each must move within CONNECT_SECONDS, not all of them."""

    def __init__(self, data: bytes, objects: S3Objects) -> None:
        super().__init__(data)
        self._objects = objects

    def read(self, size: int | None = -1) -> bytes:
        self._objects.blocks += 1
        return super().read(size)


# ---- a run as the store has it -----------------------------------------------------------------------------------


FORMAT = 1
PART_BYTES = 4 << 20
"""Bytes of a part. A file that grows, such as the journal, is sent again from its last part on."""
GROWING = ("journal", "metrics.jsonl", "samples.jsonl", "evaluations.jsonl", "ratings.jsonl")
FIXED = ("config.toml", "run.id", "scaled.json", "hub.json")
FOLDERS = ("model", "sources")
"""Files that a resume needs besides a checkpoint, or that people look at. Keys and logs stay where they are."""
MARK = "copied.json"
"""File of a run directory that names who wrote the heads that came from it."""
STAGED = "copying"


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """size: bytes. parts: SHA-256 of each part, in order."""

    size: int
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Head:
    """Names a run as of a checkpoint. writer: a name of the process that wrote it, which no other has."""

    version: int
    writer: str
    files: Mapping[str, CopiedFile] = field(default_factory=dict)

    def encode(self) -> bytes:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes, address: str) -> "Head":
        """Raises JournalError for what is no head, or names files outside a run directory."""
        try:
            given = json.loads(data)
            if given["format"] != FORMAT:
                raise ValueError(f"it has format {given['format']!r}, and this asyncrl reads {FORMAT}")
            head = cls(int(given["version"]), str(given["writer"]), dict(_files(given["files"])))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise JournalError(f"{address} holds no copy of a run that this asyncrl reads: {error!r:.200}") from error
        for path in head.files:
            if not _is_inside(path):
                raise JournalError(f"{address} names {path!r:.200}, which is no file in a run directory")
        return head

    @property
    def parts(self) -> set[str]:
        return {part for copied in self.files.values() for part in copied.parts}


def _is_inside(path: str) -> bool:
    """Returns whether it is a relative path, written as pathlib writes it, that leads to no folder above."""
    pure = PurePosixPath(path)
    is_plain = pure.as_posix() == path != "." and "\0" not in path
    return is_plain and not pure.is_absolute() and ".." not in pure.parts


def _files(given: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, CopiedFile]]:
    for path, each in given.items():
        path.encode()  # A lone surrogate names no file.
        yield path, CopiedFile(int(each["size"]), tuple(map(str, each["parts"])))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The files of a run as of a checkpoint: sizes of those that grow, links to those of the checkpoint, which a later
    one may remove."""

    run_dir: Path
    version: int
    sizes: Mapping[str, int]

    @classmethod
    def take(cls, run_dir: Path, version: int) -> "Snapshot":
        """Links the checkpoint into a folder of its own, as deep, so that its own links hold there. Raises OSError."""
        staged = run_dir / STAGED / str(version)
        shutil.rmtree(staged, ignore_errors=True)
        shutil.copytree(run_dir / "checkpoints" / str(version), staged, symlinks=True, copy_function=os.link)
        names = [name for name in GROWING if (run_dir / name).exists()]
        return cls(run_dir, version, {name: (run_dir / name).stat().st_size for name in names})

    def files(self) -> Iterator[tuple[str, Path, int]]:
        """Yields the name in the copy, the file, and its bytes."""
        for name, size in self.sizes.items():
            yield name, self.run_dir / name, size
        for name in FIXED:
            if (path := self.run_dir / name).exists():
                yield name, path, path.stat().st_size
        trees = [(name, self.run_dir / name) for name in FOLDERS]
        trees.append((f"checkpoints/{self.version}", self.run_dir / STAGED / str(self.version)))
        for name, folder in trees:
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    yield f"{name}/{path.relative_to(folder).as_posix()}", path, path.stat().st_size

    def release(self) -> None:
        shutil.rmtree(self.run_dir / STAGED / str(self.version), ignore_errors=True)


class _FilePart(NamedTuple):
    """A part of a file: its bytes from `start` on."""

    path: Path
    start: int
    size: int

    def read(self) -> bytes:
        """Raises OSError where the file is shorter by now."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            data = file.read(self.size)
        if len(data) < self.size:
            raise OSError(f"{self.path} has become shorter while it was copied")
        return data


def upload(
    objects: S3Objects,
    snapshot: Snapshot,
    before: Head | None,
    tag: str,
    writer: str,
    moved: Callable[[], None] = lambda: None,
) -> tuple[Head, str]:
    """Sends what the store lacks, then the head; returns it with its tag. before: the head there, where all its parts
    and no others are known to be there; None: the store is asked which are, as after an upload that was cut off. moved:
    called after each part, on any thread; its error ends the upload.

    Raises OSError when the store cannot be reached, and OtherWriter; then the head is the one before."""
    sent = objects.names() if before is None else set(map(_object, before.parts))

    def send(part: _FilePart) -> str:
        data = part.read()
        digest = sha256(data).hexdigest()
        name = _object(digest)
        if name not in sent:
            sent.add(name)  # Two threads at once send equal parts twice, which costs time alone.
            objects.put(name, data)
        moved()
        return digest

    files = list(snapshot.files())
    with ThreadPoolExecutor(WAYS, "parts of a copy") as threads:
        digests = threads.map(send, [part for _, path, size in files for part in _parts(path, size)])
        copied = {
            name: CopiedFile(size, tuple(next(digests) for _ in _parts(path, size))) for name, path, size in files
        }
    head = Head(snapshot.version, writer, copied)
    return head, objects.write_head(head.encode(), tag)


def remove_unnamed(objects: S3Objects, before: Head | None, head: Head) -> int:
    """Removes the parts that only the head before named; None: all that `head`, the newest one, does not name, such as
    those of a machine that died. Returns how many parts of `head` are gone, as far as that was asked. Raises OSError;
    then some parts stay, which costs space alone."""
    named = set(map(_object, head.parts))
    lost = 0
    if before is not None:
        unnamed = set(map(_object, before.parts)) - named
    else:
        there = objects.names()
        newest = objects.read_head()
        is_newest = newest is not None and newest[0] == head.encode()
        # The parts of another run that writes there by now have no head yet.
        unnamed = there - named if is_newest else set()
        lost = len(named - there)
    if unnamed:
        objects.remove(sorted(unnamed))
    return lost


def _parts(path: Path, size: int) -> list[_FilePart]:
    return [_FilePart(path, start, min(PART_BYTES, size - start)) for start in range(0, size, PART_BYTES)]


def download(objects: S3Objects, head: Head, target: Path) -> None:
    """Writes the run that a head names into a folder that does not exist. Raises JournalError for a part that is gone
    or damaged, and OSError when the store cannot be reached; then there is no folder, and the next try goes on."""
    unfinished = target.with_name(f"{target.name}.{sha256(head.encode()).hexdigest()[:16]}.part")
    for other in {*target.parent.glob("*.part")} - {unfinished}:
        if other.name.startswith(f"{target.name}."):
            shutil.rmtree(other, ignore_errors=True)
    unfinished.mkdir(0o700, parents=True, exist_ok=True)
    for name in head.files:
        (path := unfinished / name).parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def fetch(name: str, number: int, digest: str) -> None:
        with (unfinished / name).open("r+b") as file:
            file.seek(number * PART_BYTES)
            if sha256(file.read(PART_BYTES)).hexdigest() != digest:
                file.seek(number * PART_BYTES)
                file.write(_checked(objects, digest, name))

    named = [(name, *part) for name, copied in head.files.items() for part in enumerate(copied.parts)]
    with ThreadPoolExecutor(WAYS, "parts of a copy") as threads:
        deque(threads.map(lambda part: fetch(*part), named), maxlen=0)
    for name, copied in head.files.items():
        if (size := (unfinished / name).stat().st_size) != copied.size:
            raise JournalError(f"{objects.address}: {name} has {size} bytes, and its head says {copied.size}")
    write_mark(unfinished, [head.writer])
    unfinished.rename(target)


def _checked(objects: S3Objects, digest: str, name: str) -> bytes:
    try:
        part = objects.get(_object(digest))
    except FileNotFoundError as error:
        raise JournalError(f"{objects.address}: a part of {name} is gone ({digest[:16]})") from error
    if sha256(part).hexdigest() != digest:
        raise JournalError(f"{objects.address}: a part of {name} is damaged ({digest[:16]})")
    return part


def _object(digest: str) -> str:
    return f"{PARTS}{digest}"


def write_mark(run_dir: Path, writers: Sequence[str]) -> None:
    (run_dir / MARK).write_text(json.dumps({"writers": list(writers)}) + "\n")


def writers_of(run_dir: Path) -> list[str]:
    """Returns who wrote the heads that came from a run directory, or that it was downloaded from."""
    path = run_dir / MARK
    return list(map(str, json.loads(path.read_text())["writers"])) if path.exists() else []


def brought(objects: S3Objects, run_dir: Path) -> Head | None:
    """Returns the head of the store, after the run directory holds its run: what is there is kept if the head came from
    it, and moved aside if another machine went on since, or if it is no run. None: there is no copy yet.

    Raises ConfigError when the run directory holds a run that was never copied there, or goes on now, and what
    `download` raises."""
    if (found := objects.read_head()) is None:
        return None
    head = Head.decode(found[0], objects.address)
    if (run_dir / "config.toml").exists():
        if head.writer in (writers := writers_of(run_dir)):
            return head
        if not writers:
            raise ConfigError(f"{objects.address} holds another run than {run_dir}: name another address")
    if run_dir.exists():
        with run_lock(run_dir):  # A run that goes on in it would lose it.
            run_dir.rename(run_dir.with_name(f"{run_dir.name}.before-{secrets.token_hex(4)}"))
    download(objects, head, run_dir)
    return head


def head_of(objects: S3Objects, run_dir: Path) -> tuple[Head | None, str]:
    """Returns the head of the store and its tag, which a run that goes on here replaces; None and "": there is none.
    Raises OtherWriter when the head came from elsewhere."""
    if (found := objects.read_head()) is None:
        return None, ""
    head = Head.decode(found[0], objects.address)
    if head.writer not in writers_of(run_dir):
        raise OtherWriter(f"{objects.address} holds step {head.version} of a run that is not in {run_dir}: begin again")
    return head, found[1]


# ---- uploads beside a run ------------------------------------------------------------------------------------------


LAST_UPLOAD = 300.0
"""Seconds without a block that was sent, or a part that was found there, after which the end of a run no longer waits
for its last copy. All tries of one request take less."""


class Uploads:
    """One upload runs, and one snapshot waits; a later checkpoint takes the place of the one that waits.

    head, tag: what the store holds. say: takes what a person should read. copied: version of the newest copy, -1: none.
    """

    def __init__(
        self, objects: S3Objects, run_dir: Path, head: Head | None, tag: str, say: Callable[[str], None]
    ) -> None:
        self.copied = -1 if head is None else head.version
        self._objects = objects
        self._run_dir = run_dir
        self._known: Head | None = None  # what the store has, where nothing else may lie there
        self._tag = tag
        self._say = say
        self._writer = secrets.token_hex(8)
        self._made = 0
        self._moved = 0  # parts, of all uploads
        self._has_ended = False
        self._waiting: Snapshot | None = None
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._changed = asyncio.Event()
        shutil.rmtree(run_dir / STAGED, ignore_errors=True)  # A start that was killed left it.
        write_mark(run_dir, [self._writer] if head is None else [head.writer, self._writer])

    async def committed(self, version: int) -> None:
        """Takes a snapshot of a checkpoint that was just committed."""
        try:
            snapshot = await asyncio.to_thread(Snapshot.take, self._run_dir, version)
        except OSError as error:
            self._say(f"no copy of step {version} is made: {error}")
            return
        if self._waiting is not None and self._waiting.version != version:
            late = self._waiting
            self._say(f"{self._objects.address} is slow: step {late.version} is not copied, step {version} will be")
            await asyncio.to_thread(late.release)
        self._waiting = snapshot
        self._is_idle.clear()
        self._changed.set()

    async def run(self) -> None:
        """Uploads until cancelled. Raises OtherWriter."""
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                while (snapshot := self._waiting) is not None:
                    self._waiting = None
                    await self._upload(snapshot)
                self._is_idle.set()
        finally:
            self._has_ended = True

    def _note_part(self) -> None:
        self._moved += 1
        if self._has_ended:  # Nobody waits for the threads, and the process would.
            raise OSError("the run has ended")

    async def _upload(self, snapshot: Snapshot) -> None:
        before = self._known
        self._known = None
        work = (self._objects, snapshot, before, self._tag, self._writer, self._note_part)
        try:
            head, self._tag = await asyncio.to_thread(upload, *work)
        except OSError as error:
            after = f"the copy is of step {self.copied}" if self.copied >= 0 else "there is no copy yet"
            self._say(f"{self._objects.address} did not take step {snapshot.version}: {error}; {after}")
        else:
            self.copied = snapshot.version
            self._made += 1
            await self._remove_unnamed(before, head)
        finally:
            if self._waiting is None or self._waiting.version != snapshot.version:
                await asyncio.to_thread(snapshot.release)

    async def _remove_unnamed(self, before: Head | None, head: Head) -> None:
        try:
            lost = await asyncio.to_thread(remove_unnamed, self._objects, before, head)
        except OSError as error:
            self._say(f"{self._objects.address} keeps parts that no copy names any more: {error}")
            return
        if lost:
            self._say(f"{self._objects.address} has lost {lost} parts of step {head.version}; the next copy sends them")
        else:
            self._known = head

    async def finish(self, version: int) -> None:
        """Copies the end of the run, with all that it wrote, for as long as bytes move. Raises FleetFailed when
        none did for LAST_UPLOAD, or the store refuses the copy."""
        before = self._made
        if await self._becomes_idle():
            before = self._made
            await self.committed(version)
            await self._becomes_idle()
        if self._made == before:
            raise FleetFailed(
                f"{self._objects.address} did not take the end of the run, step {version}, which is in "
                f"{self._run_dir}: the same command copies it"
            )

    async def _becomes_idle(self) -> bool:
        """Returns whether nothing is to be copied any more; False once nothing has moved for LAST_UPLOAD."""
        while not self._is_idle.is_set():
            moved = self._moved, self._objects.blocks
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_UPLOAD):
                    await self._is_idle.wait()
            if moved == (self._moved, self._objects.blocks):
                break
        return self._is_idle.is_set()


@asynccontextmanager
async def uploading(uploads: Uploads) -> AsyncIterator[None]:
    async with running_beside({"copies of the run": uploads.run()}):
        yield

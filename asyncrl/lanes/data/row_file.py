"""Rows in a file: a checkpoint saves those of READY samples, and a resume stores them again.

A file is a row of parts, each (references, columns), as `asyncrl/lanes/control/message_codec.py` writes values.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from io import BufferedIOBase
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from asyncrl.errors import ALL_SLOTS, LostRows, WireError
from asyncrl.lanes.control.message_codec import encode_for_file, next_in_file
from asyncrl.protocols.batch import Array, Batch, BatchRef, Place, RowRef, SampleName

READY_ROWS = "ready.rows"
"""The file of a checkpoint with the rows of READY samples."""

MOST_BYTES = 1 << 30
"""Bytes of a file: a disk writes them in seconds, and the trainer waits meanwhile. What does not fit is sampled again
after a resume, as everything in flight was before there was this file."""

MOST_SECONDS = 30.0
"""Seconds that reading the rows may take, less than any deadline of the call. What is late is left out, too."""

PART_TOKENS = 1 << 18
PART_ROWS = 1024
"""Tokens and rows of a part, at least one row: some 5 MB, which are encoded in milliseconds."""

Run = Callable[..., Awaitable[Any]]
"""Runs a function with its arguments where an event loop may wait for a disk: `asyncio.to_thread`."""


class ReadsRows(Protocol):
    async def read(self, refs: BatchRef, columns: list[str], /) -> Batch: ...


@dataclass
class RowFileWriter:
    """Writes rows into `file`. saved: names of the samples written. digest: SHA-256 of the bytes written."""

    file: BufferedIOBase
    reader: ReadsRows
    run: Run = asyncio.to_thread
    most_bytes: int = MOST_BYTES
    saved: list[SampleName] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._sha = sha256()
        self._size = 0
        self._gone: set[tuple[str, int]] = set()

    @property
    def digest(self) -> str:
        return self._sha.hexdigest()

    async def save(self, samples: BatchRef, seconds: float = MOST_SECONDS) -> None:
        """Writes the rows of these samples with all their columns, in their order, as far as bytes and seconds allow;
        rows that are gone are left out."""
        until = asyncio.get_running_loop().time() + seconds
        for part in _parts(samples):
            try:
                async with asyncio.timeout_at(until):
                    kept, rows = await self._read(part)
            except TimeoutError:
                return
            if len(kept) and not await self.run(self._write, kept, rows):
                return

    async def _read(self, part: BatchRef) -> tuple[BatchRef, Batch]:
        """Returns those of these samples whose rows are not gone, with their rows."""
        while len(part := self._without_gone(part)):
            try:
                return part, await self.reader.read(part, _columns(part.rows[0]))
            except LostRows as lost:
                if self._gone.issuperset(lost.places):
                    break  # The error names no row that could be left out.
                self._gone.update(lost.places)
        return BatchRef(()), Batch({})

    def _without_gone(self, part: BatchRef) -> BatchRef:
        gone = self._gone
        return BatchRef(
            tuple(
                row
                for row in part
                if not any((p.owner, p.slot) in gone or (p.owner, ALL_SLOTS) in gone for p in row.places)
            )
        )

    def _write(self, part: BatchRef, rows: Batch) -> bool:
        """Writes a part; returns False, with nothing written, if the file would have too many bytes."""
        data = encode_for_file((part, rows))
        if self._size + len(data) > self.most_bytes:
            return False
        self.file.write(data)
        self._sha.update(data)
        self._size += len(data)
        self.saved += [row.name for row in part]
        return True


async def write_rows(path: Path, reader: ReadsRows, samples: BatchRef) -> RowFileWriter:
    """Writes the rows of these samples into a new file, fsynced; returns what wrote them."""
    with await asyncio.to_thread(open, path, "wb") as file:
        writer = RowFileWriter(file, reader)
        await writer.save(samples)
        await asyncio.to_thread(_sync, file)
    return writer


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _parts(samples: BatchRef) -> Iterator[BatchRef]:
    """Yields consecutive samples whose rows have the same columns."""
    part: list[RowRef] = []
    tokens = 0
    for row in samples:
        size = row.length
        if part and (_columns(row) != _columns(part[0]) or tokens + size > PART_TOKENS or len(part) == PART_ROWS):
            yield BatchRef(tuple(part))
            part = []
            tokens = 0
        part.append(row)
        tokens += size
    if part:
        yield BatchRef(tuple(part))


def _columns(row: RowRef) -> list[str]:
    return list(dict.fromkeys(name for place in row.places for name in place.columns))


async def store_again(
    file: BufferedIOBase,
    samples: BatchRef,
    incarnation: int,
    keep: Callable[[SampleName, Mapping[str, Array]], Place],
    run: Run = asyncio.to_thread,
) -> BatchRef:
    """Stores the rows of those of these samples that the file has, through `keep`; returns their references, which
    belong to `incarnation`. Raises WireError for a file that `RowFileWriter` has not written."""
    wanted = {row.name for row in samples}
    found = list[RowRef]()
    while (part := await run(_next_part, file)) is not None:
        refs, rows = part
        for number, row in enumerate(refs):
            if row.name in wanted:
                place = keep(row.name, {name: column[number] for name, column in rows.columns.items()})
                found.append(row._replace(incarnation=incarnation, places=(place,)))
    return BatchRef(tuple(found))


def _next_part(file: BufferedIOBase) -> tuple[BatchRef, Batch] | None:
    match next_in_file(file):
        case None:
            return None
        case (BatchRef() as refs, Batch() as rows) if len(refs) == len(rows):
            return refs, rows
    raise WireError("a part of a file of rows is not (references, columns)")

"""The journal of a run: its records as bytes, appended by the controller only, read by resumes and audits.

A record is framed as length u32 | crc32 u32 | MessagePack [kind, field, ...]. No record is flushed by itself: a write
survives the death of its process, and a power cut loses only records after the last checkpoint, where a resumed run
begins.
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import msgpack

from asyncrl.controller.journal.ledger import KINDS, AttemptStarted, Ledger, Record, Resumed, Trained
from asyncrl.controller.journal.run_storage import Store
from asyncrl.errors import JournalError, WireError
from asyncrl.lanes.control.field_checks import field_checks

RECORD_LIMIT = 1 << 26
"""Bytes of one record: a step of a million samples fits; a longer length is no record of asyncrl."""

FRAME = struct.Struct(">II")

NAMES = {kind: name for name, kind in KINDS.items()}
CHECKS = {name: field_checks(kind) for name, kind in KINDS.items()}


def encode(record: Record) -> bytes:
    kind = NAMES[type(record)]
    payload: bytes = msgpack.packb([kind, *(getattr(record, name) for name, _ in CHECKS[kind])])
    assert len(payload) <= RECORD_LIMIT, f"a {kind} record of {len(payload)} bytes"
    return FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def decode(payload: bytes) -> Record:
    """Returns the record of a frame's payload. Raises JournalError for an unknown kind or shape."""
    try:
        top = msgpack.unpackb(payload, use_list=False)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise JournalError(f"a record that is no MessagePack: {error!r:.200}") from error
    if type(top) is not tuple or not top or type(top[0]) is not str:
        raise JournalError("a record that is not [kind, field, ...]")
    kind, *values = top
    if kind not in KINDS:
        raise JournalError(f"a record of kind {kind!r:.100}: this journal was written by another version of asyncrl")
    checks = CHECKS[kind]
    if len(values) != len(checks):
        raise JournalError(f"a {kind} record with {len(values)} values instead of {len(checks)}")
    try:
        return KINDS[kind](*(check(value) for (_, check), value in zip(checks, values, strict=True)))
    except WireError as error:
        raise JournalError(f"a {kind} record: {error}") from error


@dataclass(frozen=True, slots=True)
class Framed:
    """A record and its place: bytes [start, end) of the journal."""

    start: int
    end: int
    record: Record


class Scan:
    """Iterates over the records in the first `until` bytes of a journal, up to the first bytes that are no record.

    end, crc: length and crc32 of the whole records, after iteration.
    """

    def __init__(self, store: Store, until: int | None = None) -> None:
        self.end = 0
        self.crc = 0
        self._store = store
        self._size = store.size if until is None else until

    def __iter__(self) -> Iterator[Framed]:
        while (frame := self._frame()) is not None:
            start = self.end
            self.end += len(frame)
            self.crc = zlib.crc32(frame, self.crc)
            try:
                record = decode(frame[FRAME.size :])
            except JournalError as error:
                raise JournalError(f"journal, byte {start}: {error}") from error
            yield Framed(start, self.end, record)

    @property
    def damaged(self) -> bool:
        """Returns whether a whole frame with a wrong checksum, and with bytes after it, ended the iteration."""
        length = self._frame_length()
        return length > 0 and self.end + length < self._size

    def _frame(self) -> bytes | None:
        length = self._frame_length()
        if not length or self.end + length > self._size:
            return None
        frame = self._store.read(self.end, length)
        _, crc = FRAME.unpack_from(frame)
        return frame if zlib.crc32(frame[FRAME.size :]) == crc else None

    def _frame_length(self) -> int:
        """Returns the length that the next frame should have; 0: no frame begins here."""
        head = self._store.read(self.end, FRAME.size)
        if len(head) < FRAME.size:
            return 0
        length, _ = FRAME.unpack(head)
        return FRAME.size + int(length) if length <= RECORD_LIMIT else 0


def void_ranges(resumes: list[tuple[int, Resumed]]) -> list[tuple[int, int]]:
    """Returns the byte ranges that no longer count, rising and disjoint. resumes: (start, record) in journal order."""
    ranges: list[tuple[int, int]] = []
    for start, resumed in resumes:
        if resumed.offset > start:
            raise JournalError(f"journal, byte {start}: resumed from byte {resumed.offset}, which lies behind it")
        ranges = [(low, high) for low, high in ranges if low < resumed.offset]
        if ranges and resumed.offset < ranges[-1][1]:
            raise JournalError(f"journal, byte {start}: resumed from byte {resumed.offset}, which had become void")
        ranges.append((resumed.offset, start))
    return ranges


def resumes(store: Store, until: int | None = None) -> list[tuple[int, Resumed]]:
    """Returns (byte, record) of every resume in the first `until` bytes, void ones included."""
    return [(framed.start, framed.record) for framed in Scan(store, until) if isinstance(framed.record, Resumed)]


def surviving(store: Store, until: int | None = None) -> Iterator[Framed]:
    """Iterates over the records in the first `until` bytes that no resume made void, in order."""
    void = void_ranges(resumes(store, until))
    for framed in Scan(store, until):
        if not any(low <= framed.start < high for low, high in void):
            yield framed


def replay(store: Store, until: int | None = None) -> Ledger:
    """Returns the ledger after the surviving records of the first `until` bytes. Raises JournalError with the byte."""
    ledger = Ledger()
    for framed in surviving(store, until):
        try:
            ledger.apply(framed.record)
        except JournalError as error:
            raise type(error)(f"journal, byte {framed.start}: {error}") from error
    return ledger


class Journal:
    """Appends records to a store, through the ledger, which refuses illegal records before they are written.

    torn: bytes of an unfinished last record that were cut off. offset, crc: length and crc32 of the journal.
    """

    def __init__(self, store: Store) -> None:
        scan = Scan(store)
        for _ in scan:
            pass
        self.store = store
        self.torn = store.size - scan.end
        if self.torn:
            store.truncate(scan.end)
        self.offset = scan.end
        self.crc = scan.crc
        self.ledger = replay(store)

    def append(self, record: Record) -> None:
        """Appends a record. Raises JournalError, with nothing written, if it contradicts the records before it."""
        self.ledger.apply(record)
        if isinstance(record, Trained) and record.chain != self.ledger.chain.hex():
            raise JournalError(
                f"the trainer did not train what the journal says for version {record.version}: "
                f"its chain is {record.chain[:16]}, by the records it is {self.ledger.chain.hex()[:16]}"
            )
        frame = encode(record)
        self.store.append(frame)
        self.offset += len(frame)
        self.crc = zlib.crc32(frame, self.crc)

    def sync(self) -> None:
        self.store.sync()

    def resume(self, incarnation: int, offset: int) -> None:
        """Goes back to where the journal was `offset` bytes long; the records after it are void.

        The groups in flight there begin a new attempt. Raises JournalError when that point is void itself.
        """
        ledger = replay(self.store, offset)
        resumed = Resumed(incarnation, ledger.version, offset)
        void_ranges([*resumes(self.store), (self.offset, resumed)])
        self.ledger = ledger
        self.append(resumed)
        for group, members in ledger.in_flight():
            self.append(AttemptStarted(group, ledger.groups[group].attempt + 1, members, "resumed"))

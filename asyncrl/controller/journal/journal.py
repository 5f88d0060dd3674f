"""The journal of a run: its records as bytes, appended by the controller only, read by resumes and audits.

A record is framed as length u32 | crc32 u32 | MessagePack [kind, field, ...]. No record is flushed by itself: a write
survives the death of its process, and a power cut loses only records after the last checkpoint, where a resumed run
begins. An unfinished record at the end is a torn tail and is cut off. A damaged record with valid ones behind it is
none: the journal is refused, and stays as it is.
"""

import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import msgpack

from asyncrl.controller.gate.group_state import Cut
from asyncrl.controller.journal.ledger import KINDS, AttemptStarted, Ledger, Record, Restored, Resumed, Trained
from asyncrl.controller.journal.run_storage import Store
from asyncrl.errors import JournalError, WireError
from asyncrl.lanes.control.field_checks import field_checks

RECORD_LIMIT = 1 << 26
"""Bytes of one record: a step of a million samples fits; a longer length is no record of asyncrl."""

FRAME = struct.Struct(">II")
LENGTH = struct.Struct(">I")

NAMES = {kind: name for name, kind in KINDS.items()}
CHECKS = {name: field_checks(kind) for name, kind in KINDS.items()}


def _first_bytes(kind: str) -> bytes:
    """Returns how the payload of every record of a kind begins: its number of values and its name."""
    packer = msgpack.Packer()
    return bytes(packer.pack_array_header(1 + len(CHECKS[kind])) + packer.pack(kind))


FIRST_BYTES = {kind: _first_bytes(kind) for kind in KINDS}
KIND_OF = {first: kind for kind, first in FIRST_BYTES.items()}
_ANY_PAYLOAD = re.compile(b"|".join(re.escape(first) for first in FIRST_BYTES.values()))


def encode(record: Record) -> bytes:
    kind = NAMES[type(record)]
    payload: bytes = msgpack.packb([kind, *(getattr(record, name) for name, _ in CHECKS[kind])])
    assert len(payload) <= RECORD_LIMIT, f"a {kind} record of {len(payload)} bytes"
    return FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def decode(payload: bytes | memoryview) -> Record:
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
        return KINDS[kind](*[check(value) for (_, check), value in zip(checks, values, strict=True)])
    except WireError as error:
        raise JournalError(f"a {kind} record: {error}") from error


@dataclass(frozen=True, slots=True)
class Framed:
    """A record and its place: bytes [start, end) of the journal."""

    start: int
    end: int
    record: Record


class Scan:
    """Reads a journal once, up to the first bytes that are no record; decodes the records that are asked for.

    size: bytes of the journal. end, count: bytes and number of the whole records. resumes: (byte, record) of every
    resume, void ones included.
    """

    def __init__(self, store: Store) -> None:
        self._bytes = store.contents()
        self.size = len(self._bytes)
        self.end = 0
        self.count = 0
        self.resumes: list[tuple[int, Resumed]] = []
        self._crcs = {0: 0}
        while end := self._frame_end(self.end):
            payload = self.end + FRAME.size
            if self._bytes[payload : payload + len(FIRST_BYTES["resumed"])] == FIRST_BYTES["resumed"]:
                record = self._record(self.end, end)
                assert isinstance(record, Resumed)
                self.resumes.append((self.end, record))
            self.end = end
            self.count += 1

    def close(self) -> None:
        """Unmaps the journal; nothing can be decoded any more."""
        self._bytes.release()

    def __iter__(self) -> Iterator[Framed]:
        """Yields every record, void ones included. Raises JournalError, with the byte, for one that is none of ours."""
        return self._between(0, self.end)

    def surviving(self, until: int | None = None, since: int = 0) -> Iterator[Framed]:
        """Yields the records that no resume made void, in order, of those between these bytes, which end records.

        Resumes after `until` do not count.
        """
        until = self.end if until is None else min(until, self.end)
        start = since
        for low, high in [*void_ranges([each for each in self.resumes if each[0] < until]), (until, until)]:
            for framed in self._between(start, low):
                start = framed.end
                yield framed
            start = max(start, high)

    def replay(self, until: int | None = None) -> Ledger:
        """Returns the ledger after the surviving records of the first `until` bytes. Raises JournalError with the
        byte."""
        ledger = Ledger()
        for framed in self.surviving(until):
            try:
                ledger.apply(framed.record)
            except JournalError as error:
                raise type(error)(f"journal, byte {framed.start}: {error}") from error
        return ledger

    def crc(self, size: int) -> int:
        """Returns the crc32 of the first `size` bytes. Bytes before an earlier answer are not read again."""
        known = max(each for each in self._crcs if each <= size)
        self._crcs[size] = zlib.crc32(self._bytes[known:size], self._crcs[known])
        return self._crcs[size]

    def damage(self) -> str:
        """Describes damage after which valid records follow; "" when what follows is at most a torn tail."""
        for found in _ANY_PAYLOAD.finditer(self._bytes, self.end + FRAME.size + 1):
            start = found.start() - FRAME.size
            if self._frame_end(start):
                return (
                    f"record {self.count + 1} of the journal, at byte {self.end}, is damaged, and valid records follow "
                    f"it (from byte {start} on, first {KIND_OF[found.group()]!r}), so it is no unfinished end. The "
                    "file is left as it is"
                )
        return ""

    def _between(self, start: int, until: int) -> Iterator[Framed]:
        while start < until:
            (length,) = LENGTH.unpack_from(self._bytes, start)
            end = start + FRAME.size + length
            if end > until:
                return
            yield Framed(start, end, self._record(start, end))
            start = end

    def _record(self, start: int, end: int) -> Record:
        try:
            return decode(self._bytes[start + FRAME.size : end])
        except JournalError as error:
            raise JournalError(f"journal, byte {start}: {error}") from error

    def _frame_end(self, start: int) -> int:
        """Returns where the whole frame ends that begins here; 0: none does. An empty record is none: after a power
        cut, zeros may stand where nothing was written yet."""
        if self.size - start < FRAME.size:
            return 0
        length, crc = FRAME.unpack_from(self._bytes, start)
        end = start + FRAME.size + int(length)
        if not 0 < length <= RECORD_LIMIT or end > self.size:
            return 0
        return end if zlib.crc32(self._bytes[start + FRAME.size : end]) == crc else 0


def void_ranges(resumes: list[tuple[int, Resumed]]) -> list[tuple[int, int]]:
    """Returns the byte ranges that no longer count, rising and disjoint. resumes: (start, record) in journal order."""
    ranges: list[tuple[int, int]] = []
    for start, resumed in resumes:
        if resumed.offset > start:
            raise JournalError(f"journal, byte {start}: resumed from byte {resumed.offset}, which lies behind it")
        ranges = [(low, high) for low, high in ranges if low < resumed.offset]
        if ranges and resumed.offset <= ranges[-1][1]:  # The end is void too: it is before the resume that began there.
            raise JournalError(f"journal, byte {start}: resumed from byte {resumed.offset}, which had become void")
        ranges.append((resumed.offset, start))
    return ranges


class Journal:
    """Appends records to a store, through the ledger, which refuses illegal records before they are written.

    scan, ledger: of this store, where they are known already. torn: bytes of an unfinished last record that were cut
    off. offset, crc: length and crc32 of the journal. Raises JournalError for a damaged journal.

    What the journal has, the ledger has taken. The sample tracker and commits append to it.
    """

    def __init__(self, store: Store, scan: Scan | None = None, ledger: Ledger | None = None) -> None:
        scan = scan or Scan(store)
        if damage := scan.damage():
            raise JournalError(damage)
        assert store.size == scan.size, "another process wrote to the journal, although this one holds the run's lock"
        self.store = store
        self.torn = scan.size - scan.end
        self.offset = scan.end
        self.crc = scan.crc(scan.end)
        self.ledger = ledger or scan.replay()
        self._resumes = scan.resumes
        scan.close()  # Before the file becomes shorter than what is mapped of it.
        if self.torn:
            store.truncate(self.offset)

    def append(self, record: Record) -> None:
        """Appends a record. Raises JournalError, with nothing changed, if it contradicts those before."""
        if isinstance(record, Trained) and record.chain != (own := self.ledger.chain_after(record).hex()):
            raise JournalError(
                f"the trainer did not train what the journal says for version {record.version}: "
                f"its chain is {record.chain[:16]}, by the records it is {own[:16]}"
            )
        self.ledger.apply(record)
        frame = encode(record)
        self.store.append(frame)
        self.offset += len(frame)
        self.crc = zlib.crc32(frame, self.crc)

    def sync(self) -> None:
        self.store.sync()

    def resume(
        self, incarnation: int, offset: int, ledger: Ledger | None = None, restored: tuple[Cut, ...] = ()
    ) -> None:
        """Goes back to where the journal was `offset` bytes long; the records after it are void.

        The samples in flight there begin a new attempt, except those `restored`, which go on as they are. ledger: at
        that point, if it is known already. Raises JournalError when that point is void itself.
        """
        ledger = ledger or Scan(self.store).replay(offset)
        resumed = Resumed(incarnation, ledger.version, offset)
        void_ranges([*self._resumes, (self.offset, resumed)])
        self._resumes.append((self.offset, resumed))
        self.ledger = ledger
        self.append(resumed)
        if restored:
            self.append(Restored(restored))
        for group, members in sorted((group, tuple(sorted(left))) for group, left in ledger.unsettled.items()):
            self.append(AttemptStarted(group, ledger.groups[group].attempt + 1, members, "resumed"))

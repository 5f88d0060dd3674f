"""The records of the journal: one an event, framed as length u32 | crc32 u32 | MessagePack [kind, field, ...]."""

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgpack

from asyncrl.controller.gate.group_state import Cut
from asyncrl.errors import JournalError, WireError
from asyncrl.lanes.control.field_checks import field_checks

RECORD_LIMIT = 1 << 26
"""Bytes of one record: a step of a million samples fits; a longer length is no record of asyncrl."""

FRAME = struct.Struct(">II")
BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Drawn:
    """A group was put in flight at this version, with this many members, in attempt 0."""

    group: int
    version: int
    members: int


@dataclass(frozen=True, slots=True)
class AttemptStarted:
    """These members begin again in attempt `number` of their group."""

    group: int
    number: int
    members: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Generated:
    """Samples left the engine. samples: member, versions of first and last token, number of sampled tokens."""

    group: int
    attempt: int
    samples: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Scored:
    """A sample has its reward. A sample that cannot be scored is `Dropped` instead."""

    group: int
    member: int
    reward: float


@dataclass(frozen=True, slots=True)
class Compared:
    """The greedy answer of a group has its reward, with which the samples are compared. The answer never trains."""

    group: int
    reward: float


@dataclass(frozen=True, slots=True)
class Trained:
    """An iteration took these cuts and led to `version`.

    advantages: of each sample, in the order of the cuts. chain: hex, as the trainer computed it.
    """

    version: int
    cuts: tuple[Cut, ...]
    advantages: tuple[float, ...]
    chain: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """These members leave without training."""

    group: int
    members: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class InFlight:
    """Every sample in flight, by group, at a checkpoint or a clean exit."""

    groups: tuple[Cut, ...]


@dataclass(frozen=True, slots=True)
class CheckpointMade:
    """A hint: the checkpoint of `version`, with this digest of its manifest, was committed before this record."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """The run went back to where the journal was `offset` bytes long; the records from there to here are void."""

    incarnation: int
    version: int
    offset: int


Record = (
    Drawn | AttemptStarted | Generated | Scored | Compared | Trained | Dropped | InFlight | CheckpointMade | Resumed
)

KINDS: dict[str, type[Record]] = {
    "drawn": Drawn,
    "attempt": AttemptStarted,
    "generated": Generated,
    "scored": Scored,
    "compared": Compared,
    "trained": Trained,
    "dropped": Dropped,
    "in_flight": InFlight,
    "checkpoint": CheckpointMade,
    "resumed": Resumed,
}
NAMES = {kind: name for name, kind in KINDS.items()}
CHECKS = {name: field_checks(kind) for name, kind in KINDS.items()}


def _values(record: Record) -> list[Any]:
    """Returns the values in the order of the fields; `astuple` would copy every list among them."""
    return [getattr(record, name) for name in type(record).__dataclass_fields__]


def encode(record: Record) -> bytes:
    """Returns the record in its frame."""
    payload: bytes = msgpack.packb([NAMES[type(record)], *_values(record)])
    assert len(payload) <= RECORD_LIMIT, f"a {NAMES[type(record)]} record of {len(payload)} bytes"
    return FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def decode(payload: bytes) -> Record:
    """Returns the record of a frame's payload. Raises JournalError for an unknown kind or shape."""
    kind, values = _unpacked(payload)
    if kind not in KINDS:
        raise JournalError(f"a record of kind {kind!r:.100}: this journal was written by another version of asyncrl")
    made, checks = KINDS[kind], CHECKS[kind]
    if len(values) != len(checks):
        raise JournalError(f"a {kind} record with {len(values)} values instead of {len(checks)}")
    try:
        return made(*(check(value) for (_, check), value in zip(checks, values, strict=True)))
    except WireError as error:
        raise JournalError(f"a {kind} record: {error}") from error


def _unpacked(payload: bytes) -> tuple[str, tuple[Any, ...]]:
    try:
        top = msgpack.unpackb(payload, use_list=False)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise JournalError(f"a record that is no MessagePack: {error!r:.200}") from error
    if type(top) is not tuple or not top or type(top[0]) is not str:
        raise JournalError("a record that is not [kind, field, ...]")
    return top[0], top[1:]


@dataclass(frozen=True, slots=True)
class Framed:
    """A record and its place: bytes [start, end) of the journal."""

    start: int
    end: int
    record: Record


class Scan:
    """Iterates over the records in a journal, in bounded memory, up to the first bytes that are no record.

    read(offset, size) returns at most `size` bytes. end, crc: length and crc32 of the whole records, after iteration.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self.end = 0
        self.crc = 0
        self._read = read
        self._size = size
        self._window = b""
        self._window_start = 0

    def __iter__(self) -> Iterator[Framed]:
        while (frame := self._frame(self.end)) is not None:
            start = self.end
            self.end += len(frame)
            self.crc = zlib.crc32(frame, self.crc)
            yield Framed(start, self.end, _located(frame, start))

    @property
    def damaged(self) -> bool:
        """Returns whether a damaged record ended the iteration: a whole frame with a wrong checksum, with bytes after
        it."""
        head = self._bytes(self.end, FRAME.size)
        if len(head) < FRAME.size:
            return False
        length, _ = FRAME.unpack(head)
        return bool(length <= RECORD_LIMIT and self.end + FRAME.size + length < self._size)

    def _frame(self, start: int) -> bytes | None:
        head = self._bytes(start, FRAME.size)
        if len(head) < FRAME.size:
            return None
        length, crc = FRAME.unpack(head)
        if length > RECORD_LIMIT or start + FRAME.size + length > self._size:
            return None
        frame = self._bytes(start, FRAME.size + length)
        return frame if zlib.crc32(frame[FRAME.size :]) == crc else None

    def _bytes(self, start: int, size: int) -> bytes:
        if not self._window_start <= start <= start + size <= self._window_start + len(self._window):
            self._window = self._read(start, max(size, BLOCK))
            self._window_start = start
        begin = start - self._window_start
        return self._window[begin : begin + size]


def _located(frame: bytes, start: int) -> Record:
    try:
        return decode(frame[FRAME.size :])
    except JournalError as error:
        raise JournalError(f"journal, byte {start}: {error}") from error


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

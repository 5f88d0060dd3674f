"""Rows are stored by the worker that made them; others copy them by reference.

    owner                                                  readers
    RowStore.shared   in a segment of shared memory        map it, copy, check the slot's write_count again
    RowStore.private  in memory of the owner's process     fetch frames over the owner's data lane

There are no leases and no reference counts. A slot's write_count counts its writes; a reader that finds another count
than its `Place` names raises LostRows, and so does a reader whose owner is gone.

    header | write_count, start, bytes of each slot | heap of rows: number of columns, (dtype, length) of each, data
                                                      (8-aligned, as long as the row is; grows at its end)

The write_count is even from the moment a slot is freed until it was written again; thousands of instructions lie
between that moment and the next write to the same bytes, so that readers need no memory barrier to see it.
"""

import struct
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import structlog

from asyncrl.errors import ArenaFull, LostRows
from asyncrl.lanes.shared_memory import SHARED_MEMORY, SHARED_SCHEME, TWO_THREAD_BYTES, Segment, copy_in_two_threads
from asyncrl.protocols.batch import Array, Place, SampleName

# Hands out ranges of memory for rows of any length, in amortised constant time.
#
# A two-level segregated fit (Masmano, Ripoll, Crespo, Real: TLSF, ECRTS 2004): free ranges stand in bins of similar
# size, and a bitmap finds the first bin whose ranges are all long enough. A range that comes back waits for a row of
# its size; the first row of another size joins all that wait with their free neighbours.


UNIT = 64
"""Bytes: every range starts and ends at a multiple of it."""

_STEPS = 32
"""Bins per doubling of the size, so that rounding up to the size of a bin adds at most a 32nd."""

_SHIFT = _STEPS.bit_length()


def range_bytes(size: int) -> int:
    """Returns the bytes of the range that holds `size` bytes."""
    units = -(-size // UNIT) or 1
    coarse = _coarse(units)
    return -(-units >> coarse << coarse) * UNIT


class Heap:
    """The free ranges of memory from 0 to `size`. used: bytes of the ranges that are handed out.

    Invariant: each byte is in one range: handed out, free in a bin, or returned and waiting for a row of its size.
    Each `RowStore` has one for its rows.
    """

    def __init__(self) -> None:
        self.size = 0
        self.used = 0
        self._bins: dict[int, dict[int, None]] = {}
        """Bin -> starts of its ranges, that of the longest free first."""

        self._filled = 0
        """Bit k: bin k has a range."""

        self._free: dict[int, int] = {}
        """Start -> size of each free range."""

        self._before: dict[int, int] = {}
        """End -> start of each free range."""

        self._returned: dict[int, deque[int]] = {}
        """Size -> starts of the ranges of this size that came back since the last join."""

    def grow(self, size: int) -> None:
        """Adds memory at the end, a multiple of UNIT."""
        assert size % UNIT == 0
        self.size += size
        self._insert(self.size - size, size)

    def allocate(self, wanted: int) -> int | None:
        """Returns the start of a range of `wanted` bytes, which `range_bytes` returned, or None when no free range is
        long enough."""
        if returned := self._returned.get(wanted):
            start: int | None = returned.popleft()
        else:
            self._join_returned()
            start = self._cut(wanted)
            if start is None:
                return None
        self.used += wanted
        return start

    def free(self, start: int, size: int) -> None:
        """Takes back a range of `size` bytes that was handed out."""
        self.used -= size
        returned = self._returned.get(size)
        if returned is None:
            returned = self._returned[size] = deque()
        returned.append(start)

    def _cut(self, wanted: int) -> int | None:
        """Cuts `wanted` bytes from the first range that is long enough."""
        first = _bin(wanted)
        fitting = self._filled >> first
        if not fitting:
            return None
        number = first + (fitting & -fitting).bit_length() - 1
        start = next(iter(self._bins[number]))
        left = self._remove(start) - wanted
        if left:
            self._insert(start + wanted, left)
        return start

    def _join_returned(self) -> None:
        """Joins what came back with its neighbours. Every range is joined once for each time that it came back."""
        for size, starts in self._returned.items():
            for start in starts:
                self._insert(start, size)
        self._returned.clear()

    def tail(self) -> int:
        """Returns the bytes that are free at the end, which further memory would extend."""
        self._join_returned()
        return self.size - self._before.get(self.size, self.size)

    def _insert(self, start: int, size: int) -> None:
        """Adds a free range, joined with its free neighbours."""
        if (before := self._before.get(start)) is not None:
            size += self._remove(before)
            start = before
        if (after := self._free.get(start + size)) is not None:
            self._remove(start + size)
            size += after
        self._free[start] = size
        self._before[start + size] = start
        number = _bin(size)
        self._bins.setdefault(number, {})[start] = None
        self._filled |= 1 << number

    def _remove(self, start: int) -> int:
        size = self._free.pop(start)
        del self._before[start + size]
        number = _bin(size)
        del self._bins[number][start]
        if not self._bins[number]:
            self._filled &= ~(1 << number)
        return size


def _bin(size: int) -> int:
    """Returns the bin of ranges of this size: every range in it is at least as long as the bin's shortest, and sizes
    that `range_bytes` returns are the shortest of their bin."""
    units = size // UNIT
    coarse = _coarse(units)
    return coarse * _STEPS + (units >> coarse)


def _coarse(units: int) -> int:
    """Returns how many of the last bits do not decide the bin."""
    return max(0, units.bit_length() - _SHIFT)


ROW_DTYPES = tuple(np.dtype(name) for name in ("<f4", "<i4", "u1", "<i8"))
MAX_COLUMNS = 16
_ITEM_BYTES = {code: dtype.itemsize for code, dtype in enumerate(ROW_DTYPES)}
_CODES = {dtype: code for code, dtype in enumerate(ROW_DTYPES)}
_MAGIC = 0x0053574F52435342
_LAYOUTS = [struct.Struct(f"@{1 + 2 * columns}q") for columns in range(MAX_COLUMNS + 1)]
"""Number of columns, then dtype and length of each, by the number of columns."""

_HEADER_WORDS = 4
_SLOT_WORDS = 3
"""Magic, slots, two reserved; and write_count, start and bytes of the row."""

GROWTH = 16
"""The heap grows by a 16th of its size, which bounds what it has too much, ..."""
LEAST_GROWTH = 64 * 1024
MOST_GROWTH = 16 * 2**20
"""... and by 16 MB at most, whose pages take some 12 ms on the event loop."""

SPARE_ADDRESSES = 2
"""Addresses of a heap, in times of what all slots hold at most: gaps between rows take some. They cost no memory."""

log = structlog.get_logger(__name__)


def bytes_of_row(columns: Mapping[str, tuple[np.dtype[Any], int]]) -> int:
    """Returns the bytes of a row. columns: dtype and length of each."""
    data = sum(_aligned(np.dtype(dtype).itemsize * length) for dtype, length in columns.values())
    return 8 * (1 + 2 * len(columns)) + data


def bytes_of_rows(rows: int, row_bytes: int, stores: int = 1) -> int:
    """Returns the shared memory that so many rows take, each of this size, spread over stores that could hold all."""
    return stores * (_heap_start(rows) + _grown(-(-rows // stores) * range_bytes(row_bytes)))


def _grown(needed: int) -> int:
    """Returns the size of a heap that grew, step by step, until it held so many bytes."""
    size = 0
    while size < needed:
        step = _growth(size)
        size += step if step < MOST_GROWTH else -(-(needed - size) // step) * step
    return size


def _growth(size: int) -> int:
    """Returns by how much a heap of this size grows."""
    return min(max(size // GROWTH // UNIT * UNIT, LEAST_GROWTH), MOST_GROWTH)


def _aligned(size: int) -> int:
    return (size + 7) & -8


def _heap_start(slots: int) -> int:
    return range_bytes(8 * (_HEADER_WORDS + _SLOT_WORDS * slots))


class RowTable:
    """Reads rows out of a block of memory. Raises LostRows for memory that holds none."""

    def __init__(self, segment: Segment) -> None:
        self._use(segment)
        header = self._words[:_HEADER_WORDS].tolist()
        self.slots = header[1] if len(header) == _HEADER_WORDS else 0
        if not header or header[0] != _MAGIC or segment.allocated < _heap_start(self.slots):
            raise LostRows(f"{segment.path} holds no rows")

    def _use(self, segment: Segment) -> None:
        # The arrays first: whoever reads in another thread finds them at least as long as the segment says.
        self._arrays = [np.frombuffer(segment.buffer, dtype, segment.size // dtype.itemsize) for dtype in ROW_DTYPES]
        """The whole memory as values of each dtype: a slice of one costs a third of another view."""

        self._words = segment.buffer[: segment.size // 8 * 8].cast("q")
        """The whole memory as int64: reading or writing one of them, in one piece, costs a third of an array's."""

        self.segment = segment

    def views(self, place: Place, columns: Sequence[str]) -> list[Array]:
        """Returns views of the columns; what is read from them counts only if `check` passes afterwards."""
        self.check(place)
        entry = _HEADER_WORDS + _SLOT_WORDS * place.slot
        start, size = self._words[entry + 1 : entry + 3]
        # The entry may be overwritten while it is read, and so may the row: trust neither.
        names = place.columns
        if start < 0 or start % 8 or size < 8 * (1 + 2 * len(names)) or not self._is_mapped(start + size):
            raise _overwritten(place)
        arrays = self._arrays
        count, *table = self._words[start // 8 : start // 8 + 2 * len(names) + 1]
        found = {}
        offset = start + 8 * (1 + 2 * len(names))
        end = start + size
        for name, code, length in zip(names, table[::2], table[1::2], strict=False):
            item = _ITEM_BYTES.get(code, 0)
            if not item or count != len(names) or not 0 <= length * item <= end - offset:
                raise _overwritten(place)
            if name in columns:
                first = offset // item
                found[name] = arrays[code][first : first + length]
            offset += (length * item + 7) & -8
        return [found[name] for name in columns]

    def check(self, place: Place) -> None:
        if not self.holds(place):
            text = f"slot {place.slot} of {place.owner} no longer holds the row of write_count {place.write_count}"
            raise LostRows(text, [(place.owner, place.slot)])

    def holds(self, place: Place) -> bool:
        slot = place.slot
        count = place.write_count
        return 0 <= slot < self.slots and count % 2 == 1 and self._words[_HEADER_WORDS + _SLOT_WORDS * slot] == count

    def _is_mapped(self, end: int) -> bool:
        """Returns whether the bytes up to `end` can be read; maps the memory again if the owner's has grown."""
        if end > self.segment.allocated:
            try:
                self._use(self.segment.remapped())
            except (OSError, ValueError) as error:
                raise LostRows(f"the owner of {self.segment.path} is gone: {error}") from error
        return end <= self.segment.allocated

    def close(self) -> None:
        """Closes the segment; memory with views stays mapped until they are gone."""
        self._arrays.clear()
        self._words.release()
        self.segment.close()


def _addresses(slots: int, row_bytes: int) -> int:
    """Returns the bytes that a store can address."""
    return _heap_start(slots) + SPARE_ADDRESSES * slots * range_bytes(row_bytes)


def _overwritten(place: Place) -> LostRows:
    text = f"slot {place.slot} of {place.owner} was overwritten while it was read"
    return LostRows(text, [(place.owner, place.slot)])


class RowStore(RowTable):
    """Stores rows on the owner's side, in a fixed number of slots, each as long as its row.

    row_bytes: of the longest row. refused: rows for which there was no slot or no memory.
    """

    def __init__(self, address: str, segment: Segment, slots: int, row_bytes: int) -> None:
        np.frombuffer(segment.buffer, np.int64, _HEADER_WORDS)[:] = (_MAGIC, slots, 0, 0)
        super().__init__(segment)
        self.address = address
        self.refused = 0
        self._row_bytes = row_bytes
        self._heap = Heap()
        self._heap_start = _heap_start(slots)
        self._free = deque(range(slots))
        """Slots are reused in the order in which they were freed, so that late readers find them free for longest."""

        self._ranges: dict[int, tuple[int, int]] = {}
        """Slot in use -> start and size of its range in the heap."""

    @classmethod
    def shared(cls, name: str, slots: int, row_bytes: int, directory: Path = SHARED_MEMORY) -> Self:
        """Stores rows in the new segment `name`, which every process of this user can map. Raises ArenaFull when there
        is too little shared memory for the first one."""
        first = _heap_start(slots)
        segment = Segment.create(name, _addresses(slots, row_bytes), directory, allocated=first)
        return cls(SHARED_SCHEME + name, segment, slots, row_bytes)

    @classmethod
    def private(cls, address: str, slots: int, row_bytes: int) -> Self:
        """Stores rows in memory of this process; the data lane serves them.

        address: of the data lane, then `#` and the owner's instance, so that readers never ask a successor for them.
        """
        return cls(address, Segment.private(_addresses(slots, row_bytes)), slots, row_bytes)

    @property
    def used(self) -> int:
        """Returns the number of slots in use."""
        return self.slots - len(self._free)

    @property
    def bytes_used(self) -> int:
        return self._heap.used

    def put(self, columns: Mapping[str, Array]) -> Place:
        """Stores one row, [length] values per column, dtypes of ROW_DTYPES. Raises ArenaFull when no slot is free or
        shared memory is used up; other rows stay as they are."""
        size = self._size_of(columns)
        if not self._free:
            self.refused += 1
            raise ArenaFull(
                f"all {self.slots} row slots of {self.address} are in use: more rows were admitted than fit"
            )
        wanted = range_bytes(size)
        found = self._heap.allocate(wanted)
        if found is None:
            found = self._allocate_more(wanted)
        slot = self._free.popleft()
        start = self._heap_start + found
        words = self._words
        self._ranges[slot] = found, wanted
        self._write(start, columns.values())
        entry = _HEADER_WORDS + _SLOT_WORDS * slot
        words[entry + 1] = start
        words[entry + 2] = size
        words[entry] += 1  # Now it is odd, and readers take the row.
        return Place(self.address, slot, words[entry], tuple(columns))

    def free(self, places: Iterable[Place]) -> None:
        """Frees these slots; ignores places of other owners and places that were freed before."""
        for place in places:
            if place.owner == self.address and self.holds(place):
                self._free_slot(place.slot)

    def clear(self) -> None:
        """Frees all slots."""
        for slot in tuple(self._ranges):
            self._free_slot(slot)

    def _free_slot(self, slot: int) -> None:
        self._words[_HEADER_WORDS + _SLOT_WORDS * slot] += 1  # Now it is even, and readers lose the row.
        self._free.append(slot)
        self._heap.free(*self._ranges.pop(slot))

    def read(self, place: Place, columns: Sequence[str]) -> list[Array]:
        """Returns copies of these columns. Raises LostRows when the row was freed."""
        copies = [view.copy() for view in self.views(place, columns)]
        self.check(place)
        return copies

    def _size_of(self, columns: Mapping[str, Array]) -> int:
        """Returns the bytes of a row. Raises ValueError for what is none."""
        for name, values in columns.items():
            if values.ndim != 1 or values.dtype not in _CODES:
                allowed = ", ".join(str(dtype) for dtype in ROW_DTYPES)
                raise ValueError(
                    f"column {name!r} is {values.dtype} {list(values.shape)}; rows are one of {allowed}, [length]"
                )
        size = 8 * (1 + 2 * len(columns)) + sum([_aligned(values.nbytes) for values in columns.values()])
        if size > self._row_bytes or len(columns) > MAX_COLUMNS:
            raise ValueError(
                f"a row of {size} bytes in {len(columns)} columns; a row takes {self._row_bytes} in {MAX_COLUMNS}"
            )
        return size

    def _allocate_more(self, wanted: int) -> int:
        """Returns the start of a range in a heap that has none of this size."""
        try:
            self._grow(wanted - self._heap.tail())
        except ArenaFull as full:
            self.refused += 1
            raise ArenaFull(
                f"a row of {wanted} bytes has no room at {self.address}, whose {self.used} rows take "
                f"{self.bytes_used / 2**20:.1f} MB: {full}"
            ) from full
        found = self._heap.allocate(wanted)
        assert found is not None, f"a heap that grew for {wanted} bytes has no room for them"
        return found

    def _grow(self, least: int) -> None:
        """Makes the heap longer by at least so many bytes, and by more if there is more."""
        end = self._heap_start + self._heap.size
        room = self.segment.size - end
        if room < least:
            raise ArenaFull(f"{self.address} has no addresses left for rows: {self._heap.used} bytes are in use")
        size = min(max(_growth(self._heap.size), least), room)
        try:
            self.segment.grow(end + size)
        except ArenaFull:
            size = least
            self.segment.grow(end + size)
        self._heap.grow(size)

    def _write(self, start: int, columns: Collection[Array]) -> None:
        layout = _LAYOUTS[len(columns)]
        offset = start + layout.size
        table = [len(columns)]
        arrays = self._arrays
        for values in columns:
            code = _CODES[values.dtype]
            first = offset // values.itemsize
            length = len(values)
            table += (code, length)
            if values.nbytes < TWO_THREAD_BYTES:
                arrays[code][first : first + length] = values
            else:
                copy_in_two_threads(arrays[code][first : first + length], values)
            offset += (values.nbytes + 7) & -8
        layout.pack_into(self._words, start, *table)

    def close(self) -> None:
        """Removes a segment. Private rows go with this store, because the data lane ends after the service."""
        if self.segment.path is not None:
            self.segment.unlink()
            super().close()


def open_rows(name: str, slots: int, row_bytes: int, data_address: str, directory: Path = SHARED_MEMORY) -> RowStore:
    """Opens shared rows in the new segment `name`, or private ones when there is too little shared memory."""
    try:
        return RowStore.shared(name, slots, row_bytes, directory)
    except ArenaFull as error:
        log.warning("rows are sent as frames, which is slower than shared memory", reason=str(error))
        return RowStore.private(data_address, slots, row_bytes)


# Remembers which row of each sample a worker keeps, until the sample is released.


class RowRetention:
    """Keeps the place of one row of each sample until the sample is released, because no caller may know a place: an
    answer can cross the end of its call. A release costs as much as it releases, whatever else is kept."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[int, tuple[int, Place]]] = {}
        self._oldest = 0
        self._late: set[int] = set()
        """Groups that had finished before their row was stored, for a call can outlive its group for a moment."""

    def add(self, sample: SampleName, place: Place) -> list[Place]:
        """Returns the places to free: the row of an earlier attempt or call, or the new row itself when a later attempt
        has one."""
        group, member, attempt = sample
        members = self._groups.setdefault(group, {})
        newest, before = members.get(member, (attempt, None))
        if newest > attempt:
            return [place]
        members[member] = attempt, place
        if 0 <= group < self._oldest:
            self._late.add(group)
        return [] if before is None else [before]

    def release(self, samples: Iterable[SampleName], oldest: int) -> list[Place]:
        """Forgets these samples in these and earlier attempts, and all groups from 0 up to, without, `oldest`; returns
        their places, to be freed."""
        released = []
        for group, member, attempt in samples:
            members = self._groups.get(group, {})
            if member in members and members[member][0] <= attempt:
                released.append(members.pop(member)[1])
                if not members:
                    del self._groups[group]
        for group in self._groups_before(oldest):
            released += [place for _, place in self._groups.pop(group).values()]
        return released

    def _groups_before(self, oldest: int) -> list[int]:
        """Returns the groups of the run before this one; each number is looked up once, or the groups if those are
        fewer."""
        late = self._late
        numbers = range(self._oldest, oldest)
        self._late = set()
        self._oldest = max(self._oldest, oldest)
        if len(numbers) > len(self._groups):
            return [group for group in self._groups if 0 <= group < self._oldest]
        return [group for group in (*sorted(late), *numbers) if group in self._groups]

    def attempts(self) -> dict[tuple[int, int], int]:
        """Returns the attempt of each (group, member) that has a row here."""
        return {
            (group, member): attempt
            for group, members in self._groups.items()
            for member, (attempt, _) in members.items()
        }

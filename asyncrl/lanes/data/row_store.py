"""Rows are stored by the worker that made them; others copy them by reference.

    owner                                                          readers
    SharedRows  one slot per row in a segment of shared memory     map it, copy, check the slot's write_count again
    HeapRows    one dict per row in the owner's memory             fetch frames over the owner's data lane

There are no leases and no reference counts. A slot's write_count counts its writes; a reader that finds another count
than its `Place` names raises LostRows, and so does a reader whose owner is gone.

A segment holds a header, then `slots` times [write_count | number of columns | (dtype, length) per column | data,
8-aligned]. The write_count is odd from the moment a slot is freed until it was written again; that is so long before
its bytes change that readers need no memory barrier to see it.
"""

import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from asyncrl.errors import ArenaFull, LostRows
from asyncrl.lanes.shared_memory import SHARED_MEMORY, TWO_THREAD_BYTES, Segment, copy_in_two_threads
from asyncrl.protocols.batch import Array, Batch, Column, Place

ROW_DTYPES = tuple(np.dtype(name) for name in ("<f4", "<i4", "u1", "<i8"))
MAX_COLUMNS = 16
SHARED_SCHEME = "shm://"
_CODES = {dtype: code for code, dtype in enumerate(ROW_DTYPES)}
_MAGIC = 0x0053574F52435341
_WORD = struct.Struct("=q")
_TABLES = tuple(struct.Struct(f"={1 + 2 * columns}q") for columns in range(MAX_COLUMNS + 1))
"""Layouts of [number of columns, then dtype and length of each]."""

_HEADER_WORDS = 4  # magic, slots, bytes of a slot, reserved
_SLOT_WORDS = 2 + 2 * MAX_COLUMNS

log = structlog.get_logger(__name__)


class RowStore(Protocol):
    """Stores rows on the owner's side, in a fixed number of slots."""

    address: str

    @property
    def exhausted(self) -> int:
        """Number of rows refused because every slot was in use."""
        ...

    def put(self, columns: Mapping[str, Array]) -> Place:
        """Stores one row, [length] values per column, dtypes of ROW_DTYPES. Raises ArenaFull (see `exhausted`)."""
        ...

    def free(self, places: Iterable[Place]) -> None:
        """Frees these slots; ignores places of other owners and places that were freed before."""
        ...

    def read(self, place: Place, columns: Sequence[str]) -> list[Array]:
        """Returns these columns in memory that no later row overwrites. Raises LostRows when the row was freed."""
        ...

    @property
    def used(self) -> int:
        """Number of slots in use."""
        ...

    def close(self) -> None: ...


def bytes_of_slot(columns: Mapping[str, tuple[np.dtype[Any], int]]) -> int:
    """Returns the bytes of the longest row. columns: dtype and greatest length of each."""
    return sum(_aligned(np.dtype(dtype).itemsize * length) for dtype, length in columns.values())


def open_rows(
    name: str, slots: int, slot_bytes: int, heap_address: str, directory: Path = SHARED_MEMORY
) -> "SharedRows | HeapRows":
    """Opens rows in the new segment `name`, or in the heap when there is too little shared memory (see HeapRows)."""
    try:
        return SharedRows(name, slots, slot_bytes, directory)
    except ArenaFull as error:
        log.warning("rows are sent as frames, which is slower than shared memory", reason=str(error))
        return HeapRows(heap_address, slots, slot_bytes)


def _lost(place: Place) -> LostRows:
    return LostRows(f"slot {place.slot} of {place.owner} no longer holds the row of write_count {place.write_count}")


def _aligned(size: int) -> int:
    return -(-size // 8) * 8


def _check_row(columns: Mapping[str, Array], slot_bytes: int) -> None:
    for name, values in columns.items():
        if values.ndim != 1 or values.dtype not in _CODES:
            allowed = ", ".join(str(dtype) for dtype in ROW_DTYPES)
            raise ValueError(
                f"column {name!r} is {values.dtype} {list(values.shape)}; rows are one of {allowed}, [length]"
            )
    size = sum([_aligned(values.nbytes) for values in columns.values()])
    if size > slot_bytes or len(columns) > MAX_COLUMNS:
        raise ValueError(f"a row of {size} bytes in {len(columns)} columns; a slot takes {slot_bytes} in {MAX_COLUMNS}")


class _Slots:
    """Free slots, reused in the order in which they were freed, so that late readers find their rows for longest."""

    def __init__(self, slots: int) -> None:
        self.count = slots
        self.free: deque[int] = deque(range(slots))
        self.exhausted = 0

    def take(self, address: str) -> int:
        if not self.free:
            self.exhausted += 1
            raise ArenaFull(f"all {self.count} row slots of {address} are in use: more rows were admitted than fit")
        return self.free.popleft()


class SharedTable:
    """Reads and writes the layout of a segment of rows, for its owner and for its readers."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        header = segment.array(0, np.int64, _HEADER_WORDS)
        if header[0] != _MAGIC or segment.size < self.size(int(header[1]), int(header[2])):
            raise LostRows(f"{segment.name} holds no rows")
        self.slots = int(header[1])
        self.slot_bytes = int(header[2])
        self._bytes = segment.buffer

    @staticmethod
    def size(slots: int, slot_bytes: int) -> int:
        return 8 * _HEADER_WORDS + slots * (8 * _SLOT_WORDS + slot_bytes)

    @classmethod
    def create(cls, name: str, slots: int, slot_bytes: int, directory: Path) -> "SharedTable":
        segment = Segment.create(name, cls.size(slots, slot_bytes), directory)
        segment.array(0, np.int64, _HEADER_WORDS)[:] = (_MAGIC, slots, slot_bytes, 0)
        table = cls(segment)
        for slot in range(slots):
            table.words(slot)[0] = 1
        return table

    def _start(self, slot: int) -> int:
        return 8 * _HEADER_WORDS + slot * (8 * _SLOT_WORDS + self.slot_bytes)

    def words(self, slot: int) -> NDArray[np.int64]:
        """Returns a view of write_count, number of columns, then dtype and length of each column."""
        return self.segment.array(self._start(slot), np.int64, _SLOT_WORDS)

    def _write_count(self, slot: int) -> int:
        return _WORD.unpack_from(self._bytes, self._start(slot))[0]  # type: ignore[no-any-return]

    def write(self, slot: int, columns: Sequence[Array]) -> int:
        """Fills a free slot; returns its new write_count."""
        start = self._start(slot)
        offset, table = start + 8 * _SLOT_WORDS, [len(columns)]
        for values in columns:
            table += (_CODES[values.dtype], len(values))
            if values.nbytes >= TWO_THREAD_BYTES:
                copy_in_two_threads(self.segment.array(offset, values.dtype, len(values)), values)
            elif len(values):
                self._bytes[offset : offset + values.nbytes] = np.ascontiguousarray(values).data.cast("B")
            offset += _aligned(values.nbytes)
        _TABLES[len(columns)].pack_into(self._bytes, start + 8, *table)
        write_count = self._write_count(slot) + 1
        _WORD.pack_into(self._bytes, start, write_count)
        return write_count

    def holds(self, place: Place) -> bool:
        return 0 <= place.slot < self.slots and self._write_count(place.slot) == place.write_count

    def check(self, place: Place) -> None:
        if not self.holds(place):
            raise _lost(place)

    def views(self, place: Place, columns: Sequence[str]) -> list[Array]:
        """Returns views of the columns; what is read from them counts only if `check` passes afterwards."""
        self.check(place)
        start = self._start(place.slot)
        count, *table = _TABLES[min(len(place.columns), MAX_COLUMNS)].unpack_from(self._bytes, start + 8)
        found, offset, most = {}, start + 8 * _SLOT_WORDS, self.slot_bytes
        for name, code, length in zip(place.columns, table[::2], table[1::2], strict=False):
            # The table may be overwritten while it is read: do not trust it.
            dtype = ROW_DTYPES[code] if count == len(place.columns) and 0 <= code < len(ROW_DTYPES) else None
            if dtype is None or not 0 <= (size := length * dtype.itemsize) <= most:
                raise LostRows(f"slot {place.slot} of {place.owner} was overwritten while it was read")
            if name in columns:
                found[name] = np.frombuffer(self._bytes, dtype, length, offset)
            offset += -(-size // 8) * 8
        return [found[name] for name in columns]

    def close(self) -> None:
        """Closes the segment; memory with views stays mapped until they are gone."""
        with suppress(BufferError):
            self._bytes.release()
        self.segment.close()


class SharedRows:
    """Stores rows in a segment of shared memory that every process of this user can map. See RowStore.

    Raises ArenaFull when there is too little shared memory.
    """

    def __init__(self, name: str, slots: int, slot_bytes: int, directory: Path = SHARED_MEMORY) -> None:
        self._table = SharedTable.create(name, slots, _aligned(slot_bytes), directory)
        self._slots = _Slots(slots)
        self.address = SHARED_SCHEME + name

    @property
    def exhausted(self) -> int:
        return self._slots.exhausted

    @property
    def used(self) -> int:
        return self._slots.count - len(self._slots.free)

    def put(self, columns: Mapping[str, Array]) -> Place:
        _check_row(columns, self._table.slot_bytes)
        slot = self._slots.take(self.address)
        write_count = self._table.write(slot, list(columns.values()))
        return Place(self.address, slot, write_count, tuple(columns))

    def free(self, places: Iterable[Place]) -> None:
        for place in places:
            if place.owner == self.address and self._table.holds(place):
                self._table.words(place.slot)[0] += 1
                self._slots.free.append(place.slot)

    def read(self, place: Place, columns: Sequence[str]) -> list[Array]:
        copies = [view.copy() for view in self._table.views(place, columns)]
        self._table.check(place)
        return copies

    def close(self) -> None:
        self._table.segment.unlink()
        self._table.close()


class HeapRows:
    """Stores rows in the owner's memory, with the bounds of SharedRows; the data lane serves them. See RowStore.

    address: of the data lane, then `#` and the owner's instance, so that readers never ask a successor for these rows.
    """

    def __init__(self, address: str, slots: int, slot_bytes: int) -> None:
        self.address = address
        self._slots = _Slots(slots)
        self._slot_bytes = slot_bytes
        self._rows: dict[int, dict[str, Array]] = {}
        self._write_counts = [0] * slots

    @property
    def exhausted(self) -> int:
        return self._slots.exhausted

    @property
    def used(self) -> int:
        return len(self._rows)

    def put(self, columns: Mapping[str, Array]) -> Place:
        _check_row(columns, self._slot_bytes)
        slot = self._slots.take(self.address)
        self._write_counts[slot] += 1
        self._rows[slot] = {name: values.copy() for name, values in columns.items()}
        return Place(self.address, slot, self._write_counts[slot], tuple(columns))

    def _holds(self, place: Place) -> bool:
        return place.slot in self._rows and self._write_counts[place.slot] == place.write_count

    def free(self, places: Iterable[Place]) -> None:
        for place in places:
            if place.owner == self.address and self._holds(place):
                del self._rows[place.slot]
                self._slots.free.append(place.slot)

    def read(self, place: Place, columns: Sequence[str]) -> list[Array]:
        if not self._holds(place):
            raise _lost(place)
        return [self._rows[place.slot][name] for name in columns]

    def close(self) -> None:
        self._rows.clear()


def fetch(store: RowStore, places: Sequence[Place], columns: Sequence[str]) -> Batch:
    """Returns these rows in this order, for the owner's data lane. Raises LostRows."""
    rows = [store.read(place, columns) for place in places]
    return Batch({name: Column.of([row[index] for row in rows]) for index, name in enumerate(columns)})

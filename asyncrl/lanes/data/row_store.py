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
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from asyncrl.errors import ArenaFull, LostRows
from asyncrl.lanes.shared_memory import SHARED_MEMORY, TWO_THREAD_BYTES, Segment, copy_in_two_threads
from asyncrl.protocols.batch import Array, Place, SampleName

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


def bytes_of_slot(columns: Mapping[str, tuple[np.dtype[Any], int]]) -> int:
    """Returns the bytes of the longest row. columns: dtype and greatest length of each."""
    return sum(_aligned(np.dtype(dtype).itemsize * length) for dtype, length in columns.values())


def _lost(place: Place) -> LostRows:
    return LostRows(f"slot {place.slot} of {place.owner} no longer holds the row of write_count {place.write_count}")


def _aligned(size: int) -> int:
    return -(-size // 8) * 8


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

    def write(self, slot: int, columns: Collection[Array]) -> int:
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


class RowStore(ABC):
    """Stores rows on the owner's side, in a fixed number of slots.

    exhausted: number of rows refused because every slot was in use.
    """

    def __init__(self, address: str, slots: int, slot_bytes: int) -> None:
        self.address = address
        self.exhausted = 0
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._free = deque(range(slots))
        """Slots are reused in the order in which they were freed, so that late readers find their rows for longest."""

    @property
    def used(self) -> int:
        """Number of slots in use."""
        return self._slots - len(self._free)

    def put(self, columns: Mapping[str, Array]) -> Place:
        """Stores one row, [length] values per column, dtypes of ROW_DTYPES. Raises ArenaFull (see `exhausted`)."""
        self._check(columns)
        if not self._free:
            self.exhausted += 1
            raise ArenaFull(
                f"all {self._slots} row slots of {self.address} are in use: more rows were admitted than fit"
            )
        slot = self._free.popleft()
        return Place(self.address, slot, self._write(slot, columns), tuple(columns))

    def free(self, places: Iterable[Place]) -> None:
        """Frees these slots; ignores places of other owners and places that were freed before."""
        for place in places:
            if place.owner == self.address and self._holds(place):
                self._erase(place.slot)
                self._free.append(place.slot)

    def _check(self, columns: Mapping[str, Array]) -> None:
        for name, values in columns.items():
            if values.ndim != 1 or values.dtype not in _CODES:
                allowed = ", ".join(str(dtype) for dtype in ROW_DTYPES)
                raise ValueError(
                    f"column {name!r} is {values.dtype} {list(values.shape)}; rows are one of {allowed}, [length]"
                )
        size = sum([_aligned(values.nbytes) for values in columns.values()])
        if size > self._slot_bytes or len(columns) > MAX_COLUMNS:
            raise ValueError(
                f"a row of {size} bytes in {len(columns)} columns; a slot takes {self._slot_bytes} in {MAX_COLUMNS}"
            )

    @abstractmethod
    def read(self, place: Place, columns: Sequence[str]) -> list[Array]:
        """Returns these columns in memory that no later row overwrites. Raises LostRows when the row was freed."""

    @abstractmethod
    def _write(self, slot: int, columns: Mapping[str, Array]) -> int:
        """Fills a free slot; returns its new write_count."""

    @abstractmethod
    def _holds(self, place: Place) -> bool: ...

    @abstractmethod
    def _erase(self, slot: int) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class SharedRows(RowStore):
    """Stores rows in a segment of shared memory that every process of this user can map.

    Raises ArenaFull when there is too little shared memory.
    """

    def __init__(self, name: str, slots: int, slot_bytes: int, directory: Path = SHARED_MEMORY) -> None:
        super().__init__(SHARED_SCHEME + name, slots, _aligned(slot_bytes))
        self._table = SharedTable.create(name, slots, self._slot_bytes, directory)

    def read(self, place: Place, columns: Sequence[str]) -> list[Array]:
        copies = [view.copy() for view in self._table.views(place, columns)]
        self._table.check(place)
        return copies

    def _write(self, slot: int, columns: Mapping[str, Array]) -> int:
        return self._table.write(slot, columns.values())

    def _holds(self, place: Place) -> bool:
        return self._table.holds(place)

    def _erase(self, slot: int) -> None:
        self._table.words(slot)[0] += 1

    def close(self) -> None:
        self._table.segment.unlink()
        self._table.close()


class HeapRows(RowStore):
    """Stores rows in the owner's memory, with the bounds of SharedRows; the data lane serves them.

    address: of the data lane, then `#` and the owner's instance, so that readers never ask a successor for these rows.
    """

    def __init__(self, address: str, slots: int, slot_bytes: int) -> None:
        super().__init__(address, slots, slot_bytes)
        self._rows: dict[int, dict[str, Array]] = {}
        self._write_counts = [0] * slots

    def read(self, place: Place, columns: Sequence[str]) -> list[Array]:
        if not self._holds(place):
            raise _lost(place)
        return [self._rows[place.slot][name] for name in columns]

    def _write(self, slot: int, columns: Mapping[str, Array]) -> int:
        self._write_counts[slot] += 1
        self._rows[slot] = {name: values.copy() for name, values in columns.items()}
        return self._write_counts[slot]

    def _holds(self, place: Place) -> bool:
        return place.slot in self._rows and self._write_counts[place.slot] == place.write_count

    def _erase(self, slot: int) -> None:
        del self._rows[slot]

    def close(self) -> None:
        self._rows.clear()


def open_rows(name: str, slots: int, slot_bytes: int, heap_address: str, directory: Path = SHARED_MEMORY) -> RowStore:
    """Opens rows in the new segment `name`, or in the heap when there is too little shared memory (see HeapRows)."""
    try:
        return SharedRows(name, slots, slot_bytes, directory)
    except ArenaFull as error:
        log.warning("rows are sent as frames, which is slower than shared memory", reason=str(error))
        return HeapRows(heap_address, slots, slot_bytes)


class RowRetention:
    """Keeps the place of one row of each sample until the sample is released.

    Rows are freed by sample, because no caller may know a place: an answer can cross the end of its call.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], tuple[int, Place]] = {}

    def add(self, sample: SampleName, place: Place) -> list[Place]:
        """Returns the places to free: the row of an earlier attempt or call, or the new row itself when a later attempt
        has one."""
        group, member, attempt = sample
        newest, before = self._places.get((group, member), (attempt, None))
        if newest > attempt:
            return [place]
        self._places[group, member] = attempt, place
        return [] if before is None else [before]

    def release(self, samples: Iterable[SampleName], oldest: int) -> list[Place]:
        """Forgets these samples in these and earlier attempts, and all groups from 0 up to, without, `oldest`.

        Returns their places, to be freed.
        """
        keys = [(group, member) for group, member, attempt in samples if self._attempt(group, member) <= attempt]
        keys += [(group, member) for group, member in self._places if 0 <= group < oldest]
        return [self._places.pop(key)[1] for key in dict.fromkeys(keys) if key in self._places]

    def attempts(self) -> dict[tuple[int, int], int]:
        """Returns the attempt of each (group, member) that has a row here."""
        return {key: attempt for key, (attempt, _) in self._places.items()}

    def _attempt(self, group: int, member: int) -> int:
        return self._places[group, member][0] if (group, member) in self._places else 0

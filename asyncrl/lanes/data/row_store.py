"""Rows are stored by the worker that made them; others copy them by reference.

    owner                                                  readers
    RowStore.shared   in a segment of shared memory        map it, copy, check the slot's write_count again
    RowStore.private  in memory of the owner's process     fetch frames over the owner's data lane

There are no leases and no reference counts. A slot's write_count counts its writes; a reader that finds another count
than its `Place` names raises LostRows, and so does a reader whose owner is gone.

The memory holds a header, then `slots` times [write_count | number of columns | (dtype, length) per column | data,
8-aligned]. The write_count is even from the moment a slot is freed until it was written again; that is so long before
its bytes change that readers need no memory barrier to see it.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import structlog

from asyncrl.errors import ArenaFull, LostRows
from asyncrl.lanes.shared_memory import SHARED_MEMORY, SHARED_SCHEME, TWO_THREAD_BYTES, Segment, copy_in_two_threads
from asyncrl.protocols.batch import Array, Place, SampleName

ROW_DTYPES = tuple(np.dtype(name) for name in ("<f4", "<i4", "u1", "<i8"))
MAX_COLUMNS = 16
_ITEM_BYTES = {code: dtype.itemsize for code, dtype in enumerate(ROW_DTYPES)}
_CODES = {dtype: code for code, dtype in enumerate(ROW_DTYPES)}
_MAGIC = 0x0053574F52435341
_HEADER = 8 * 4
"""Magic, slots, bytes of a slot, reserved."""

_SLOT_HEADER = 8 * (2 + 2 * MAX_COLUMNS)

log = structlog.get_logger(__name__)


def bytes_of_slot(columns: Mapping[str, tuple[np.dtype[Any], int]]) -> int:
    """Returns the bytes of the longest row. columns: dtype and greatest length of each."""
    return sum(_aligned(np.dtype(dtype).itemsize * length) for dtype, length in columns.values())


def _aligned(size: int) -> int:
    return (size + 7) & -8


def _size(slots: int, slot_bytes: int) -> int:
    return _HEADER + slots * (_SLOT_HEADER + _aligned(slot_bytes))


class RowTable:
    """Reads rows out of a block of memory. Raises LostRows for memory that holds none."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._arrays = [np.frombuffer(segment.buffer, dtype, segment.size // dtype.itemsize) for dtype in ROW_DTYPES]
        """The whole memory as values of each dtype, words last: a slice of one costs a third of another view."""

        header: list[int] = self._arrays[-1][:4].tolist()
        magic, self.slots, self.slot_bytes, _ = header
        if magic != _MAGIC or segment.size < _size(self.slots, self.slot_bytes):
            raise LostRows(f"{segment.path} holds no rows")

    def views(self, place: Place, columns: Sequence[str]) -> list[Array]:
        """Returns views of the columns; what is read from them counts only if `check` passes afterwards."""
        self.check(place)
        names, most = place.columns, self.slot_bytes
        start = self._start(place.slot)
        count, *table = self._arrays[-1][start // 8 + 1 : start // 8 + 2 * len(names) + 2].tolist()
        found, offset = {}, start + _SLOT_HEADER
        for name, code, length in zip(names, table[::2], table[1::2], strict=False):
            # The table may be overwritten while it is read: do not trust it.
            item = _ITEM_BYTES.get(code, 0)
            if not item or not 0 <= (size := length * item) <= most or count != len(names):
                raise LostRows(f"slot {place.slot} of {place.owner} was overwritten while it was read")
            if name in columns:
                first = offset // item
                found[name] = self._arrays[code][first : first + length]
            offset += (size + 7) & -8
        return [found[name] for name in columns]

    def check(self, place: Place) -> None:
        if not self.holds(place):
            raise LostRows(
                f"slot {place.slot} of {place.owner} no longer holds the row of write_count {place.write_count}"
            )

    def holds(self, place: Place) -> bool:
        slot, count = place.slot, place.write_count
        return 0 <= slot < self.slots and count % 2 == 1 and self._write_count(slot) == count

    def _start(self, slot: int) -> int:
        return _HEADER + slot * (_SLOT_HEADER + self.slot_bytes)

    def _write_count(self, slot: int) -> int:
        return int(self._arrays[-1].item(self._start(slot) // 8))

    def close(self) -> None:
        """Closes the segment; memory with views stays mapped until they are gone."""
        self._arrays.clear()
        self.segment.close()


class RowStore(RowTable):
    """Stores rows on the owner's side, in a fixed number of slots."""

    def __init__(self, address: str, segment: Segment, slots: int, slot_bytes: int) -> None:
        np.frombuffer(segment.buffer, np.int64, 4)[:] = (_MAGIC, slots, _aligned(slot_bytes), 0)
        super().__init__(segment)
        self.address = address
        self._free = deque(range(slots))
        """Slots are reused in the order in which they were freed, so that late readers find their rows for longest."""

    @classmethod
    def shared(cls, name: str, slots: int, slot_bytes: int, directory: Path = SHARED_MEMORY) -> Self:
        """Stores rows in the new segment `name`, which every process of this user can map. Raises ArenaFull when there
        is too little shared memory."""
        segment = Segment.create(name, _size(slots, slot_bytes), directory)
        return cls(SHARED_SCHEME + name, segment, slots, slot_bytes)

    @classmethod
    def private(cls, address: str, slots: int, slot_bytes: int) -> Self:
        """Stores rows in memory of this process; the data lane serves them.

        address: of the data lane, then `#` and the owner's instance, so that readers never ask a successor for them.
        """
        return cls(address, Segment.private(_size(slots, slot_bytes)), slots, slot_bytes)

    @property
    def used(self) -> int:
        """Number of slots in use."""
        return self.slots - len(self._free)

    def put(self, columns: Mapping[str, Array]) -> Place:
        """Stores one row, [length] values per column, dtypes of ROW_DTYPES. Raises ArenaFull when no slot is free."""
        self._check_row(columns)
        if not self._free:
            raise ArenaFull(
                f"all {self.slots} row slots of {self.address} are in use: more rows were admitted than fit"
            )
        slot = self._free.popleft()
        self._write(slot, columns.values())
        return Place(self.address, slot, self._count_write(slot), tuple(columns))

    def free(self, places: Iterable[Place]) -> None:
        """Frees these slots; ignores places of other owners and places that were freed before."""
        for place in places:
            if place.owner == self.address and self.holds(place):
                self._count_write(place.slot)
                self._free.append(place.slot)

    def read(self, place: Place, columns: Sequence[str]) -> list[Array]:
        """Returns copies of these columns. Raises LostRows when the row was freed."""
        copies = [view.copy() for view in self.views(place, columns)]
        self.check(place)
        return copies

    def _check_row(self, columns: Mapping[str, Array]) -> None:
        for name, values in columns.items():
            if values.ndim != 1 or values.dtype not in _CODES:
                allowed = ", ".join(str(dtype) for dtype in ROW_DTYPES)
                raise ValueError(
                    f"column {name!r} is {values.dtype} {list(values.shape)}; rows are one of {allowed}, [length]"
                )
        size = sum([_aligned(values.nbytes) for values in columns.values()])
        if size > self.slot_bytes or len(columns) > MAX_COLUMNS:
            raise ValueError(
                f"a row of {size} bytes in {len(columns)} columns; a slot takes {self.slot_bytes} in {MAX_COLUMNS}"
            )

    def _write(self, slot: int, columns: Collection[Array]) -> None:
        start = self._start(slot)
        offset, table = start + _SLOT_HEADER, [len(columns)]
        for values in columns:
            code, first, length = _CODES[values.dtype], offset // values.itemsize, len(values)
            table += (code, length)
            if values.nbytes < TWO_THREAD_BYTES:
                self._arrays[code][first : first + length] = values
            else:
                copy_in_two_threads(self._arrays[code][first : first + length], values)
            offset += (values.nbytes + 7) & -8
        self._arrays[-1][start // 8 + 1 : start // 8 + 1 + len(table)] = table

    def _count_write(self, slot: int) -> int:
        """Raises the slot's write_count by one, which makes it odd for a row and even for a free slot."""
        self._arrays[-1][self._start(slot) // 8] += 1
        return self._write_count(slot)

    def close(self) -> None:
        """Removes a segment. Private rows go with this store, because the data lane ends after the service."""
        if self.segment.path is not None:
            self.segment.unlink()
            super().close()


def open_rows(name: str, slots: int, slot_bytes: int, data_address: str, directory: Path = SHARED_MEMORY) -> RowStore:
    """Opens shared rows in the new segment `name`, or private ones when there is too little shared memory."""
    try:
        return RowStore.shared(name, slots, slot_bytes, directory)
    except ArenaFull as error:
        log.warning("rows are sent as frames, which is slower than shared memory", reason=str(error))
        return RowStore.private(data_address, slots, slot_bytes)


class RowRetention:
    """Keeps the place of one row of each sample until the sample is released, because no caller may know a place: an
    answer can cross the end of its call."""

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
        """Forgets these samples in these and earlier attempts, and all groups from 0 up to, without, `oldest`; returns
        their places, to be freed."""
        last = {(group, member): attempt for group, member, attempt in sorted(samples)}
        released = [
            key
            for key, (attempt, _) in self._places.items()
            if attempt <= last.get(key, attempt - 1) or 0 <= key[0] < oldest
        ]
        return [self._places.pop(key)[1] for key in released]

    def attempts(self) -> dict[tuple[int, int], int]:
        """Returns the attempt of each (group, member) that has a row here."""
        return {key: attempt for key, (attempt, _) in self._places.items()}

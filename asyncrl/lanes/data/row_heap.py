"""Hands out ranges of memory for rows of any length, in amortised constant time.

A two-level segregated fit (Masmano, Ripoll, Crespo, Real: TLSF, ECRTS 2004): free ranges stand in bins of similar size,
and a bitmap finds the first bin whose ranges are all long enough. A range that comes back waits for a row of its
size; the first row of another size joins all that wait with their free neighbours.
"""

from collections import deque

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
    """The free ranges of memory from 0 to `size`. used: bytes of the ranges that are handed out."""

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

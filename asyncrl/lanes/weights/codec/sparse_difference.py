"""The elements of a buffer that differ from those of a base, as positions and new values. Exact for any bits.

    counts of differences, uint32 each block | positions within the block, uint16 each | values, 2 or 4 bytes each

A block has 65,536 elements, so that a position takes two bytes. Comparing words of eight bytes, in parts that stay in
the cache, costs about as much as copying them; only words that differ are looked at again.
"""

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import WeightsError

Bytes = NDArray[np.uint8]
Indices = NDArray[np.int64]

BLOCK = 1 << 16
"""Elements of a block."""

PART_BYTES = 512 << 10
"""Bytes compared at once: both parts and the result fit the cache of a core. A multiple of BLOCK elements."""

WORD = 8
PAYS = 0.5
"""Share of the dense bytes up to which a difference is sent: above it, encoding costs more than it saves."""

Element = np.dtype[np.uint16] | np.dtype[np.uint32]

_ELEMENTS: dict[int, Element] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


def encode_difference(new: Bytes, base: Bytes, item_bytes: int) -> Bytes | None:
    """Returns the difference, or None when it would have more than PAYS of the bytes of `new`.

    new, base: contiguous buffers of one size, a multiple of `item_bytes`, which is 2 or 4.
    """
    element = _ELEMENTS[item_bytes]
    blocks = -(-len(new) // (BLOCK * item_bytes))
    most = (PAYS * len(new) - 4 * blocks) / (2 + item_bytes)
    found, counts, values = [], [np.empty(0, "<u4")], []
    total = 0
    for start in range(0, len(new), PART_BYTES):
        part, old = new[start : start + PART_BYTES], base[start : start + PART_BYTES]
        places, changed = _differences(part, old, element)
        total += len(places)
        if total > most:
            return None
        ends = np.arange(BLOCK, -(-len(part) // item_bytes) + BLOCK, BLOCK)
        counts.append(np.diff(np.searchsorted(places, ends), prepend=0).astype("<u4"))
        found.append(places.astype("<u2"))  # Wraps to the position within the block.
        values.append(changed)
    if most < 0:
        return None
    return np.concatenate([_raw(each) for each in (*counts, *found, *values)])


def apply_difference(data: Bytes, target: Bytes, item_bytes: int) -> None:
    """Overwrites the elements of `target`, which holds the base, that the difference names. Raises WeightsError for
    bytes that `encode_difference` would not have made for a buffer of this size."""
    element, elements = _ELEMENTS[item_bytes], len(target) // item_bytes
    blocks = -(-elements // BLOCK)
    if len(data) < 4 * blocks:
        raise WeightsError(f"a difference of {len(data)} bytes has no counts for {blocks} blocks")
    counts = data[: 4 * blocks].view("<u4").astype(np.int64)
    total = int(counts.sum())
    if len(data) != 4 * blocks + total * (2 + item_bytes):
        raise WeightsError(f"a difference of {len(data)} bytes does not hold the {total} elements that it counts")
    positions = data[4 * blocks : 4 * blocks + 2 * total].view("<u2")
    indices = np.repeat(np.arange(blocks) * BLOCK, counts) + positions
    if total and int(indices.max()) >= elements:
        raise WeightsError(f"a difference names element {int(indices.max())} of {elements}")
    target.view(element)[indices] = data[4 * blocks + 2 * total :].view(element)


def _differences(new: Bytes, base: Bytes, element: Element) -> tuple[Indices, Bytes]:
    """Returns which elements differ, and their new values."""
    each = WORD // element.itemsize
    whole = len(new) // WORD * WORD
    one, other = new[:whole].view("<u8"), base[:whole].view("<u8")
    words = np.flatnonzero(one != other)
    ahead = one[words]
    inside = np.flatnonzero((ahead ^ other[words]).view(element))
    places = words[inside // each] * each + inside % each
    values = ahead.view(element)[inside]
    if whole < len(new):
        rest, before = new[whole:].view(element), base[whole:].view(element)
        more = np.flatnonzero(rest != before)
        places = np.concatenate([places, more + whole // element.itemsize])
        values = np.concatenate([values, rest[more]])
    return places, _raw(values)


def _raw(array: NDArray[np.generic]) -> Bytes:
    return array.view(np.uint8)

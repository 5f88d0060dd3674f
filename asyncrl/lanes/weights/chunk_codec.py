"""A part of a slot in the form that crosses a network.

    a part of a slot ── encode_chunk ── kind, data, digest of the data, digest of what must result ── decode_chunk

Every codec falls back to dense bytes: a difference that has no base or does not pay, weights that rounding would make
infinite or whose bits it would change beyond its bound.
"""

import zlib
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from asyncrl.errors import WeightsError
from asyncrl.lanes.weights.slot_memory import DTYPES

# The elements of a buffer that differ from those of a base, as positions and new values. Exact for any bits.
#
#     counts of differences, uint32 each block | positions within the block, uint16 each | values, 2 or 4 bytes each
#
# A block has 65,536 elements, so that a position takes two bytes. Comparing words of eight bytes, in parts that stay
# in the cache, costs about as much as copying them; only words that differ are looked at again.


Bytes = NDArray[np.uint8]
Indices = NDArray[np.int64]

DIFFERENCE_BLOCK = 1 << 16
"""Elements of a block."""

PART_BYTES = 512 << 10
"""Bytes compared at once: both parts and the result fit the cache of a core. A multiple of DIFFERENCE_BLOCK."""

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
    blocks = -(-len(new) // (DIFFERENCE_BLOCK * item_bytes))
    most = (PAYS * len(new) - 4 * blocks) / (2 + item_bytes)
    found = []
    counts = [np.empty(0, "<u4")]
    values = []
    total = 0
    for start in range(0, len(new), PART_BYTES):
        part = new[start : start + PART_BYTES]
        old = base[start : start + PART_BYTES]
        places, changed = _differences(part, old, element)
        total += len(places)
        if total > most:
            return None
        ends = np.arange(DIFFERENCE_BLOCK, -(-len(part) // item_bytes) + DIFFERENCE_BLOCK, DIFFERENCE_BLOCK)
        counts.append(np.diff(np.searchsorted(places, ends), prepend=0).astype("<u4"))
        found.append(places.astype("<u2"))  # Wraps to the position within the block.
        values.append(changed)
    if most < 0:
        return None
    return np.concatenate([_raw(each) for each in (*counts, *found, *values)])


def apply_difference(data: Bytes, target: Bytes, item_bytes: int) -> None:
    """Overwrites the elements of `target`, which holds the base, that the difference names. Raises WeightsError for
    bytes that `encode_difference` would not have made for a buffer of this size."""
    element = _ELEMENTS[item_bytes]
    elements = len(target) // item_bytes
    blocks = -(-elements // DIFFERENCE_BLOCK)
    if len(data) < 4 * blocks:
        raise WeightsError(f"a difference of {len(data)} bytes has no counts for {blocks} blocks")
    counts = data[: 4 * blocks].view("<u4").astype(np.int64)
    total = int(counts.sum())
    if len(data) != 4 * blocks + total * (2 + item_bytes):
        raise WeightsError(f"a difference of {len(data)} bytes does not hold the {total} elements that it counts")
    positions = data[4 * blocks : 4 * blocks + 2 * total].view("<u2")
    indices = np.repeat(np.arange(blocks) * DIFFERENCE_BLOCK, counts) + positions
    if total and int(indices.max()) >= elements:
        raise WeightsError(f"a difference names element {int(indices.max())} of {elements}")
    target.view(element)[indices] = data[4 * blocks + 2 * total :].view(element)


def _differences(new: Bytes, base: Bytes, element: Element) -> tuple[Indices, Bytes]:
    """Returns which elements differ, and their new values."""
    each = WORD // element.itemsize
    whole = len(new) // WORD * WORD
    one = new[:whole].view("<u8")
    other = base[:whole].view("<u8")
    words = np.flatnonzero(one != other)
    ahead = one[words]
    inside = np.flatnonzero((ahead ^ other[words]).view(element))
    places = words[inside // each] * each + inside % each
    values = ahead.view(element)[inside]
    if whole < len(new):
        rest = new[whole:].view(element)
        before = base[whole:].view(element)
        more = np.flatnonzero(rest != before)
        places = np.concatenate([places, more + whole // element.itemsize])
        values = np.concatenate([values, rest[more]])
    return places, _raw(values)


def _raw(array: NDArray[np.generic]) -> Bytes:
    return array.view(np.uint8)


# Elements of float32 as bfloat16 or float16: half the bytes, rounded to nearest, ties to even.
#
# For a weight x in the normal range of the format the error is at most |x| / 2^8 for bfloat16 and |x| / 2^11 for
# float16; below 2^-14, float16 errs by at most 2^-25.


def encode_bfloat16(new: Bytes) -> Bytes:
    """Returns the elements of `new`, float32 and writable, as bfloat16."""
    return torch.from_numpy(new).view(torch.float32).to(torch.bfloat16).view(torch.uint8).numpy()


def encode_float16(new: Bytes) -> Bytes:
    """Returns the elements of `new`, float32, as float16: infinite where they exceed its range."""
    with np.errstate(over="ignore"):
        return new.view("<f4").astype("<f2").view(np.uint8)


def decode_bfloat16(data: Bytes, target: Bytes) -> None:
    """Fills `target` with float32. Raises WeightsError when the data has another number of elements."""
    _check(data, target)
    np.left_shift(data.view("<u2"), 16, out=target.view("<u4"), dtype="<u4")


def decode_float16(data: Bytes, target: Bytes) -> None:
    """Fills `target` with float32. Raises WeightsError when the data has another number of elements."""
    _check(data, target)
    target.view("<f4")[:] = data.view("<f2")


def _check(data: Bytes, target: Bytes) -> None:
    if 2 * len(data) != len(target):
        raise WeightsError(f"{len(data)} bytes of two an element cannot fill {len(target)} bytes of float32")


# Eight bits for each weight: e4m3 (OCP 8-bit floating point), with one power of two for each block of 128 weights.
#
#     exponents of the blocks, int8 each | codes, one byte each, as a Huffman code (raw deflate)
#
# A code x of a block with exponent e stands for x * 2^e. The exponent is the least that keeps the largest weight of
# the block within 448. For a weight w the error is at most |w| (2^-4 + 2^-8) + 2^(e - 10): three bits of mantissa,
# the rounding to bfloat16 on the way, and the spacing of the smallest codes. Codes of trained weights have some 6.5
# bits of entropy, which the Huffman code uses.


BLOCK = 128
"""Weights that share an exponent."""

LARGEST = 448.0
"""The largest code of e4m3."""

LOWEST = -100
HIGHEST = 119
"""Exponents of a block: weights below 448 * 2^-100 keep absolute, not relative, precision; 448 * 2^119 is the range of
float32."""

_RAW_DEFLATE = -15


def encode_fp8(new: Bytes, dtype: torch.dtype) -> Bytes:
    """Returns the codes of the elements of `new`, which are finite and of `dtype`."""
    blocks, scales = _blocks(torch.from_numpy(new).view(dtype).float())
    scaled = (blocks * torch.exp2(-scales.float())[:, None]).to(torch.bfloat16)
    codes = _codes()[scaled.view(torch.uint16).numpy().reshape(-1)[: len(new) // dtype.itemsize]]
    squeeze = zlib.compressobj(1, zlib.DEFLATED, _RAW_DEFLATE, 9, zlib.Z_HUFFMAN_ONLY)
    packed = squeeze.compress(codes.data) + squeeze.flush()
    return np.concatenate([scales.view(torch.uint8).numpy(), np.frombuffer(packed, np.uint8)])


def decode_fp8(data: Bytes, target: Bytes, dtype: torch.dtype) -> None:
    """Fills `target` with elements of `dtype`. Raises WeightsError for bytes that are no code of so many."""
    elements = len(target) // dtype.itemsize
    blocks = -(-elements // BLOCK)
    unpack = zlib.decompressobj(_RAW_DEFLATE)
    try:
        codes = np.frombuffer(unpack.decompress(data[blocks:].tobytes(), elements + 1), np.uint8)
    except zlib.error as wrong:
        raise WeightsError(f"FP8 codes cannot be unpacked: {wrong}") from wrong
    if len(data) < blocks or len(codes) != elements:
        raise WeightsError(f"{len(data)} bytes hold {len(codes)} FP8 codes, not {elements}")
    scales = np.exp2(data[:blocks].view(np.int8).astype(np.float32))
    values = _values()[codes] * np.repeat(scales, BLOCK)[:elements]
    if elements:  # torch cannot view empty memory as another dtype.
        torch.from_numpy(target).view(dtype).copy_(torch.from_numpy(values))


def _blocks(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weights as [blocks, BLOCK], filled up with zeros, and the exponent of each block, int8."""
    padded = torch.nn.functional.pad(weights, (0, -len(weights) % BLOCK)).view(-1, BLOCK)
    _, exponents = torch.frexp(padded.abs().amax(1) / LARGEST)
    return padded, exponents.clamp(LOWEST, HIGHEST).to(torch.int8)


@cache
def _codes() -> Bytes:
    """Returns the code of each of the 65,536 values of bfloat16."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    return every.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


@cache
def _values() -> NDArray[np.float32]:
    """Returns the value of each code."""
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float().numpy()


class WireCodec(IntEnum):
    """Names what the data of a chunk is."""

    DENSE = 0
    SPARSE = 1
    BFLOAT16 = 2
    FLOAT16 = 3
    FP8 = 4


LOSSY = frozenset([WireCodec.BFLOAT16, WireCodec.FLOAT16, WireCodec.FP8])
_ROUND = {WireCodec.BFLOAT16: encode_bfloat16, WireCodec.FLOAT16: encode_float16}


@dataclass(frozen=True, eq=False, slots=True)
class EncodedChunk:
    """One part as it travels. size: bytes of the part. data_digest, result_digest: XXH3 of the data, and of the part
    that the receiver must get. error: root mean square of the rounding errors over that of the weights; 0 if exact."""

    kind: WireCodec
    size: int
    data: Bytes
    data_digest: int
    result_digest: int
    error: float = 0.0


def encode_chunk(codec: WireCodec, new: Bytes, dtype: str, base: Bytes | None = None) -> EncodedChunk:
    """Encodes a part. new: its bytes, contiguous, whole elements of `dtype`, a key of DTYPES. base: the same part of
    the version that the receiver has, which only the sparse codec uses."""
    if codec in LOSSY and (encoded := _encode_lossy(codec, new, DTYPES[dtype])) is not None:
        return encoded
    if codec is WireCodec.SPARSE and base is not None:
        difference = encode_difference(new, base, DTYPES[dtype].itemsize)
        if difference is not None:
            return EncodedChunk(codec, len(new), difference, digest(difference), digest(new))
    own = digest(new)
    return EncodedChunk(WireCodec.DENSE, len(new), new, own, own)


def decode_chunk(chunk: EncodedChunk, dtype: str, target: Bytes, base: Bytes | None = None) -> None:
    """Fills `target` with the part. base: as at the sender; it may be `target` itself.

    Raises WeightsError, and leaves `target` undefined, when the data is damaged, does not fit the part, or does not
    result in what the sender had: then the receiver has another base.
    """
    if chunk.size != len(target):
        raise WeightsError(f"a chunk of {chunk.size} bytes came for {len(target)} bytes of weights")
    if digest(chunk.data) != chunk.data_digest:
        raise WeightsError(f"a chunk of weights was damaged on its way: {len(chunk.data)} bytes have another digest")
    _fill(chunk, DTYPES[dtype], target, base)
    exact = chunk.kind is WireCodec.DENSE  # Its digest was compared above, and copying changes nothing.
    if (chunk.result_digest != chunk.data_digest) if exact else (digest(target) != chunk.result_digest):
        raise WeightsError(f"a {chunk.kind.name.lower()} chunk does not result in the weights that its sender has")


def digest(data: Bytes) -> int:
    return xxh3_64_intdigest(data.data)


def _fill(chunk: EncodedChunk, dtype: torch.dtype, target: Bytes, base: Bytes | None) -> None:
    match chunk.kind:
        case WireCodec.DENSE:
            if len(chunk.data) != len(target):
                raise WeightsError(f"{len(chunk.data)} dense bytes came for {len(target)} bytes of weights")
            np.copyto(target, chunk.data)
        case WireCodec.SPARSE:
            if base is None or len(base) != len(target):
                raise WeightsError("a difference came for a part of which the receiver has no base")
            if base is not target:
                np.copyto(target, base)
            apply_difference(chunk.data, target, dtype.itemsize)
        case WireCodec.FP8:
            decode_fp8(chunk.data, target, dtype)
        case _ if dtype is not torch.float32:
            raise WeightsError(f"a {chunk.kind.name.lower()} chunk came for weights of {dtype}, which has as few bytes")
        case WireCodec.BFLOAT16:
            decode_bfloat16(chunk.data, target)
        case WireCodec.FLOAT16:
            decode_float16(chunk.data, target)


def _encode_lossy(codec: WireCodec, new: Bytes, dtype: torch.dtype) -> EncodedChunk | None:
    """Returns None where dense bytes are as few, or where weights would change by more than the codec's bound: those
    that are not finite, or become so."""
    if not len(new) or (codec is not WireCodec.FP8 and dtype is not torch.float32):
        return None
    weights = torch.from_numpy(new).view(dtype).float()
    if not bool(torch.isfinite(weights).all()):
        return None
    data = encode_fp8(new, dtype) if codec is WireCodec.FP8 else _ROUND[codec](new)
    result = np.empty_like(new)
    _fill(EncodedChunk(codec, len(new), data, 0, 0), dtype, result, None)
    rounded = torch.from_numpy(result).view(dtype).float()
    if len(data) >= len(new) or not bool(torch.isfinite(rounded).all()):
        return None
    power = torch.linalg.vector_norm(weights)
    error = torch.linalg.vector_norm(rounded - weights)
    share = float(error / power) if power else 0.0
    return EncodedChunk(codec, len(new), data, digest(data), digest(result), share)

"""A part of a slot in the form that crosses a network.

    a part of a slot ── encode_chunk ── kind, data, digest of the data, digest of what must result ── decode_chunk

Every codec falls back to dense bytes: a difference that has no base or does not pay, weights that rounding would make
infinite or whose bits it would change beyond its bound.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from asyncrl.errors import WeightsError
from asyncrl.lanes.weights.codec.fp8_blocks import decode_fp8, encode_fp8
from asyncrl.lanes.weights.codec.rounding import decode_bfloat16, decode_float16, encode_bfloat16, encode_float16
from asyncrl.lanes.weights.codec.sparse_difference import apply_difference, encode_difference
from asyncrl.lanes.weights.tensor_spec import DTYPES

Bytes = NDArray[np.uint8]


class WireCodec(IntEnum):
    """Names what the data of a chunk is."""

    DENSE = 0
    SPARSE = 1
    BFLOAT16 = 2
    FLOAT16 = 3
    FP8 = 4


CODECS = {kind.name.lower(): kind for kind in WireCodec}
"""Codecs by the names that a config uses."""

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
    power, error = torch.linalg.vector_norm(weights), torch.linalg.vector_norm(rounded - weights)
    share = float(error / power) if power else 0.0
    return EncodedChunk(codec, len(new), data, digest(data), digest(result), share)

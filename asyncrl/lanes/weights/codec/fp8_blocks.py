"""Eight bits for each weight: e4m3 (OCP 8-bit floating point), with one power of two for each block of 128 weights.

    exponents of the blocks, int8 each | codes, one byte each, as a Huffman code (raw deflate)

A code x of a block with exponent e stands for x * 2^e. The exponent is the least that keeps the largest weight of the
block within 448. For a weight w the error is at most |w| (2^-4 + 2^-8) + 2^(e - 10): three bits of mantissa, the
rounding to bfloat16 on the way, and the spacing of the smallest codes. Codes of trained weights have some 6.5 bits of
entropy, which the Huffman code uses.
"""

import zlib
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.errors import WeightsError

Bytes = NDArray[np.uint8]

BLOCK = 128
"""Weights that share an exponent."""

LARGEST = 448.0
"""The largest code of e4m3."""

LOWEST, HIGHEST = -100, 119
"""Exponents of a block: weights below 448 * 2^-100 keep absolute, not relative, precision; 448 * 2^119 is the range of
float32."""

RELATIVE_ERROR = 2**-4 + 2**-8
SPACING = 2.0**-10
"""Half the distance of the smallest codes."""

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


def error_bound(weights: torch.Tensor) -> torch.Tensor:
    """Returns the largest error of each weight of a flat float32 tensor that is encoded from its first element."""
    _, scales = _blocks(weights)
    spacing = torch.exp2(scales.float()).repeat_interleave(BLOCK)[: len(weights)] * SPACING
    return weights.abs() * RELATIVE_ERROR + spacing


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

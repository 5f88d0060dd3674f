"""Every codec on any bits: what its sender says must arrive arrives, exactly or within the bound of the codec."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from asyncrl.errors import WeightsError
from asyncrl.lanes.weights.chunk_codec import (
    DIFFERENCE_BLOCK,
    LOSSY,
    PART_BYTES,
    EncodedChunk,
    WireCodec,
    _blocks,
    decode_chunk,
    digest,
    encode_chunk,
    encode_difference,
)
from asyncrl.lanes.weights.slot_memory import DTYPES

Bytes = NDArray[np.uint8]
SIZES = st.one_of(
    st.integers(0, 300),
    st.sampled_from([DIFFERENCE_BLOCK - 1, DIFFERENCE_BLOCK, DIFFERENCE_BLOCK + 1, PART_BYTES // 2 + 3]),
)
SPECIAL = {
    "float32": (0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x00000001, 0x7F7FFFFF),
    "bfloat16": (0x8000, 0x7F80, 0xFF80, 0x7FC1, 0x7F81, 0xFFFF, 0x0001, 0x7F7F),
}
"""-0, both infinities, quiet and signalling NaNs with payloads, the least subnormal and the largest finite number."""

BOUNDS = {WireCodec.BFLOAT16: (2.0**-8, 0.0), WireCodec.FLOAT16: (2.0**-11, 2.0**-25)}
"""Relative and absolute error, as chunk_codec.py states them."""


def weights(count: int, dtype: str, seed: int, scale: float = 0.02) -> Bytes:
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(DTYPES[dtype]).view(torch.uint8).numpy().copy()


def any_bits(count: int, dtype: str, seed: int) -> Bytes:
    """Returns random bits, among them every special value."""
    item = DTYPES[dtype].itemsize
    found = np.random.default_rng(seed).integers(0, 256, count * item, np.uint8)
    special = np.array(SPECIAL[dtype][:count], f"<u{item}").view(np.uint8)
    found[: len(special)] = special
    return found


def changed(base: Bytes, dtype: str, share: float, seed: int) -> Bytes:
    """Returns a copy in which about this share of the elements has other bits."""
    item = DTYPES[dtype].itemsize
    new = base.copy()
    rng = np.random.default_rng(seed)
    elements = new.view(f"<u{item}")
    where = np.flatnonzero(rng.random(len(elements)) < share)
    elements[where] ^= rng.integers(1, 1 << 15, len(where)).astype(elements.dtype)
    return new


def received(chunk: EncodedChunk, dtype: str, base: Bytes | None = None) -> Bytes:
    """Decodes a chunk into memory full of other bits, from data that may not be written to."""
    target = np.full(chunk.size, 0xA5, np.uint8)
    chunk.data.flags.writeable = False
    decode_chunk(chunk, dtype, target, base)
    return target


@given(SIZES, st.sampled_from(list(DTYPES)), st.sampled_from(list(WireCodec)), st.integers(0, 9))
def test_any_bits_arrive_or_travel_dense(count: int, dtype: str, codec: WireCodec, seed: int) -> None:
    bits = any_bits(count, dtype, seed)
    chunk = encode_chunk(codec, bits.copy(), dtype, base=~bits)
    assert count < 5 or chunk.kind is WireCodec.DENSE  # Not finite, and every element differs from the base.
    if chunk.kind is WireCodec.DENSE:
        assert np.array_equal(received(chunk, dtype), bits)


@given(SIZES, st.sampled_from(list(DTYPES)), st.sampled_from([0.0, 0.001, 0.05, 0.2]), st.integers(0, 9))
def test_a_difference_is_exact(count: int, dtype: str, share: float, seed: int) -> None:
    base = any_bits(count, dtype, seed)
    new = changed(base, dtype, share, seed)
    chunk = encode_chunk(WireCodec.SPARSE, new.copy(), dtype, base)
    assert count < 200 or share > 0.05 or chunk.kind is WireCodec.SPARSE
    assert chunk.result_digest == digest(new)
    assert np.array_equal(received(chunk, dtype, base), new)
    in_place = base.copy()
    decode_chunk(chunk, dtype, in_place, in_place)
    assert np.array_equal(in_place, new)


@given(st.integers(1, 20_000), st.sampled_from(list(DTYPES)), st.sampled_from(sorted(LOSSY)), st.integers(-30, 10))
def test_rounding_keeps_its_bound(count: int, dtype: str, codec: WireCodec, magnitude: int) -> None:
    bits = weights(count, dtype, count, 2.0**magnitude)
    bits[: min(count, 3) * DTYPES[dtype].itemsize] = 0
    chunk = encode_chunk(codec, bits.copy(), dtype)
    found = torch.from_numpy(received(chunk, dtype)).view(DTYPES[dtype]).float()
    wanted = torch.from_numpy(bits).view(DTYPES[dtype]).float()
    error = (found - wanted).abs()
    if chunk.kind is WireCodec.DENSE:
        assert not error.any()
    elif codec is WireCodec.FP8:
        rounded = 2.0**-8 if dtype == "bfloat16" else 0.0
        spacing = torch.exp2(_blocks(wanted)[1].float() - 10).repeat_interleave(128)[:count]
        bound = wanted.abs() * (2**-4 + 2**-8) + spacing
        assert bool((error <= bound + rounded * found.abs()).all())
    else:
        relative, absolute = BOUNDS[codec]
        assert bool((error <= wanted.abs() * relative + absolute).all())
    norm = float(wanted.norm())
    assert chunk.error == pytest.approx(float((found - wanted).norm()) / norm if norm else 0.0, rel=1e-3)


def test_float16_keeps_what_exceeds_its_range() -> None:
    bits = torch.tensor([1.0, 1e6]).view(torch.uint8).numpy()
    assert encode_chunk(WireCodec.FLOAT16, bits, "float32").kind is WireCodec.DENSE
    assert encode_chunk(WireCodec.BFLOAT16, bits, "float32").kind is WireCodec.BFLOAT16


@pytest.mark.parametrize("codec", [WireCodec.BFLOAT16, WireCodec.FLOAT16])
def test_rounding_to_as_many_bytes_is_left_out(codec: WireCodec) -> None:
    bits = weights(100, "bfloat16", 0)
    assert encode_chunk(codec, bits, "bfloat16").kind is WireCodec.DENSE


def test_sizes_of_one_version_beside_dense_bytes() -> None:
    bits = weights(1 << 20, "bfloat16", 0)
    sparse = encode_chunk(WireCodec.SPARSE, changed(bits, "bfloat16", 0.01, 0), "bfloat16", bits)
    assert len(bits) > 45 * len(sparse.data)
    fp8 = encode_chunk(WireCodec.FP8, bits, "bfloat16")
    assert 0.55 < 1 - len(fp8.data) / len(bits) < 0.60
    assert 0.02 < fp8.error < 0.03


def test_a_difference_that_does_not_pay_travels_dense() -> None:
    bits = weights(1 << 18, "bfloat16", 0)
    assert encode_chunk(WireCodec.SPARSE, changed(bits, "bfloat16", 0.2, 0), "bfloat16", bits).kind is WireCodec.SPARSE
    assert encode_chunk(WireCodec.SPARSE, changed(bits, "bfloat16", 0.3, 0), "bfloat16", bits).kind is WireCodec.DENSE
    assert encode_chunk(WireCodec.SPARSE, bits, "bfloat16").kind is WireCodec.DENSE


@pytest.mark.parametrize("codec", list(WireCodec))
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_damaged_chunk_is_refused(codec: WireCodec, dtype: str) -> None:
    base = weights(3000, dtype, 0)
    new = changed(base, dtype, 0.02, 1) if codec is WireCodec.SPARSE else base
    chunk = encode_chunk(codec, new, dtype, base)
    damaged = chunk.data.copy()
    damaged[len(damaged) // 2] ^= 4
    with pytest.raises(WeightsError, match="damaged on its way"):
        received(replace(chunk, data=damaged), dtype, base)
    with pytest.raises(WeightsError, match="damaged on its way"):
        received(replace(chunk, data=chunk.data[:-1]), dtype, base)
    with pytest.raises(WeightsError):
        received(replace(chunk, data=damaged, data_digest=digest(damaged)), dtype, base)
    with pytest.raises(WeightsError, match="does not result"):
        received(replace(chunk, result_digest=chunk.result_digest ^ 1), dtype, base)
    with pytest.raises(WeightsError, match="came for"):
        decode_chunk(chunk, dtype, np.zeros(chunk.size + 4, np.uint8), base)


@given(st.binary(max_size=200), st.integers(0, 60), st.sampled_from(list(WireCodec)), st.sampled_from(list(DTYPES)))
def test_bytes_that_no_sender_made_are_refused(data: bytes, elements: int, codec: WireCodec, dtype: str) -> None:
    raw = np.frombuffer(data, np.uint8)
    size = elements * DTYPES[dtype].itemsize
    target = np.zeros(size, np.uint8)
    base = np.zeros(size, np.uint8)
    try:
        decode_chunk(EncodedChunk(codec, size, raw, digest(raw), 12345), dtype, target, base)
    except WeightsError:
        return
    assert digest(target) == 12345


def test_another_base_is_found() -> None:
    base = weights(1000, "float32", 0)
    chunk = encode_chunk(WireCodec.SPARSE, changed(base, "float32", 0.02, 1), "float32", base)
    with pytest.raises(WeightsError, match="does not result"):
        received(chunk, "float32", changed(base, "float32", 0.01, 2))
    with pytest.raises(WeightsError, match="no base"):
        received(chunk, "float32")


def test_a_difference_in_the_last_odd_element() -> None:
    base = np.zeros(10, np.uint8)
    new = base.copy()
    new[8:] = 7
    difference = encode_difference(np.tile(new, 5), np.tile(base, 5), 2)
    assert difference is not None
    assert len(difference) == 4 + 5 * 4

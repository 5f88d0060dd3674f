import pytest

from asyncrl.lanes.weights.chunk_codec import WireCodec
from asyncrl.lanes.weights.slot_memory import WeightsSpec
from asyncrl.lanes.weights.transports.collective_transfer import groups
from asyncrl.lanes.weights.transports.version_transfer import ChunkPlan
from tests.unit.lanes.weights.transports.sites import SHAPES

SPEC = WeightsSpec.of(SHAPES, "float32", exact=["model.embed_tokens.weight"])
CHUNK = 64 << 10


def test_parts_cover_a_slot_once_and_keep_what_must_stay_exact() -> None:
    for codec in WireCodec:
        parts = ChunkPlan.of(SPEC, codec, CHUNK).parts
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == SPEC.size
        assert max(part.stop - part.start for part in parts) <= CHUNK
    up = SPEC.tensors[1]
    rounded = [part for part in ChunkPlan.of(SPEC, WireCodec.FP8, CHUNK).parts if part.codec is WireCodec.FP8]
    assert (rounded[0].start, rounded[-1].stop) == (up.offset, up.offset + up.bytes)
    digests = {ChunkPlan.of(SPEC, codec, size).digest for codec in WireCodec for size in (CHUNK, 2 * CHUNK)}
    assert len(digests) == 2 * len(WireCodec)


def test_a_group_of_parts_has_the_time_of_all_its_bytes() -> None:
    plan = ChunkPlan.of(SPEC, WireCodec.DENSE, CHUNK)
    found = list(groups(plan, 3))
    assert [part for group in found for part in group.parts] == list(plan.parts[3:])
    for group in found:
        size = sum(part.stop - part.start for part in group.parts)
        assert group.seconds == pytest.approx(5.0 + size / 1e6)

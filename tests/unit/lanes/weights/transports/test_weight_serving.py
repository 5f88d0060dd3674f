"""Answers of a server of weights: calls that are refused, and what a part costs beside its bytes."""

import numpy as np
import pytest

from asyncrl.errors import Refused
from asyncrl.lanes.weights.chunk_codec import WireCodec
from asyncrl.lanes.weights.slot_memory import WeightsSpec
from asyncrl.lanes.weights.transports import version_transfer
from asyncrl.lanes.weights.transports.version_transfer import CHUNK_BYTES, ChunkPlan, HeldVersion
from tests.instruction_count import counting
from tests.unit.lanes.weights.transports.sites import INCARNATION, weights
from tests.unit.lanes.weights.transports.test_weight_streams import PARTS, Stream, play


def version_of(codec: WireCodec, parts: int, part_bytes: int, *, whole: bool = True) -> HeldVersion:
    plan = ChunkPlan.of(WeightsSpec.of({"w": (parts * part_bytes // 4,)}, "float32"), codec, part_bytes)
    return HeldVersion(plan, 0, 1, np.zeros(plan.spec.size, np.uint8), whole)


class NoThread:
    def submit(self, *work: object) -> None:
        raise RuntimeError("a thread is used")


@pytest.mark.parametrize("codec", [WireCodec.DENSE, WireCodec.SPARSE])
async def test_only_parts_that_are_compared_take_a_thread(codec: WireCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    held = version_of(codec, 1, CHUNK_BYTES)
    held.base = version_of(codec, 1, CHUNK_BYTES)
    held.base_version = 0
    monkeypatch.setattr(version_transfer, "_thread", NoThread())
    assert (await held.chunk(0, None)).kind is WireCodec.DENSE
    if codec is WireCodec.DENSE:
        assert (await held.chunk(0, 0)).kind is WireCodec.DENSE
    else:
        with pytest.raises(RuntimeError, match="a thread is used"):
            await held.chunk(0, 0)


async def test_noting_a_part_costs_the_same_whatever_the_number_of_parts() -> None:
    costs = []
    for parts in (10, 200):
        held = version_of(WireCodec.DENSE, parts, 256, whole=False)
        source = version_of(WireCodec.DENSE, parts, 256)
        for number in range(parts - 1):
            held.add(number, await source.chunk(number, None))
        assert held.missing == [parts - 1]
        last = await source.chunk(parts - 1, None)
        with counting() as count:
            held.add(parts - 1, last)
        assert held.whole
        costs.append(count.instructions)
    assert costs[0] == costs[1]


async def test_a_late_joiner_does_not_keep_others_from_differences() -> None:
    held = version_of(WireCodec.SPARSE, 1, CHUNK_BYTES)
    held.base = version_of(WireCodec.SPARSE, 1, CHUNK_BYTES)
    held.base_version = 0
    assert (await held.chunk(0, None)).kind is WireCodec.DENSE
    assert (await held.chunk(0, 0)).kind is WireCodec.SPARSE


async def ask(stream: Stream, method: str, *args: object) -> object:
    client = await stream.receiver().end.client("inproc://trainer", 5.0)
    return await client.call(method, args, 5.0)


@pytest.mark.parametrize(
    "call",
    [
        ("weights_chunk", INCARNATION, 0, PARTS, None, "x"),
        ("weights_chunk", INCARNATION, 0, -1, None, "x"),
        ("weights_chunk", INCARNATION, 0, 1.5, None, "x"),
        ("weights_chunk", INCARNATION + 1, 0, 0, None, "x"),
        ("weights_chunk", INCARNATION, 1, 0, None, "x"),
        ("open_weights", INCARNATION, 0, "another plan", "x", "y"),
        ("open_weights", INCARNATION, 0),
        ("memory",),
    ],
)
def test_calls_that_no_receiver_makes_are_refused(call: tuple[str, object]) -> None:
    async def scene(stream: Stream) -> None:
        stream.sender.write(INCARNATION, 0, weights(0))
        with pytest.raises(Refused):
            await ask(stream, *call)

    play(scene)

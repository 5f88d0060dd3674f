"""Weights over a wire, on virtual time: trees, broken connections, damaged parts, slow receivers."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.errors import DeadlineExceeded, Refused, WeightsError
from asyncrl.lanes.control.wire import InprocWire
from asyncrl.lanes.weights.chunk_codec import EncodedChunk, WireCodec, encode_chunk
from asyncrl.lanes.weights.slot_memory import WeightsSpec
from asyncrl.lanes.weights.transports import version_transfer, weight_stream
from asyncrl.lanes.weights.transports.version_transfer import ChunkPlan, HeldVersion, LaneEnd
from asyncrl.lanes.weights.transports.weight_stream import StreamReceiver, StreamSender
from asyncrl.protocols.weight_transports import BUFFERS
from asyncrl.simulation import virtual_loop
from tests.unit.lanes.weights.transports.sites import INCARNATION, SHAPES, hello, take, weights

SPEC = WeightsSpec.of(SHAPES, "float32", exact=["model.embed_tokens.weight"])
CHUNK = 64 << 10
PARTS = -(-SPEC.size // CHUNK)


class Stream:
    """A sender with receivers at addresses of their own. served: parts that each sender has given."""

    def __init__(self, tasks: asyncio.TaskGroup, codec: WireCodec = WireCodec.DENSE, part_bytes: int = CHUNK) -> None:
        self.wire = InprocWire()
        self.tasks = tasks
        self.plan = ChunkPlan.of(SPEC, codec, part_bytes)
        self.sender = StreamSender(self.plan, self.end("inproc://trainer", "training0"))
        self.receivers: list[StreamReceiver] = []

    def end(self, address: str, name: str) -> LaneEnd:
        return LaneEnd(self.wire, address, hello(name), self.tasks)

    def receiver(self) -> StreamReceiver:
        name = f"generation{len(self.receivers)}"
        self.receivers.append(StreamReceiver(self.plan, self.end(f"inproc://{name}", name)))
        return self.receivers[-1]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[int]]:
    """served[address of a memory] -> parts that were asked for there."""
    found: Counter[int] = Counter()
    answer = HeldVersion.chunk

    async def counted(self: HeldVersion, number: int, base: int | None) -> EncodedChunk:
        found[self.memory.ctypes.data] += 1
        return await answer(self, number, base)

    monkeypatch.setattr(HeldVersion, "chunk", counted)
    return found


def play(
    scene: Callable[[Stream], Awaitable[None]], codec: WireCodec = WireCodec.DENSE, part_bytes: int = CHUNK
) -> None:
    """Runs a scene; all ends are closed after it."""

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            stream = Stream(tasks, codec, part_bytes)
            try:
                await scene(stream)
            finally:
                for receiver in stream.receivers:
                    receiver.close()
                stream.sender.close()

    virtual_loop.run(main())


async def until_half(served: Counter[int]) -> None:
    """Lets everybody else run until half of the parts were asked for."""
    for _ in iter(lambda: served.total() >= PARTS // 2, True):
        await asyncio.sleep(0)


def has(tensors: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensors[name], wanted[name]) for name in wanted)


def test_receivers_pass_parts_on_along_a_tree(served: Counter[int]) -> None:
    async def scene(stream: Stream) -> None:
        receivers = [stream.receiver() for _ in range(7)]
        for version in range(3):
            served.clear()
            published = stream.sender.write(INCARNATION, version, weights(version))
            async with asyncio.TaskGroup() as tasks:
                taking = [tasks.create_task(take(each, published)) for each in receivers]
            assert all(has(each.result(), weights(version)) for each in taking)
            own = stream.sender.server.held[version].memory.ctypes.data
            assert served[own] == 2 * PARTS
            assert max(served.values()) == 2 * PARTS
            assert served.total() == 7 * PARTS

    play(scene)


def test_a_parent_that_dies_leaves_what_it_has_passed_on(served: Counter[int]) -> None:
    async def scene(stream: Stream) -> None:
        published = stream.sender.write(INCARNATION, 0, weights(0))
        parent, other, child = (stream.receiver() for _ in range(3))
        root = stream.sender.server.held[0]
        root.receivers |= {each.end.hello.instance: each.end.address for each in (parent, other)}
        half = parent._begin(published)
        for number in range(PARTS // 2):
            half.bytes_of(number)[:] = root.bytes_of(number)
            half.add(number, await root.chunk(number, None))
        served.clear()
        taking = asyncio.ensure_future(take(child, published))
        await asyncio.sleep(0.01)
        parent.close()
        assert has(await taking, weights(0))
        assert served[root.memory.ctypes.data] == PARTS - PARTS // 2
        assert asyncio.get_running_loop().time() < 1

    play(scene)


@pytest.mark.parametrize(("alive", "part_bytes"), [(True, CHUNK), (False, CHUNK), (True, SPEC.size)])
def test_a_parent_that_gives_nothing_costs_one_deadline(alive: bool, part_bytes: int) -> None:
    """One part may be all of the weights: the wait for it at the parent takes no time from the trainer."""

    async def scene(stream: Stream) -> None:
        published = stream.sender.write(INCARNATION, 0, weights(0))
        parent, other, child = (stream.receiver() for _ in range(3))
        address = parent.end.address if alive else "inproc://gone"
        stream.sender.server.held[0].receivers |= {"generation0": address, "generation1": other.end.address}
        parent._begin(published)
        assert has(await take(child, published), weights(0))
        assert asyncio.get_running_loop().time() <= max(part.deadline for part in stream.plan.parts)

    play(scene, part_bytes=part_bytes)


@pytest.mark.parametrize(("child_comes", "part_bytes"), [("before", CHUNK), ("after", CHUNK), ("before", SPEC.size)])
def test_a_parent_whose_fetch_was_given_up_sends_children_to_the_trainer_at_once(
    child_comes: str, part_bytes: int
) -> None:
    """The end of a run gives up handovers to generators while the evaluation takes the same version."""

    async def scene(stream: Stream) -> None:
        published = stream.sender.write(INCARNATION, 0, weights(0))
        parent, other, child = (stream.receiver() for _ in range(3))
        root = stream.sender.server.held[0]
        root.receivers |= {each.end.hello.instance: each.end.address for each in (parent, other)}
        root.whole = root._written_here = False  # The trainer's parts are on their way.
        giving_up = asyncio.ensure_future(parent.fetch(published))
        await asyncio.sleep(0.01)
        taking = asyncio.ensure_future(take(child, published)) if child_comes == "before" else None
        await asyncio.sleep(0.01)
        giving_up.cancel()
        await asyncio.wait([giving_up])
        root.whole = root._written_here = True
        root._changed.wake()
        assert has(await (taking or take(child, published)), weights(0))
        assert has(await take(parent, published), weights(0)), "one that was given up is taken later"
        assert asyncio.get_running_loop().time() < 1

    play(scene, part_bytes=part_bytes)


def test_a_parent_that_begins_another_version_sends_children_to_the_trainer() -> None:
    async def scene(stream: Stream) -> None:
        first = stream.sender.write(INCARNATION, 0, weights(0))
        parent, other, child = (stream.receiver() for _ in range(3))
        root = stream.sender.server.held[0]
        root.receivers |= {each.end.hello.instance: each.end.address for each in (parent, other)}
        parent._begin(first)
        taking = asyncio.ensure_future(take(child, first))
        await asyncio.sleep(0.01)
        parent._begin(stream.sender.write(INCARNATION, 1, weights(1)))
        assert has(await taking, weights(0))
        assert asyncio.get_running_loop().time() < 1

    play(scene)


def test_a_broken_connection_repeats_no_part(served: Counter[int]) -> None:
    async def scene(stream: Stream) -> None:
        published = stream.sender.write(INCARNATION, 0, weights(0))
        receiver = stream.receiver()
        taking = asyncio.ensure_future(take(receiver, published))
        await until_half(served)
        (client,) = receiver.end.clients.values()
        client.fail("the cable was pulled")
        assert has(await taking, weights(0))
        assert served.total() <= PARTS + weight_stream.AT_ONCE
        assert receiver.received_bytes == SPEC.size

    play(scene)


def test_a_connection_that_answers_nothing_is_replaced() -> None:
    async def scene(stream: Stream) -> None:
        published = stream.sender.write(INCARNATION, 0, weights(0))
        receiver = stream.receiver()
        client = await receiver.end.client(published.arena, 5.0)
        call = client.call

        async def silent(method: str, arguments: Any, deadline: float) -> Any:
            if method != weight_stream.CHUNK:
                return await call(method, arguments, deadline)
            await asyncio.sleep(deadline)
            raise DeadlineExceeded("no part came")

        client.call = silent
        assert has(await take(receiver, published), weights(0))

    play(scene)


def test_a_fetch_that_was_given_up_goes_on_where_it_was(served: Counter[int]) -> None:
    async def scene(stream: Stream) -> None:
        published = stream.sender.write(INCARNATION, 0, weights(0))
        receiver = stream.receiver()
        taking = asyncio.ensure_future(take(receiver, published))
        await until_half(served)
        taking.cancel()
        await asyncio.wait([taking])
        assert has(await take(receiver, published), weights(0))
        assert receiver.received_bytes == SPEC.size

    play(scene)


def damage(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Damages so many chunks on their way to receivers; returns the sizes of all that came."""
    sizes: list[int] = []
    unpacked = weight_stream.unpacked

    def damaged(message: object) -> EncodedChunk:
        chunk = unpacked(message)
        sizes.append(len(chunk.data))
        if len(sizes) > times:
            return chunk
        data = chunk.data.copy()
        data[len(data) // 2] ^= 1
        return replace(chunk, data=data)

    monkeypatch.setattr(weight_stream, "unpacked", damaged)
    return sizes


def test_a_damaged_part_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = damage(monkeypatch, 2)

    async def scene(stream: Stream) -> None:
        published = stream.sender.write(INCARNATION, 0, weights(0))
        assert has(await take(stream.receiver(), published), weights(0))
        assert len(sizes) == PARTS + 2

    play(scene)


def test_parts_that_stay_damaged_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    damage(monkeypatch, 1000)

    async def scene(stream: Stream) -> None:
        published = stream.sender.write(INCARNATION, 0, weights(0))
        with pytest.raises(WeightsError, match="damaged on its way"):
            await take(stream.receiver(), published)

    play(scene)


def slightly_changed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns a copy in which one weight of a hundred differs."""
    found = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in found.values():
        tensor.flatten()[::100] += 1
    return found


def test_differences_travel_where_the_receiver_has_the_base() -> None:
    async def scene(stream: Stream) -> None:
        receiver = stream.receiver()
        late = stream.receiver()
        first = weights(0)
        second = slightly_changed(weights(0))
        await take(receiver, stream.sender.write(INCARNATION, 0, first))
        assert receiver.received_bytes == SPEC.size
        published = stream.sender.write(INCARNATION, 1, second)
        assert has(await take(receiver, published), second)
        assert receiver.received_bytes < SPEC.size * 1.05
        assert has(await take(late, published), second)
        assert late.received_bytes == SPEC.size
        stream.sender.write(INCARNATION, 2, first)
        published = stream.sender.write(INCARNATION, 3, second)
        assert has(await take(receiver, published), second)
        assert receiver.received_bytes > SPEC.size * 2  # Its base is two versions old.

    play(scene, WireCodec.SPARSE)


def test_another_base_is_sent_dense_again() -> None:
    async def scene(stream: Stream) -> None:
        receiver = stream.receiver()
        first = weights(0)
        second = slightly_changed(weights(0))
        await take(receiver, stream.sender.write(INCARNATION, 0, first))
        assert receiver._current is not None
        receiver._current.memory[: SPEC.size // 2] = 0  # What it has is not what it was sent.
        assert has(await take(receiver, stream.sender.write(INCARNATION, 1, second)), second)

    play(scene, WireCodec.SPARSE)


@pytest.mark.parametrize("codec", [WireCodec.BFLOAT16, WireCodec.FLOAT16, WireCodec.FP8])
def test_all_receivers_of_a_tree_get_the_same_rounded_weights(codec: WireCodec) -> None:
    async def scene(stream: Stream) -> None:
        receivers = [stream.receiver() for _ in range(4)]
        published = stream.sender.write(INCARNATION, 0, weights(0))
        found = [await take(each, published) for each in receivers]
        assert all(has(found[0], each) for each in found)
        exact = {name for name, tensor in weights(0).items() if torch.equal(tensor, found[0][name])}
        assert exact == {"model.embed_tokens.weight", "norm.weight"}
        assert 0 < receivers[3].largest_error < 0.03
        published = stream.sender.write(INCARNATION, 1, weights(1))
        fetched = await receivers[0].fetch(published)
        assert fetched.bytes < 0.8 * SPEC.size
        assert fetched.error == receivers[0].largest_error

    play(scene, codec)


def test_a_slow_receiver_gets_its_version_while_the_trainer_goes_on() -> None:
    async def scene(stream: Stream) -> None:
        slow = stream.receiver()
        fast = stream.receiver()
        old = stream.sender.write(INCARNATION, 0, weights(0))
        stream.sender.server.held[0].pulled_at["generation0"] = asyncio.get_running_loop().time()
        slow._begin(old)
        for version in range(1, 6):
            published = stream.sender.write(INCARNATION, version, weights(version))
            assert has(await take(fast, published), weights(version))
            assert len(stream.sender.server.held) == min(version + 1, BUFFERS)
        assert has(await take(slow, old), weights(0))
        stream.sender.write(INCARNATION, 6, weights(6))
        stream.sender.write(INCARNATION, 7, weights(7))
        assert 0 not in stream.sender.server.held

    play(scene)


def test_of_versions_that_are_pulled_the_oldest_stays() -> None:
    async def scene(stream: Stream) -> None:
        for version in range(6):
            stream.sender.write(INCARNATION, version, weights(version))
            if version < 2:
                stream.sender.server.held[version].pulled_at["generation0"] = asyncio.get_running_loop().time()
        assert sorted(stream.sender.server.held) == [0, 4, 5]

    play(scene)


def test_a_version_under_a_buffer_that_is_used_again_is_refused() -> None:
    async def scene(stream: Stream) -> None:
        stream.sender.write(INCARNATION, 0, weights(0))
        held = stream.sender.server.held[0]
        for version in range(1, BUFFERS + 1):
            stream.sender.write(INCARNATION, version, weights(version))
        with pytest.raises(Refused, match="version 0 of incarnation 3 was overwritten"):
            await held.chunk(0, None)

    play(scene)


def test_a_base_that_is_overwritten_while_it_is_compared_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stream: Stream) -> None:
        first = weights(0)
        stream.sender.write(INCARNATION, 0, first)
        base = stream.sender.server.held[0]
        stream.sender.write(INCARNATION, 1, slightly_changed(first))
        encode = encode_chunk

        def overwriting(*args: Any) -> EncodedChunk:
            base.overwrite()
            return encode(*args)

        monkeypatch.setattr(version_transfer, "encode_chunk", overwriting)
        chunk = await stream.sender.server.held[1].chunk(0, 0)
        assert chunk.kind is WireCodec.DENSE

    play(scene, WireCodec.SPARSE)


@pytest.mark.parametrize("gone", ["silent", "forgotten"])
def test_a_receiver_that_shows_no_sign_keeps_nothing(gone: str) -> None:
    async def scene(stream: Stream) -> None:
        stream.sender.write(INCARNATION, 0, weights(0))
        stream.sender.server.held[0].pulled_at["generation0"] = asyncio.get_running_loop().time()
        if gone == "silent":
            await asyncio.sleep(10)
        else:
            stream.sender.forget("generation0")
        for version in range(1, 4):
            stream.sender.write(INCARNATION, version, weights(version))
        assert sorted(stream.sender.server.held) == [1, 2, 3]

    play(scene)


def test_a_stalled_sender_is_late_and_then_goes_on() -> None:
    async def scene(stream: Stream) -> None:
        published = stream.sender.write(INCARNATION, 0, weights(0))
        receiver = stream.receiver()
        stream.sender.server.held[0].whole = False
        with pytest.raises(
            DeadlineExceeded, match=f"{PARTS} of {PARTS} parts of the weights of version 0 did not come"
        ):
            await take(receiver, published)
        assert asyncio.get_running_loop().time() == pytest.approx(stream.plan.from_one, abs=0.1)
        stream.sender.server.held[0].whole = True
        assert has(await take(receiver, published), weights(0))

    play(scene)

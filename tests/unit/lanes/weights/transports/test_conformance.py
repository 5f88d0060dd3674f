"""Every transport under every fault: the version before keeps serving, and what is taken is whole and exact."""

import asyncio
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncrl.errors import AsyncrlError, DeadlineExceeded, PeerLost, Refused, WeightsError
from asyncrl.lanes.weights.slot_memory import DTYPES, WeightsSpec
from asyncrl.lanes.weights.transports import collective_transfer as pair_receiver
from asyncrl.lanes.weights.transports import version_transfer, weight_stream
from tests.unit.lanes.weights.transports.sites import (
    COPYING,
    PAIRS,
    SHAPES,
    TRANSPORTS,
    open_site,
    take,
    until,
    weights,
    with_other_digest,
)

ALIKE = ("inproc", "gloo")
"""Their code is that of shm and nccl, on other memory; test_arena.py and test_pairs.py have both."""


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.long] if name in ALIKE else []) for name in TRANSPORTS])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def has(tensors: dict[str, Tensor], version: int, dtype: str = "float32") -> bool:
    wanted = weights(version)
    return all(torch.equal(tensors[name], wanted[name].to(DTYPES[dtype])) for name in wanted)


@pytest.mark.parametrize("dtype", list(DTYPES))
async def test_versions_arrive_bit_by_bit(transport: str, dtype: str, tmp_path: Path) -> None:
    special = torch.tensor([0x7FC00001, -0x80000000, 0x7F800000, 1, 0x00800000, 0x7F800001, 0], dtype=torch.int32)
    async with open_site(transport, tmp_path, dtype) as site:
        sent = weights(0) | {"norm.weight": special.view(torch.float32)}
        first = site.write(0, sent)
        receiver = site.receiver(first, "generation0")
        found = await take(receiver, first)
        item = torch.int32 if dtype == "float32" else torch.int16
        assert set(found) == {*SHAPES, "lm_head.weight"}
        for name, tensor in sent.items():
            assert torch.equal(found[name].view(item), tensor.to(DTYPES[dtype]).view(item))
        assert found["lm_head.weight"].data_ptr() == found["model.embed_tokens.weight"].data_ptr()
        for version in (1, 2, 3):
            assert has(await take(receiver, site.write(version)), version, dtype)


async def test_the_version_before_serves_until_the_next_is_taken(transport: str, tmp_path: Path) -> None:
    async with open_site(transport, tmp_path) as site:
        first = site.write(0)
        receiver = site.receiver(first, "generation0")
        before = await take(receiver, first)
        second = site.write(1)
        fetched = await receiver.fetch(second)
        assert fetched == (site.spec.size if transport in COPYING else 0, 0.0)
        assert has(before, 0)
        after = receiver.tensors(second)
        assert has(before, 0)
        assert has(after, 1)


async def test_a_late_joiner_takes_the_newest_version(transport: str, tmp_path: Path) -> None:
    async with open_site(transport, tmp_path) as site:
        for version in range(5):
            newest = site.write(version)
        assert has(await take(site.receiver(newest, "generation1"), newest), 4)


async def test_a_wrong_digest_is_refused(transport: str, tmp_path: Path) -> None:
    async with open_site(transport, tmp_path) as site:
        first = site.write(0)
        receiver = site.receiver(first, "generation0")
        before = await take(receiver, first)
        second = site.write(1)
        with pytest.raises(WeightsError, match="published was"):
            await take(receiver, with_other_digest(second))
        with pytest.raises(WeightsError):
            receiver.tensors(with_other_digest(second))
        assert has(before, 0)
        assert has(await take(receiver, second), 1)


async def test_a_damaged_version_is_refused(transport: str, tmp_path: Path) -> None:
    async with open_site(transport, tmp_path) as site:
        first = site.write(0)
        receiver = site.receiver(first, "generation0")
        before = await take(receiver, first)
        second = site.write(1)
        site.corrupt(second)
        with pytest.raises(WeightsError):
            await take(receiver, second)
        assert has(before, 0)
        assert has(await take(receiver, site.write(2)), 2)


async def test_a_sender_that_dies_is_lost(transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_stream, "HELLO_DEADLINE", 0.5)
    monkeypatch.setattr(pair_receiver, "CALL_DEADLINE", 0.5)
    async with open_site(transport, tmp_path) as site:
        first = site.write(0)
        receiver = site.receiver(first, "generation0")
        before = await take(receiver, first)
        second = site.write(1)
        site.sender.close()
        await asyncio.sleep(0)
        with pytest.raises((PeerLost, DeadlineExceeded)):
            await take(site.receiver(second, "generation1"), second)
        assert has(before, 0)


@pytest.mark.parametrize("transport", ["tcp", *PAIRS])
async def test_a_sender_that_closes_in_a_transfer_is_lost(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_stream, "HELLO_DEADLINE", 0.2)
    monkeypatch.setattr(pair_receiver, "CALL_DEADLINE", 0.2)
    async with open_site(transport, tmp_path) as site:
        first = site.write(0)
        receiver = site.receiver(first, "generation0")
        before = await take(receiver, first)
        second = site.write(1)
        site.stall(second)
        monkeypatch.setattr(version_transfer, "START", 0.0)
        monkeypatch.setattr(version_transfer, "SLOWEST", 5e6)
        fetching = asyncio.ensure_future(take(receiver, second))
        await until(lambda: site.in_transfer(second))
        site.sender.close()
        with pytest.raises((PeerLost, DeadlineExceeded)):
            await fetching
        assert has(before, 0)
        with pytest.raises(WeightsError, match="not fetched"):
            receiver.tensors(second)


@pytest.mark.parametrize("transport", COPYING)
async def test_deadlines_follow_from_bytes(transport: str, tmp_path: Path) -> None:
    async with open_site(transport, tmp_path) as site:
        published = site.write(0)
        senders = 2 if transport == "tcp" else 1  # Another receiver, then the trainer.
        assert published.transfer == pytest.approx(senders * (5.0 + site.spec.size / 1e6))
        if transport != "file":
            plan = site.receiver(published, "generation0").plan
            assert senders * plan.from_one == published.transfer
            assert [part.deadline for part in plan.parts] == [
                5.0 + (part.stop - part.start) / 1e6 for part in plan.parts
            ]


async def test_a_write_that_stalls_ends_in_its_deadline(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_site(transport, tmp_path) as site:
        first = site.write(0)
        receiver = site.receiver(first, "generation0")
        before = await take(receiver, first)
        second = site.write(1)
        site.stall(second)
        with monkeypatch.context() as patch:
            patch.setattr(version_transfer, "START", 0.0)
            patch.setattr(version_transfer, "SLOWEST", 20e6)
            with pytest.raises(AsyncrlError) as caught:
                await take(receiver, second)
        assert transport not in ("tcp", *PAIRS) or isinstance(caught.value, DeadlineExceeded)
        assert has(before, 0)
        site.go_on(second)
        assert has(await take(receiver, second), 1)


async def test_a_receiver_that_dies_while_it_fetches_disturbs_no_other(transport: str, tmp_path: Path) -> None:
    async with open_site(transport, tmp_path) as site:
        first = site.write(0)
        dying, living = (site.receiver(first, f"generation{number}") for number in range(2))
        in_parts = transport in ("tcp", *PAIRS)
        if in_parts:
            site.stall(first)
        fetching = asyncio.ensure_future(dying.fetch(first))
        await until(lambda: site.in_transfer(first) if in_parts else fetching.done())
        fetching.cancel()
        await asyncio.wait([fetching])
        dying.close()
        site.sender.forget("generation0")
        if in_parts:
            site.go_on(first)
        for version in range(1, 6):
            assert has(await take(living, site.write(version)), version)


async def test_a_version_that_was_overwritten_is_refused(transport: str, tmp_path: Path) -> None:
    async with open_site(transport, tmp_path) as site:
        old = site.write(0)
        receiver = site.receiver(old, "generation0")
        for version in range(1, 5):
            site.write(version)
        with pytest.raises((Refused, WeightsError)):
            await take(receiver, old)


async def test_another_model_is_refused(transport: str, tmp_path: Path) -> None:
    async with open_site(transport, tmp_path) as site:
        published = site.write(0)
        other = WeightsSpec.of(SHAPES, "bfloat16")
        with pytest.raises((Refused, WeightsError), match="model"):
            await take(site.receiver(published, "generation0", other), published)


async def test_names_and_shapes_are_checked_before_anything_is_written(transport: str, tmp_path: Path) -> None:
    async with open_site(transport, tmp_path) as site:
        first = site.write(0)
        with pytest.raises(WeightsError, match="missing"):
            site.write(1, {"norm.weight": torch.zeros(7)})
        assert has(await take(site.receiver(first, "generation0"), first), 0)


@pytest.mark.parametrize("transport", COPYING)
async def test_the_trainer_waits_for_no_reader_that_copies(transport: str, tmp_path: Path) -> None:
    async with open_site(transport, tmp_path) as site:
        first = site.write(0)
        receiver = site.receiver(first, "generation0")
        before = await take(receiver, first)
        site.sender.leases.using("generation0", 0)
        for version in range(1, 8):
            assert not site.sender.leases.holders(version)
            newest = site.write(version)
        assert has(before, 0)
        assert has(await take(receiver, newest), 7)


@pytest.mark.parametrize("transport", ["tcp", "file", "nccl"])
async def test_the_version_before_the_newest_can_still_be_taken(transport: str, tmp_path: Path) -> None:
    async with open_site(transport, tmp_path) as site:
        before = [site.write(version) for version in range(3)][1]
        assert has(await take(site.receiver(before, "generation0"), before), 1)


@pytest.mark.parametrize("transport", ["shm", "cuda_ipc"])
async def test_leases_keep_what_is_read_in_place(transport: str, tmp_path: Path) -> None:
    async with open_site(transport, tmp_path) as site:
        site.write(0)
        site.sender.leases.using("generation0", 0)
        site.write(1)
        assert site.sender.leases.holders(2) == ["generation0"]
        site.sender.forget("generation0")
        assert not site.sender.leases.holders(2)

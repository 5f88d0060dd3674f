"""Weights on one GPU, with CUDA replaced at its boundary: handles, processes, streams."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest
import torch
from structlog.testing import capture_logs

from asyncrl.errors import ConfigError, PeerLost, WeightsError
from asyncrl.lanes.weights.arena import HEADER, Reader, Writer, open_reader, open_writer
from asyncrl.lanes.weights.slot_memory import WeightsSpec
from asyncrl.lanes.weights.transports.device_arena import CudaRuntime, RegisteredArena, register_arena
from asyncrl.lanes.weights.transports.transport_ends import open_receiver
from tests.unit.lanes.weights.test_arena import Dying
from tests.unit.lanes.weights.transports.cuda_twin import TwinCuda, is_writable
from tests.unit.lanes.weights.transports.sites import PairNetwork, hello, open_site, take, weights
from tests.unit.lanes.weights.transports.test_conformance import has

READ = """
import asyncio, json, sys
sys.path.insert(0, sys.argv[1])
from asyncrl.lanes.weights.slot_memory import WeightsSpec
from asyncrl.lanes.weights.transports.device_arena import DeviceReader
from asyncrl.protocols.messages import Published
from tests.unit.lanes.weights.transports.cuda_twin import TwinCuda
from tests.unit.lanes.weights.transports.sites import SHAPES
spec = WeightsSpec.of(SHAPES, "float32", {"lm_head.weight": "model.embed_tokens.weight"})
published = Published(**json.loads(sys.argv[2]))
tensors = DeviceReader(published, spec, TwinCuda()).tensors(published)
print(float(tensors["norm.weight"].sum()))
"""


async def test_another_process_reads_what_the_trainer_wrote(tmp_path: Path) -> None:
    async with open_site("cuda_ipc", tmp_path) as site:
        published = site.write(0)
        fields = {name: value for name, value in asdict(published).items() if name not in ("readers", "canary")}
        root = str(Path(__file__).parents[5])
        command = [sys.executable, "-c", READ, root, json.dumps(fields)]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=100, check=True)
        here = await take(site.receiver(published, "generation0"), published)
        assert float(done.stdout) == float(here["norm.weight"].sum())


async def test_one_allocation_and_one_handle_serve_every_version(tmp_path: Path) -> None:
    async with open_site("cuda_ipc", tmp_path) as site:
        receiver = site.receiver(site.write(0), "generation0")
        addresses = {(await take(receiver, site.write(version)))["norm.weight"].data_ptr() for version in range(1, 7)}
        assert len(addresses) == 2
        assert len(site.process("training0")._own) == 1
        assert len(site.process("generation0")._maps) == 1


async def test_a_version_whose_write_ends_half_way_is_never_read(tmp_path: Path) -> None:
    async with open_site("cuda_ipc", tmp_path) as site:
        old = site.write(0)
        new = site.write(1)
        receiver = site.receiver(old, "generation0")
        await take(receiver, old)
        with pytest.raises(RuntimeError, match="killed"):
            site.write(2, Dying(weights(2), dies_at="norm.weight"))
        with pytest.raises(WeightsError, match="is being written"):
            receiver.check(old)
        assert has(await take(receiver, new), 1)


async def test_what_is_read_stays_when_the_trainer_closes(tmp_path: Path) -> None:
    async with open_site("cuda_ipc", tmp_path) as site:
        published = site.write(0)
        tensors = await take(site.receiver(published, "generation0"), published)
        site.sender.close()
        assert has(tensors, 0)
        with pytest.raises(PeerLost, match="trainer has ended"):
            site.receiver(published, "generation1")


def test_the_twin_refuses_a_handle_of_its_own_process() -> None:
    cuda = TwinCuda()
    pointer = cuda.allocate(10)
    with pytest.raises(AssertionError, match="its own handle"):
        cuda.open(cuda.export(pointer))
    cuda.end()
    with pytest.raises(PeerLost):
        TwinCuda().open(cuda.export(pointer))


# An arena in shared memory is registered once by a process that copies from it to a device, and unregistered.


SPEC = WeightsSpec.of({"a.weight": (30, 40), "b.weight": (7,)}, "float32")
BYTES = HEADER + 2 * -(-SPEC.size // HEADER) * HEADER


def values(version: int) -> dict[str, torch.Tensor]:
    return {each.name: torch.full(each.shape, float(version)) for each in SPEC.tensors}


@pytest.fixture
def writer() -> Iterator[Writer]:
    found = open_writer(f"asyncrl-test-{uuid4().hex[:12]}", SPEC, "ipc")
    yield found
    found.close()


def opened(writer: Writer, cuda: TwinCuda, device: str) -> Any:
    """An engine's end, opened as a run opens it."""
    ends: Any = (None, "tcp://127.0.0.1:*", hello("generation0"), None)
    return open_receiver(writer.write(0, 0, values(0)), SPEC, lambda: PairNetwork(*ends, twin=cuda), device)


def test_a_mapping_is_registered_with_its_first_version_and_until_it_is_closed(writer: Writer) -> None:
    cuda = TwinCuda()
    receiver = opened(writer, cuda, "cuda:0")
    assert not cuda.registered
    for version in range(1, 5):
        published = writer.write(0, version, values(version))
        asyncio.run(receiver.fetch(published))
        tensors = receiver.tensors(published)
        receiver.check(published)
        assert float(tensors["b.weight"][0]) == version
        assert list(cuda.registered.values()) == [BYTES]
    (start,) = cuda.registered
    assert start <= tensors["b.weight"].data_ptr() < start + BYTES
    receiver.close()
    assert not cuda.registered
    assert float(tensors["a.weight"][0, 0]) == 4


def test_engines_that_copy_to_no_device_register_nothing(writer: Writer) -> None:
    cuda = TwinCuda()
    assert isinstance(opened(writer, cuda, "cpu"), Reader)
    private = open_writer(f"test-{uuid4().hex[:8]}", SPEC, "inproc")
    assert isinstance(opened(private, cuda, "cuda:0"), Reader)
    private.close()


def refuse_missing_package() -> CudaRuntime:
    raise ConfigError("needs CuPy")


class Refusing(TwinCuda):
    """CUDA on a device without room for pins."""

    def register(self, address: int, size: int, *, read_only: bool) -> None:
        raise MemoryError("cudaErrorNotSupported")


@pytest.mark.parametrize("open_cuda", [refuse_missing_package, Refusing], ids=["no CuPy", "refused"])
def test_what_cannot_be_registered_is_said_once_and_copied_all_the_same(writer: Writer, open_cuda: Any) -> None:
    receiver = RegisteredArena(open_reader(writer.write(0, 0, values(0)), SPEC), open_cuda)
    with capture_logs() as lines:
        for version in (1, 2):
            published = writer.write(0, version, values(version))
            assert float(receiver.tensors(published)["a.weight"].sum()) == 1200 * version
    assert [(line["log_level"], line["event"]) for line in lines] == [
        ("warning", "new weights are copied from pageable memory")
    ]
    assert lines[0]["reason"] in ("needs CuPy", "cudaErrorNotSupported")
    receiver.close()


def test_the_twin_refuses_what_cuda_refuses(writer: Writer) -> None:
    """A second registration of the same memory, and memory that is mapped for reading without saying so."""
    cuda = TwinCuda()
    reader = open_reader(writer.write(0, 0, values(0)), SPEC)
    address, size = reader.mapping
    assert not is_writable(address)
    with pytest.raises(MemoryError):
        cuda.register(address, size, read_only=False)
    with capture_logs() as lines:
        for _ in range(2):
            register_arena(reader, lambda: cast(CudaRuntime, cuda))
    assert [line["reason"] for line in lines] == ["cudaErrorHostMemoryAlreadyRegistered"]
    reader.close()
    assert not cuda.registered

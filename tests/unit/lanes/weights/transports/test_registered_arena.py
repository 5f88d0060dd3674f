"""An arena in shared memory is registered once by a process that copies from it to a device, and unregistered."""

import asyncio
from collections.abc import Iterator
from typing import Any, cast
from uuid import uuid4

import pytest
import torch
from structlog.testing import capture_logs

from asyncrl.errors import ConfigError
from asyncrl.lanes.weights.arena import HEADER, Reader, Writer, open_reader, open_writer
from asyncrl.lanes.weights.slot_memory import WeightsSpec
from asyncrl.lanes.weights.transports.device_arena import CudaRuntime, RegisteredArena, register_arena
from asyncrl.lanes.weights.transports.transport_ends import open_receiver
from tests.unit.lanes.weights.transports.cuda_twin import TwinCuda, is_writable
from tests.unit.lanes.weights.transports.sites import PairNetwork, hello

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

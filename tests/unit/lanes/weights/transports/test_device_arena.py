"""Weights on one GPU, with CUDA replaced at its boundary: handles, processes, streams."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest
import torch
from structlog.testing import capture_logs

from asyncrl.errors import ConfigError
from asyncrl.lanes.weights.arena import HEADER, Writer, open_reader, open_writer
from asyncrl.lanes.weights.slot_memory import WeightsSpec
from asyncrl.lanes.weights.transports.device_arena import CudaRuntime, register_arena
from asyncrl.lanes.weights.transports.transport_ends import open_receiver
from tests.unit.lanes.weights.transports.cuda_twin import TwinCuda, is_writable
from tests.unit.lanes.weights.transports.sites import PairNetwork, hello, open_site, take

READ = """
import asyncio, json, sys
sys.path.insert(0, sys.argv[1])
from asyncrl.lanes.weights.slot_memory import WeightsSpec
from asyncrl.lanes.weights.transports.device_arena import open_device_reader
from asyncrl.protocols.messages import Published
from tests.unit.lanes.weights.transports.cuda_twin import TwinCuda
from tests.unit.lanes.weights.transports.sites import SHAPES
spec = WeightsSpec.of(SHAPES, "float32", {"lm_head.weight": "model.embed_tokens.weight"})
published = Published(**json.loads(sys.argv[2]))
tensors = open_device_reader(published, spec, TwinCuda()).tensors(published)
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
    private = open_writer(f"test-{uuid4().hex[:8]}", SPEC, "inproc")
    for opening, device in ((writer, "cpu"), (private, "cuda:0")):
        assert opened(opening, cuda, device).before_first is None
    private.close()


def refuse_missing_package() -> CudaRuntime:
    raise ConfigError("needs CuPy")


class Refusing(TwinCuda):
    """CUDA on a device without room for pins."""

    def register(self, address: int, size: int, *, read_only: bool) -> None:
        raise MemoryError("cudaErrorNotSupported")


@pytest.mark.parametrize("open_cuda", [refuse_missing_package, Refusing], ids=["no CuPy", "refused"])
def test_what_cannot_be_registered_is_said_once_and_copied_all_the_same(writer: Writer, open_cuda: Any) -> None:
    receiver = open_reader(writer.write(0, 0, values(0)), SPEC)
    receiver.before_first = partial(register_arena, open_cuda=open_cuda)
    with capture_logs() as lines:
        for version in (1, 2):
            published = writer.write(0, version, values(version))
            assert float(receiver.tensors(published)["a.weight"].sum()) == 1200 * version
    assert [(line["log_level"], line["event"]) for line in lines] == [
        ("warning", "new weights are copied from pageable memory")
    ]
    assert lines[0]["reason"] in ("needs CuPy", "cudaErrorNotSupported")
    receiver.close()


def test_memory_that_is_registered_already_is_said_and_copied_all_the_same(writer: Writer) -> None:
    cuda = TwinCuda()
    reader = open_reader(writer.write(0, 0, values(0)), SPEC)
    assert not is_writable(reader.mapping[0])
    with capture_logs() as lines:
        for _ in range(2):
            register_arena(reader, lambda: cast(CudaRuntime, cuda))
    assert [line["reason"] for line in lines] == ["cudaErrorHostMemoryAlreadyRegistered"]
    reader.close()
    assert not cuda.registered

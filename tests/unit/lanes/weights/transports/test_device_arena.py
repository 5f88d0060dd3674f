"""Weights on one GPU, with CUDA replaced at its boundary: handles, processes, streams."""

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from asyncrl.errors import PeerLost, WeightsError
from tests.unit.lanes.weights.test_arena import Dying
from tests.unit.lanes.weights.transports.cuda_twin import TwinCuda
from tests.unit.lanes.weights.transports.sites import open_site, take, weights
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

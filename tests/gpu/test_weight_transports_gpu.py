"""Weights on CUDA devices: memory of another process, NCCL between two ranks of one device, in bfloat16 too.

Two ranks on one device are an experiment of NCCL: NCCL_MULTI_RANK_GPU_ENABLE=1, which each child process gets.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from uuid import uuid4

import pytest
import torch

from asyncrl.bench.gpu.bench_device import BenchDevice, EventTimer, NotMeasured
from asyncrl.bench.gpu.nccl_ranks import nccl_on_one_device
from asyncrl.lanes.weights.slot_memory import DTYPES, WeightsSpec
from asyncrl.lanes.weights.transports.device_arena import CupyRuntime, open_device_writer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SHAPES = {"embed.weight": (1000, 64), "norm.weight": (7,)}
DEADLINE = 110.0

READ = """
import json, sys
from asyncrl.lanes.weights.slot_memory import WeightsSpec
from asyncrl.lanes.weights.transports.device_arena import CupyRuntime
from asyncrl.lanes.weights.transports.device_arena import open_device_reader
from asyncrl.protocols.messages import Published
spec = WeightsSpec.of({name: tuple(shape) for name, shape in json.loads(sys.argv[1]).items()}, sys.argv[2])
reader = None
for line in sys.stdin:
    published = Published(**json.loads(line))
    reader = reader or open_device_reader(published, spec, CupyRuntime("cuda:0"))
    tensors = reader.tensors(published)
    reader.check(published)
    print(*(float(tensor.double().sum()) for tensor in tensors.values()), tensors["norm.weight"].device, flush=True)
"""


@pytest.fixture(scope="module", autouse=True)
def packages() -> None:
    pytest.importorskip("cupy", reason="install the extra cu12 or cu13")


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_another_process_reads_every_version_on_the_device(dtype: str) -> None:
    spec = WeightsSpec.of(SHAPES, dtype)
    writer = open_device_writer(f"asyncrl-test-{uuid4().hex[:12]}", spec, CupyRuntime("cuda:0"))
    command = [sys.executable, "-c", READ, json.dumps(SHAPES), dtype]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert reader.stdin is not None
        assert reader.stdout is not None
        for version in range(6):
            tensors = {name: torch.randn(shape, device="cuda") for name, shape in SHAPES.items()}
            published = writer.write(0, version, tensors)
            fields = {name: value for name, value in asdict(published).items() if name not in ("readers", "canary")}
            print(json.dumps(fields), file=reader.stdin, flush=True)
            *sums, device = reader.stdout.readline().split()
            assert device == "cuda:0"
            expected = [float(tensor.to(DTYPES[dtype]).double().sum()) for tensor in tensors.values()]
            assert list(map(float, sums)) == pytest.approx(expected, abs=1e-6)
    finally:
        reader.kill()
        reader.communicate(timeout=DEADLINE)
        writer.close()


def test_two_ranks_of_nccl_on_one_device_move_weights_and_give_up_a_dead_peer() -> None:
    bench = BenchDevice("cuda:0", EventTimer(), CupyRuntime("cuda:0"), 64 << 20)
    try:
        found = nccl_on_one_device(bench)
    except NotMeasured as refused:
        if not any(text in str(refused) for text in ("Duplicate GPU", "NCCL_ERROR_INVALID_USAGE")):
            raise  # The first is what nccl4py says, the second CuPy.
        pytest.skip("this NCCL refuses two ranks on one device; 2.28.9 does")
    assert found
    assert all(value < 5_000 for name, value in found.items() if name.startswith("abort"))


def test_all_measurements_of_a_device_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "asyncrl.bench.cli", "gpu", "--megabytes", "64", "--output", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, timeout=DEADLINE, check=True)
    (written,) = tmp_path.glob("gpu-*.json")
    failed = [
        name
        for name, value in json.loads(written.read_text())["measurements"].items()
        if str(value).startswith("failed:")
    ]
    assert not failed, done.stdout

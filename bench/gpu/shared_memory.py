"""CUDA memory of another process: measurement 2. The process that opens the handles is `python -m` this module."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial

from asyncrl.bench.gpu.bench_device import BenchDevice, EventTimer, NotMeasured, Results
from asyncrl.lanes.weights.transports.device_arena import CudaRuntime, CupyRuntime

HANDLES = 290
"""Tensors of a model of half a billion weights, each of which other systems give a handle of its own."""

DEADLINE = 300.0
"""Seconds for the other process."""


def cuda_ipc(bench: BenchDevice) -> Results:
    """Measures opening handles and copying from memory of another process, beside copies within a process."""
    arena, small = export(bench.cuda, bench.largest, HANDLES)
    order = {"device": bench.device, "arena": arena.hex(), "small": [handle.hex() for handle in small]}
    command = [sys.executable, "-m", __name__]
    text = json.dumps(order | {"size": bench.largest})
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=DEADLINE, check=False)
    if done.returncode:
        raise NotMeasured(f"the process that opens handles failed: {done.stderr.strip()[-300:]}")
    found: Results = json.loads(done.stdout)
    return found


def export(cuda: CudaRuntime, size: int, handles: int) -> tuple[bytes, list[bytes]]:
    """Returns the handle of a large allocation, and those of many small ones."""
    return cuda.export(cuda.allocate(size)), [cuda.export(cuda.allocate(4096)) for _ in range(handles)]


def opened(bench: BenchDevice, arena: bytes, small: Sequence[bytes]) -> Results:
    """Measures in the process that opens."""
    began = time.perf_counter()
    pointer = bench.cuda.open(arena)
    one = time.perf_counter() - began
    began = time.perf_counter()
    for handle in small:
        bench.cuda.open(handle)
    found = {"open_one_ms": 1e3 * one, f"open_{len(small)}_ms": 1e3 * (time.perf_counter() - began)}
    shared, own, target = bench.cuda.tensor(pointer, bench.largest), *(bench.block(bench.largest) for _ in range(2))
    for size in bench.sizes:
        theirs = bench.rate(size, partial(target[:size].copy_, shared[:size]))
        ours = bench.rate(size, partial(target[:size].copy_, own[:size]))
        found |= {f"shared_{size >> 10}_KiB_GB_s": theirs, f"shared_over_own_{size >> 10}_KiB": theirs / ours}
    return found


def main() -> None:
    order = json.loads(sys.stdin.read())
    bench = BenchDevice(order["device"], EventTimer(), CupyRuntime(order["device"]), order["size"])
    print(json.dumps(opened(bench, bytes.fromhex(order["arena"]), list(map(bytes.fromhex, order["small"])))))


if __name__ == "__main__":
    main()

"""Two ranks of NCCL on one GPU, which NCCL allows as an experiment only: measurements 7 and 8.

Each rank is a process, `python -m` this module, because NCCL_MULTI_RANK_GPU_ENABLE is read when NCCL is loaded.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from asyncrl.bench.gpu.bench_device import BenchDevice, NotMeasured, Results
from asyncrl.errors import DeadlineExceeded, PeerLost
from asyncrl.lanes.weights.transports.communicator import RECEIVER, TRAINER, Backend, OwnerThread
from asyncrl.lanes.weights.transports.nccl import Nccl4py, NcclBackend

SWITCH = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
CTAS = (4, 8, 16)
CONNECT_LIMIT = 60.0
LIMIT = 30.0
HANG = 2.0
"""Seconds for connecting, for a transfer, and after which one is given up whose peer is gone."""

ROUNDS = 5


def nccl_on_one_device(bench: BenchDevice) -> Results:
    """Measures transfers between two ranks by the number of blocks of NCCL's kernels, and how long an abort takes."""
    found: Results = {}
    for ctas in CTAS:
        values = _run_ranks(bench, {**SWITCH, "NCCL_MAX_CTAS": str(ctas)})
        found |= {f"{name}_{ctas}_ctas": value for name, value in values.items()}
    return found


def loop_lag(bench: BenchDevice) -> Results:
    """Measures how late an event loop runs while a thread of its own posts copies and looks for their end."""
    source = bench.block(bench.largest)
    target = bench.block(bench.largest)
    idle = asyncio.run(lag_beside(lambda: None))
    busy = asyncio.run(lag_beside(lambda: bench.timer.seconds(lambda: target.copy_(source))))
    return {"lag_p99_idle_ms": 1e3 * idle, "lag_p99_beside_copies_ms": 1e3 * busy}


async def lag_beside(work: "object", naps: int = 300) -> float:
    """Returns by how many seconds at the 99th percentile a sleep of 1 ms is late while a thread repeats work."""
    assert callable(work)
    thread = OwnerThread("measured copies")
    stopped = False

    def repeat() -> None:
        while not stopped:
            work()

    repeating = thread.submit(repeat)
    late = []
    for _ in range(naps):
        began = time.perf_counter()
        await asyncio.sleep(0.001)
        late.append(time.perf_counter() - began - 0.001)
    stopped = True
    await asyncio.wrap_future(repeating)
    thread.close()
    return sorted(late)[int(0.99 * len(late))]


def rank(backend: Backend, meeting: str, number: int, sizes: Sequence[int]) -> Results:
    """Is one rank. The trainer's measures; at the end the receiver leaves without a word, and the trainer gives up."""
    pair = backend.connect(meeting, number, CONNECT_LIMIT)
    found: Results = {}
    for size in sizes:
        part = torch.zeros(size, dtype=torch.uint8, device=backend.device)
        move = pair.send if number == TRAINER else pair.receive
        move([part], LIMIT)
        began = time.perf_counter()
        for _ in range(ROUNDS):
            move([part], LIMIT)
        found[f"pair_{size >> 10}_KiB_GB_s"] = ROUNDS * size / 1e9 / (time.perf_counter() - began)
    if number == RECEIVER:
        return {}
    began = time.perf_counter()
    try:
        pair.send([part], HANG)
    except (DeadlineExceeded, PeerLost):
        pair.close()
    return found | {"abort_ms": 1e3 * max(0.0, time.perf_counter() - began - HANG)}


def _run_ranks(bench: BenchDevice, variables: dict[str, str]) -> Results:
    """Runs both ranks. The meeting is made by the first, and handed to the second by its standard input."""
    environment = {**os.environ, **variables}
    command = [sys.executable, "-m", __name__, bench.device, *map(str, bench.sizes)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ranks = [subprocess.Popen(command, text=True, env=environment, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    try:
        print(TRAINER, file=ranks[TRAINER].stdin, flush=True)
        meeting = ranks[TRAINER].stdout.readline().strip()
        print(RECEIVER, meeting, file=ranks[RECEIVER].stdin, flush=True)
        printed, failed = ranks[TRAINER].communicate(timeout=2 * CONNECT_LIMIT + len(bench.sizes) * LIMIT)
    except subprocess.TimeoutExpired as hung:
        raise NotMeasured(f"the ranks hung, as NCCL warns: {hung}") from hung
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    if not printed:
        raise NotMeasured(f"NCCL did not run two ranks on one device: {failed.strip()[-300:]}")
    found: Results = json.loads(printed)
    return found


def main() -> None:
    device = sys.argv[1]
    sizes = list(map(int, sys.argv[2:]))
    backend = NcclBackend(Nccl4py(device))
    number, _, meeting = sys.stdin.readline().strip().partition(" ")
    if not meeting:
        meeting = backend.invite()
        print(meeting, flush=True)
    found = rank(backend, meeting, int(number), sizes)
    print(json.dumps(found), flush=True)
    if int(number) == RECEIVER:
        os._exit(0)  # Without a word to NCCL, as a process that is killed.


if __name__ == "__main__":
    main()

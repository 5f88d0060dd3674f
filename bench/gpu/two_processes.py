"""Decoding beside copies of another process, with and without MPS: measurement 4. Without MPS the two take turns on the
device. Each process is `python -m` this module, because MPS is chosen by variables when CUDA starts.

    decode   prints its steps a second alone, and once more for each line that it reads
    copy     prints a line when it copies, and copies until its input ends
"""

import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from asyncrl.bench.gpu.bench_device import BenchDevice, NotMeasured, Results, fastest, mps_daemon, timer_of
from asyncrl.bench.gpu.weights_on_device import STEPS, decoding

DEADLINE = 120.0
"""Seconds for a process to start, and to measure once."""


def copies_of_another_process(bench: BenchDevice, variables: Mapping[str, str] | None = None) -> Results:
    """Measures steps that read many weights for few rows, alone and while another process copies on the device.
    variables: of the environment of both processes."""
    with _started(bench, "decode", variables) as decoder:
        alone = float(_line(decoder))
        with _started(bench, "copy", variables) as copier:
            _line(copier)
            assert decoder.stdin is not None
            print("again", file=decoder.stdin, flush=True)
            beside = float(_line(decoder))
    return {"steps_a_second": alone, "share_beside_another_process": beside / alone}


def copies_of_another_process_under_mps(bench: BenchDevice) -> Results:
    """Measures the same while MPS lets both processes run on the device at once."""
    with mps_daemon() as variables:
        return copies_of_another_process(bench, variables)


@contextmanager
def _started(bench: BenchDevice, work: str, variables: Mapping[str, str] | None) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, "-m", __name__, work, bench.device, str(bench.largest)]
    environment = {**os.environ, **(variables or {})}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, text=True, env=environment, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _line(process: "subprocess.Popen[str]") -> str:
    """Reads a line that a process prints. Raises NotMeasured when it ends or is silent."""
    assert process.stdout is not None
    assert process.stderr is not None
    if not select.select([process.stdout], [], [], DEADLINE)[0]:
        raise NotMeasured(f"a process of the measurement printed nothing in {DEADLINE:.0f} s")
    line = process.stdout.readline().strip()
    if not line:
        raise NotMeasured(f"a process of the measurement failed: {process.stderr.read().strip()[-300:]}")
    return line


def main() -> None:
    work = sys.argv[1]
    device = sys.argv[2]
    size = int(sys.argv[3])
    timer = timer_of(device)
    if work == "decode":
        step = decoding(device, size)
        print(STEPS / fastest(timer, step), flush=True)
        for _ in sys.stdin:
            print(STEPS / fastest(timer, step), flush=True)
        return
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    timer.seconds(lambda: target.copy_(source))
    print("copying", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        timer.seconds(lambda: target.copy_(source))


if __name__ == "__main__":
    main()

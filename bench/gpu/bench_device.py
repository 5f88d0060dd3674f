"""The device as measurements see it: its name, a clock for work on it, CUDA's memory, the largest block to use."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Protocol

import torch

from asyncrl.lanes.weights.transports.device_arena import CudaRuntime

REPEATS = 5
"""Times that work is timed after it ran once; the fastest counts, as nothing makes a copy faster than it is."""


class NotMeasured(Exception):
    """Says why a measurement is left out on this machine."""


class DeviceTimer(Protocol):
    def seconds(self, work: Callable[[], object]) -> float:
        """Returns the seconds that the device takes for what `work` enqueues."""


class EventTimer:
    """Implements DeviceTimer with CUDA events."""

    def seconds(self, work: Callable[[], object]) -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        work()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3


class HostTimer:
    """Implements DeviceTimer for a device that does all work before a call returns."""

    def seconds(self, work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began


def timer_of(device: str) -> DeviceTimer:
    """Returns the clock for work on a device."""
    return EventTimer() if device.startswith("cuda") else HostTimer()


def fastest(timer: DeviceTimer, work: Callable[[], object]) -> float:
    """Returns the seconds of the fastest of several times."""
    work()
    return max(min(timer.seconds(work) for _ in range(REPEATS)), 1e-9)


@dataclass(frozen=True)
class BenchDevice:
    """The device under test. largest: bytes of a block; measurements take this and smaller ones."""

    device: str
    timer: DeviceTimer
    cuda: CudaRuntime
    largest: int

    def block(self, size: int) -> torch.Tensor:
        """Allocates bytes on the device, uint8 [size]."""
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def fastest(self, work: Callable[[], object]) -> float:
        """Returns the seconds of the fastest of several times."""
        return fastest(self.timer, work)

    def rate(self, size: int, work: Callable[[], object]) -> float:
        """Returns gigabytes a second for work that moves `size` bytes once."""
        return size / 1e9 / self.fastest(work)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of blocks from a thousandth of the largest up, in steps of eight."""
        return tuple(max(self.largest >> shift, 4096) for shift in (9, 6, 3, 0))


Results = dict[str, float]
"""Values by what they are, with their unit in the name."""

# NVIDIA's multi-process service (MPS), with which processes run on a GPU at once instead of in turns.


CONTROL = "nvidia-cuda-mps-control"
DEADLINE = 30.0
"""Seconds for a command to the service."""


@contextmanager
def mps_daemon() -> Iterator[dict[str, str]]:
    """Runs a service of its own for the programs that start with the yielded variables. Raises NotMeasured where it
    cannot be started, as in containers without the rights that it needs."""
    if shutil.which(CONTROL) is None:
        raise NotMeasured(f"{CONTROL} is not installed")
    with TemporaryDirectory() as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        started = _control(["-d"], "", variables)
        if started.returncode:
            raise NotMeasured(f"{CONTROL} did not start: {(started.stderr or started.stdout).strip()[-300:]}")
        try:
            yield variables
        finally:
            _control([], "quit\n", variables)


def _control(arguments: list[str], text: str, variables: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, **variables}
    command = [CONTROL, *arguments]
    try:
        return subprocess.run(
            command, input=text, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False
        )
    except subprocess.TimeoutExpired as silent:
        raise NotMeasured(f"{CONTROL} did not answer in {DEADLINE:.0f} s") from silent

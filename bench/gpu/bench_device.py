"""The device as measurements see it: its name, a clock for work on it, CUDA's memory, the largest block to use."""

import time
from collections.abc import Callable
from dataclasses import dataclass
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

"""Provides the rollout batch, the timing and the protocol of rounds for the scripts beside it.

Each script runs in an environment of its own, so this file uses the standard library and numpy only. A script prints
{"ready": ...} once its system runs, then one JSON line of results for each line that it reads.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from statistics import median
from typing import Any

import numpy as np

SAMPLES = 64
LENGTH = 1024
LARGE = 64 * 2**20
PIPELINED = 40
WINDOW = 8
Tensors = dict[str, Any]


def rollout() -> Tensors:
    """Makes four tensors of [SAMPLES * LENGTH] and two of [SAMPLES]; 852,480 bytes."""
    random = np.random.default_rng(0)
    kinds = {"ids": np.int32, "logp": np.float32, "mask": np.uint8, "versions": np.int32}
    made: Tensors = {name: random.integers(0, 100, SAMPLES * LENGTH).astype(dtype) for name, dtype in kinds.items()}
    return made | {"rewards": np.ones(SAMPLES, np.float32), "lens": np.ones(SAMPLES, np.int32)}


def size(tensors: Tensors) -> int:
    return sum(values.nbytes for values in tensors.values())


def last_values(arrays: Iterable[Any]) -> int:
    return sum(int(values[-1]) for values in arrays)


def rounds(ready: dict[str, object]) -> Iterator[None]:
    """Reports the versions, then yields once for each line of standard input."""
    print(json.dumps({"ready": ready}), flush=True)
    for _ in sys.stdin:
        yield


def report(results: dict[str, float]) -> None:
    print(json.dumps({name: round(value, 3) for name, value in results.items()}), flush=True)


def seconds_of(call: Callable[[], object], count: int) -> list[float]:
    """Times `count` calls, one after the other."""
    found = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


async def seconds_of_async(call: Callable[[], Awaitable[object]], count: int) -> list[float]:
    found = []
    for _ in range(count):
        start = time.perf_counter()
        await call()
        found.append(time.perf_counter() - start)
    return found


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Returns p50 and p99 in microseconds."""
    ranked = sorted(seconds)
    return {"rtt_p50_us": ranked[len(ranked) // 2] * 1e6, "rtt_p99_us": ranked[len(ranked) * 99 // 100] * 1e6}


def milliseconds(seconds: list[float]) -> float:
    return 1e3 * median(seconds)


def gigabytes_per_second(seconds: list[float], size: int = LARGE) -> float:
    return size / median(seconds) / 1e9


async def in_window(call: Callable[[], Awaitable[object]], count: int, width: int = WINDOW) -> float:
    """Returns the seconds for `count` calls, `width` at a time."""
    start = time.perf_counter()

    async def caller() -> None:
        for _ in range(count // width):
            await call()

    await asyncio.gather(*(caller() for _ in range(width)))
    return time.perf_counter() - start

"""What the scripts beside this one share; the standard library and numpy only, for each has an environment of its own.

A script prints {"ready": ...} when its system is up, then one JSON line of results for each line that it reads.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from statistics import median
from typing import Any

import numpy as np

SAMPLES, LENGTH = 64, 1024
LARGE = 64 * 2**20
PIPELINED, WINDOW = 40, 8
Tensors = dict[str, Any]


def rollout() -> Tensors:
    """Four tensors of [SAMPLES * LENGTH], two of [SAMPLES]; 852,480 bytes."""
    random = np.random.default_rng(0)
    kinds = {"ids": np.int32, "logp": np.float32, "mask": np.uint8, "versions": np.int32}
    made: Tensors = {name: random.integers(0, 100, SAMPLES * LENGTH).astype(dtype) for name, dtype in kinds.items()}
    return made | {"rewards": np.ones(SAMPLES, np.float32), "lens": np.ones(SAMPLES, np.int32)}


def size(tensors: Tensors) -> int:
    return sum(values.nbytes for values in tensors.values())


def last_values(tensors: Tensors) -> int:
    return sum(int(values[-1]) for values in tensors.values())


def rounds(ready: dict[str, object]) -> Iterator[None]:
    print(json.dumps({"ready": ready}), flush=True)
    for _ in sys.stdin:
        yield


def tell(results: dict[str, float]) -> None:
    print(json.dumps({name: round(value, 3) for name, value in results.items()}), flush=True)


def percentiles(call: Callable[[], object], count: int) -> dict[str, float]:
    """p50 and p99 in microseconds."""
    return _of(sorted(_timed(call) for _ in range(count)))


async def percentiles_async(call: Callable[[], Awaitable[object]], count: int) -> dict[str, float]:
    return _of(sorted([await _timed_async(call) for _ in range(count)]))


def _of(seconds: list[float]) -> dict[str, float]:
    return {"rtt_p50_us": seconds[len(seconds) // 2] * 1e6, "rtt_p99_us": seconds[len(seconds) * 99 // 100] * 1e6}


def milliseconds(call: Callable[[], object], count: int) -> float:
    return 1e3 * median(_timed(call) for _ in range(count))


async def milliseconds_async(call: Callable[[], Awaitable[object]], count: int) -> float:
    return 1e3 * median([await _timed_async(call) for _ in range(count)])


async def in_window(call: Callable[[], Awaitable[object]], count: int, width: int = WINDOW) -> float:
    """Seconds for `count` calls, `width` at a time."""
    start = time.perf_counter()

    async def lane() -> None:
        for _ in range(count // width):
            await call()

    await asyncio.gather(*(lane() for _ in range(width)))
    return time.perf_counter() - start


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


async def _timed_async(call: Callable[[], Awaitable[object]]) -> float:
    start = time.perf_counter()
    await call()
    return time.perf_counter() - start

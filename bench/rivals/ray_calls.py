"""Measures Ray: the driver calls a synchronous actor in a process of its own."""

import os
import time
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import call_timing
import numpy as np
import ray


@ray.remote(num_cpus=0)
class RaySink:
    def echo(self, payload: bytes) -> bytes:
        return payload

    def take(self, tensors: call_timing.Tensors) -> int:
        return call_timing.last_values(tensors.values())


def main() -> None:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=2**29)
    sink = RaySink.remote()
    batch = call_timing.rollout()
    large = {"data": np.ones(call_timing.LARGE, np.uint8)}
    payload = b"x" * 64
    ray.get([sink.echo.remote(payload), sink.take.remote(batch)])
    for _ in call_timing.rounds({"ray": ray.__version__}):
        results = call_timing.percentiles(call_timing.seconds_of(lambda: ray.get(sink.echo.remote(payload)), 150))
        start = time.perf_counter()
        ray.get([sink.echo.remote(payload) for _ in range(500)])
        results["calls_per_s"] = 500 / (time.perf_counter() - start)
        seconds = call_timing.seconds_of(lambda: ray.get(sink.take.remote(batch)), 20)
        results["batch_ms"] = call_timing.milliseconds(seconds)
        results["piped_gb_s"] = _pipelined(sink, batch)
        seconds = call_timing.seconds_of(lambda: ray.get(sink.take.remote(large)), 3)
        results["large_gb_s"] = call_timing.gigabytes_per_second(seconds)
        call_timing.report(results)


def _pipelined(sink: Any, batch: call_timing.Tensors) -> float:
    start = time.perf_counter()
    waiting = list[Any]()
    for _ in range(call_timing.PIPELINED):
        if len(waiting) >= call_timing.WINDOW:
            ray.get(waiting.pop(0))
        waiting.append(sink.take.remote(batch))
    ray.get(waiting)
    return call_timing.PIPELINED * call_timing.size(batch) / (time.perf_counter() - start) / 1e9


if __name__ == "__main__":
    main()

"""Measures Ray: the driver calls a synchronous actor in a process of its own."""

import os
import time
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import numpy as np
import ray
import timed_rounds


@ray.remote(num_cpus=0)
class Sink:
    def echo(self, payload: bytes) -> bytes:
        return payload

    def take(self, tensors: timed_rounds.Tensors) -> int:
        return timed_rounds.last_values(tensors.values())


def main() -> None:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=2**29)
    sink, batch, large = Sink.remote(), timed_rounds.rollout(), {"data": np.ones(timed_rounds.LARGE, np.uint8)}
    payload = b"x" * 64
    ray.get([sink.echo.remote(payload), sink.take.remote(batch)])
    for _ in timed_rounds.rounds({"ray": ray.__version__}):
        results = timed_rounds.percentiles(timed_rounds.seconds_of(lambda: ray.get(sink.echo.remote(payload)), 150))
        start = time.perf_counter()
        ray.get([sink.echo.remote(payload) for _ in range(500)])
        results["calls_per_s"] = 500 / (time.perf_counter() - start)
        seconds = timed_rounds.seconds_of(lambda: ray.get(sink.take.remote(batch)), 20)
        results["batch_ms"] = timed_rounds.milliseconds(seconds)
        results["piped_gb_s"] = _pipelined(sink, batch)
        seconds = timed_rounds.seconds_of(lambda: ray.get(sink.take.remote(large)), 3)
        results["large_gb_s"] = timed_rounds.gigabytes_per_second(seconds)
        timed_rounds.report(results)


def _pipelined(sink: Any, batch: timed_rounds.Tensors) -> float:
    start, waiting = time.perf_counter(), list[Any]()
    for _ in range(timed_rounds.PIPELINED):
        if len(waiting) >= timed_rounds.WINDOW:
            ray.get(waiting.pop(0))
        waiting.append(sink.take.remote(batch))
    ray.get(waiting)
    return timed_rounds.PIPELINED * timed_rounds.size(batch) / (time.perf_counter() - start) / 1e9


if __name__ == "__main__":
    main()

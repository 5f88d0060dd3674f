"""Measures TransferQueue: a process puts a rollout batch into two default storage units and gets it back."""

import os

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")

import call_timing
import ray
import torch
import transfer_queue
from call_timing import LARGE, SAMPLES
from tensordict import TensorDict

KEYS = [str(number) for number in range(SAMPLES)]


def main() -> None:
    # Eight logical processors: its actors would wait without end for processors that a small machine lacks.
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    transfer_queue.init()
    tensors = {name: torch.from_numpy(values) for name, values in call_timing.rollout().items()}
    batch = TensorDict({name: values.reshape(SAMPLES, -1) for name, values in tensors.items()}, batch_size=SAMPLES)
    large = TensorDict({"data": torch.ones(SAMPLES, LARGE // SAMPLES // 4)}, batch_size=SAMPLES)
    there_and_back(batch)
    for _ in call_timing.rounds({"TransferQueue": "0.1.11"}):
        milliseconds = call_timing.milliseconds(call_timing.seconds_of(lambda: there_and_back(batch), 5))
        speed = call_timing.gigabytes_per_second(call_timing.seconds_of(lambda: there_and_back(large), 1))
        call_timing.report({"batch_ms": milliseconds, "large_gb_s": speed})


def there_and_back(batch: TensorDict) -> int:
    transfer_queue.kv_batch_put(keys=KEYS, partition_id="bench", fields=batch)
    got = transfer_queue.kv_batch_get(keys=KEYS, partition_id="bench")
    last = sum(int(values[-1].reshape(-1)[-1]) for values in got.values())
    transfer_queue.kv_clear(keys=KEYS, partition_id="bench")
    return last


if __name__ == "__main__":
    main()

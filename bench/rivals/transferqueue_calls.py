"""TransferQueue, default storage: a process puts a rollout batch and gets it back through two storage units."""

import os

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")

import ray
import rounds
import torch
import transfer_queue
from tensordict import TensorDict

KEYS = [str(number) for number in range(rounds.SAMPLES)]


def main() -> None:
    # Logical processors only: its own actors ask for more than a small machine has, and would wait for ever.
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    transfer_queue.init()
    tensors = {name: torch.from_numpy(values) for name, values in rounds.rollout().items()}
    batch = TensorDict(
        {name: values.reshape(rounds.SAMPLES, -1) for name, values in tensors.items()}, batch_size=rounds.SAMPLES
    )
    large = TensorDict({"data": torch.ones(rounds.SAMPLES, rounds.LARGE // rounds.SAMPLES // 4)}, rounds.SAMPLES)
    there_and_back(batch)
    for _ in rounds.rounds({"TransferQueue": "0.1.11"}):
        results = {"batch_ms": rounds.milliseconds(lambda: there_and_back(batch), 5)}
        results["large_gb_s"] = rounds.LARGE / rounds.milliseconds(lambda: there_and_back(large), 1) / 1e6
        rounds.tell(results)


def there_and_back(batch: TensorDict) -> int:
    transfer_queue.kv_batch_put(keys=KEYS, partition_id="bench", fields=batch)
    got = transfer_queue.kv_batch_get(keys=KEYS, partition_id="bench")
    last = sum(int(values[-1].reshape(-1)[-1]) for values in got.values())
    transfer_queue.kv_clear(keys=KEYS, partition_id="bench")
    return last


if __name__ == "__main__":
    main()

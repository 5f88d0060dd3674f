"""Measures what weights, sampling and training cost on a GPU. Results are printed, and written with device and date.
The numbers of measurements that are finished stand in `bench/results`.

Exit status 77 says that there is no CUDA device. A measurement that cannot run here says why; the others go on.
"""

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from asyncrl.bench.gpu.bench_device import BenchDevice, EventTimer, NotMeasured, Results
from asyncrl.bench.gpu.language_model import sampling, training_step, vllm_pause
from asyncrl.bench.gpu.nccl_ranks import loop_lag, nccl_on_one_device
from asyncrl.bench.gpu.shared_memory import cuda_ipc
from asyncrl.bench.gpu.weights_on_device import (
    arena_transfers,
    copies_beside_decoding,
    copy_ceiling,
    host_transfers,
    strided_boxes,
    update_cost,
)
from asyncrl.bench.measurements import number
from asyncrl.errors import AsyncrlError
from asyncrl.lanes.weights.transports.device_arena import CupyRuntime

NOTHING_TO_RUN = 77
LARGEST = 4 << 30

MEASUREMENTS: Mapping[str, Callable[[BenchDevice], Results]] = {
    "1 copies on the device": copy_ceiling,
    "2 CUDA memory of another process": cuda_ipc,
    "3 parts of tensors": strided_boxes,
    "4 copies beside decoding": copies_beside_decoding,
    "5 cost of an update": update_cost,
    "5 pause of vLLM": vllm_pause,
    "6 host memory": host_transfers,
    "6 weights in shared memory": arena_transfers,
    "7 two ranks of NCCL on one device": nccl_on_one_device,
    "8 lateness of the event loop": loop_lag,
    "13 sampling": sampling,
    "14 a step of the trainer": training_step,
}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench gpu", description=__doc__)
    parser.add_argument("--only", nargs="*", metavar="NUMBER", default=[], help="numbers of measurements; default: all")
    parser.add_argument("--megabytes", type=int, default=LARGEST >> 20, help="MiB of the largest block")
    parser.add_argument("--output", type=Path, default=Path(), help="folder of the results")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("asyncrl-bench gpu: torch finds no CUDA device, so nothing was measured")
        raise SystemExit(NOTHING_TO_RUN)
    bench = BenchDevice("cuda:0", EventTimer(), CupyRuntime("cuda:0"), options.megabytes << 20)
    found = measure(bench, options.only)
    written = write(found, torch.cuda.get_device_name(0), options.output, datetime.now(UTC))
    print(f"written to {written}")


def measure(bench: BenchDevice, only: Sequence[str] = ()) -> dict[str, Results | str]:
    """Returns the results of each measurement, or why there are none, and prints them as they come."""
    found: dict[str, Results | str] = {}
    for name, work in MEASUREMENTS.items():
        if only and name.partition(" ")[0] not in only:
            continue
        found[name] = _one(bench, work)
        print(f"{name}: {_text(found[name])}", flush=True)
    return found


def write(found: Mapping[str, Results | str], device: str, folder: Path, now: datetime) -> Path:
    """Writes results to a file that device and date name."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-").lower()
    path = folder / f"gpu-{plain}-{now:%Y-%m-%d}.json"
    facts = {"device": device, "date": f"{now:%Y-%m-%dT%H:%MZ}", "torch": torch.__version__, "cuda": torch.version.cuda}
    path.write_text(json.dumps(facts | {"measurements": found}, indent=1) + "\n")
    return path


def _one(bench: BenchDevice, work: Callable[[BenchDevice], Results]) -> Results | str:
    try:
        return work(bench)
    except NotMeasured as reason:
        return f"not measured: {reason}"
    except (AsyncrlError, RuntimeError, OSError, MemoryError) as error:  # CUDA's errors are RuntimeErrors.
        return f"failed: {type(error).__name__}: {error}"


def _text(found: Results | str) -> str:
    if isinstance(found, str):
        return found
    return "".join(f"\n  {name:36} {number(value)}" for name, value in found.items())

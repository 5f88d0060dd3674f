"""Copies beside computing, and what a change of weights costs an engine: measurements 4, 5, 11 and 12."""

from collections.abc import Callable
from importlib.util import find_spec

import torch

from asyncrl.bench.gpu.bench_device import BenchDevice, NotMeasured, Results
from asyncrl.lanes.weights.slot_memory import block_views
from asyncrl.lanes.weights.tensor_spec import WeightsSpec

TENSORS = 290
STEPS = 20
RIVALS = ("checkpoint_engine", "verl")


def copies_beside_decoding(bench: BenchDevice) -> Results:
    """Measures steps that read many weights for few rows, as decoding does, alone and while copies run beside them."""
    source = bench.block(bench.largest)
    target = bench.block(bench.largest)
    decode = decoding(bench.device, bench.largest)

    def beside() -> None:
        with bench.cuda.side_stream():
            target.copy_(source, non_blocking=True)
        decode()

    alone = bench.fastest(decode)
    return {"steps_a_second": STEPS / alone, "share_beside_a_copy": alone / bench.fastest(beside)}


def decoding(device: str, largest: int) -> Callable[[], None]:
    """Returns work like STEPS decode steps: products of few rows with many weights."""
    width = max(16, int((largest / 8) ** 0.5) // 16 * 16)
    weights = torch.zeros(width, width, device=device)
    rows = torch.zeros(8, width, device=device)

    def decode() -> None:
        for _ in range(STEPS):
            torch.mm(rows, weights)

    return decode


def update_cost(bench: BenchDevice) -> Results:
    """Measures what an engine on the device pays for a version: a flip to views, one copy, a copy of each tensor, and
    the same from host memory."""
    count = max(1, bench.largest // 2 // TENSORS // 32 * 32)
    spec = WeightsSpec.of({f"layers.{number}.w": (count,) for number in range(TENSORS)}, "bfloat16")
    source = bench.block(spec.size)
    target = bench.block(spec.size)
    host = torch.zeros(spec.size, dtype=torch.uint8)
    views, parameters, of_host = (block_views(block, spec) for block in (source, target, host))
    model = [torch.nn.Parameter(parameters[name]) for name in parameters]

    def flip() -> None:
        for parameter, view in zip(model, views.values(), strict=True):
            parameter.data = view

    def copy_each(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)

    return {
        "flip_ms": 1e3 * bench.fastest(flip),
        "one_copy_ms": 1e3 * bench.fastest(lambda: target.copy_(source)),
        "copy_of_each_tensor_ms": 1e3 * bench.fastest(lambda: copy_each(views)),
        "copy_of_each_from_host_ms": 1e3 * bench.fastest(lambda: copy_each(of_host)),
    }


def sharded_gather(bench: BenchDevice) -> Results:
    """Needs several GPUs, which this command does not use."""
    raise NotMeasured("it needs several GPUs; `asyncrl-bench weights --plan fsdp8 tp2.dp4` prints what would be sent")


def published_rivals(bench: BenchDevice) -> Results:
    """Tells which rivals could be measured here."""
    there = [name for name in RIVALS if find_spec(name) is not None]
    found = f"{' and '.join(there)} installed" if there else f"neither {' nor '.join(RIVALS)} is installed"
    raise NotMeasured(f"{found}; no harness of ours drives them on a device yet")

"""Copies on the device and from host memory, and what new weights cost an engine: measurements 1 and 3 to 6."""

import time
from collections.abc import Callable
from functools import partial
from uuid import uuid4

import torch

from asyncrl.bench.gpu.bench_device import BenchDevice, Results
from asyncrl.lanes.shared_memory import Segment
from asyncrl.lanes.weights.arena import open_reader, open_writer
from asyncrl.lanes.weights.slot_memory import WeightsSpec, views

ROWS = 4096
COLUMNS = 4096
TENSORS = 12


def copy_ceiling(bench: BenchDevice) -> Results:
    """Measures copies on the device by size, and a kernel that reads and writes as much."""
    found: Results = {}
    for size in bench.sizes:
        source = bench.block(size)
        target = bench.block(size)
        found[f"copy_{size >> 10}_KiB_GB_s"] = bench.rate(size, partial(target.copy_, source))
        found[f"kernel_{size >> 10}_KiB_GB_s"] = bench.rate(size, partial(torch.add, source, 1, out=target))
    return found


def strided_boxes(bench: BenchDevice) -> Results:
    """Measures parts along the second dimension of twelve matrices: tensor by tensor, gathered in one call, whole."""
    side = min(ROWS, max(8, int((bench.largest / TENSORS) ** 0.5)))
    whole = [torch.zeros(side, side, dtype=torch.uint8, device=bench.device) for _ in range(TENSORS)]
    parts = [matrix[:, : side // 2] for matrix in whole]
    targets = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in parts]
    joined = torch.empty(TENSORS, side, side // 2, dtype=torch.uint8, device=bench.device)
    size = sum(part.numel() for part in parts)

    def by_tensor() -> None:
        for part, target in zip(parts, targets, strict=True):
            target.copy_(part)

    return {
        "by_tensor_GB_s": bench.rate(size, by_tensor),
        "all_at_once_GB_s": bench.rate(size, lambda: torch.stack(parts, out=joined)),
        "contiguous_GB_s": bench.rate(size, lambda: joined.copy_(torch.zeros_like(joined))),
    }


def host_transfers(bench: BenchDevice) -> Results:
    """Measures transfers from and to pageable memory, pinned memory, and memory that was mapped first and registered
    then, as an arena in shared memory is."""
    size = bench.largest
    device = bench.block(size)
    found = Results()
    segment = Segment.private(size)
    registered = torch.frombuffer(segment.buffer, dtype=torch.uint8)
    bench.cuda.register(registered.data_ptr(), size, read_only=False)
    try:
        pinned = torch.zeros(size, dtype=torch.uint8, pin_memory=device.is_cuda)
        places = {"pageable": torch.zeros(size, dtype=torch.uint8), "pinned": pinned, "registered": registered}
        for name, host in places.items():
            found[f"{name}_to_device_GB_s"] = bench.rate(size, partial(device.copy_, host, non_blocking=True))
            found[f"{name}_from_device_GB_s"] = bench.rate(size, partial(host.copy_, device, non_blocking=True))
    finally:
        bench.cuda.unregister(registered.data_ptr())
    return found


def arena_transfers(bench: BenchDevice) -> Results:
    """Measures the copy of a version out of the trainer's arena, as engines map it, before and after it is registered,
    and how long registering takes."""
    shape = (bench.largest // 4 // TENSORS,)
    spec = WeightsSpec.of({f"layers.{number}.w": shape for number in range(TENSORS)}, "bfloat16")
    writer = open_writer(f"asyncrl-bench-{uuid4().hex[:12]}", spec, "ipc")
    try:
        version = {each.name: torch.zeros(each.shape, dtype=torch.bfloat16) for each in spec.tensors}
        published = writer.write(0, 0, version)
        reader = open_reader(published, spec)
        tensors = reader.tensors(published)
        targets = [each.to(bench.device) for each in version.values()]

        def copy() -> None:
            for target, source in zip(targets, tensors.values(), strict=True):
                target.copy_(source)

        found = {"pageable_GB_s": bench.rate(spec.size, copy)}
        began = time.perf_counter()
        bench.cuda.register(*reader.mapping, read_only=True)
        found["registering_ms"] = 1e3 * (time.perf_counter() - began)
        try:
            return found | {"registered_GB_s": bench.rate(spec.size, copy)}
        finally:
            bench.cuda.unregister(reader.mapping[0])
            reader.close()
    finally:
        writer.close()


# Copies beside computing, and what a change of weights costs an engine: measurements 4 and 5.


TENSORS_OF_A_MODEL = 290
STEPS = 20


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
    count = max(1, bench.largest // 2 // TENSORS_OF_A_MODEL // 32 * 32)
    spec = WeightsSpec.of({f"layers.{number}.w": (count,) for number in range(TENSORS_OF_A_MODEL)}, "bfloat16")
    source = bench.block(spec.size)
    target = bench.block(spec.size)
    host = torch.zeros(spec.size, dtype=torch.uint8)
    in_place, parameters, of_host = (views(block, spec) for block in (source, target, host))
    model = [torch.nn.Parameter(parameters[name]) for name in parameters]

    def flip() -> None:
        for parameter, view in zip(model, in_place.values(), strict=True):
            parameter.data = view

    def copy_each(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)

    return {
        "flip_ms": 1e3 * bench.fastest(flip),
        "one_copy_ms": 1e3 * bench.fastest(lambda: target.copy_(source)),
        "copy_of_each_tensor_ms": 1e3 * bench.fastest(lambda: copy_each(in_place)),
        "copy_of_each_from_host_ms": 1e3 * bench.fastest(lambda: copy_each(of_host)),
    }

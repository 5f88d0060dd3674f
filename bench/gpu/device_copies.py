"""Copies on the device and from host memory: measurements 1, 3 and 6."""

import time
from functools import partial
from uuid import uuid4

import torch

from asyncrl.bench.gpu.bench_device import BenchDevice, Results
from asyncrl.lanes.shared_memory import Segment
from asyncrl.lanes.weights.arena import open_reader, open_writer
from asyncrl.lanes.weights.tensor_spec import WeightsSpec

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

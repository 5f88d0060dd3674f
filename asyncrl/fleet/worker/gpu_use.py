"""Reads how much memory of its GPU a worker uses, without importing torch or beginning to use the GPU."""

import sys
from typing import Any


def gpu_use(device: str) -> dict[str, float]:
    """Returns of a GPU `memory` and `total` (bytes that all processes use, and that it has) and `own` (bytes that torch
    reserves in this process); {} for a CPU, and before this process uses the GPU."""
    torch: Any = sys.modules.get("torch")
    if not device.startswith("cuda") or torch is None or not torch.cuda.is_initialized():
        return {}
    try:
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device)
    except RuntimeError:  # After an error of the GPU every call raises it; that of the next computation is reported.
        return {}
    return {"memory": float(total - free), "total": float(total), "own": float(own)}

"""Memory of a process: what it holds, also on a GPU, and which objects garbage collection leaves alone."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# ---- memory that is held, read without importing torch or beginning to use the GPU ---------------------------------


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


PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Returns the bytes of this process that are in memory, shared ones included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


# ---- objects that live long, whose collection would stop everything meanwhile --------------------------------------


YOUNG_OF_CALLER = 10_000
"""Objects that a process with many waiting calls makes, net, before the young ones are looked at. Python's 700 look at
the calls again and again: with 16,000 of them that was two fifths of the CPU time of a call."""


class FrozenObjects:
    """Objects that no garbage collection looks at. Each is freed with the last reference to it, but a cycle of frozen
    objects is not: when the process holds more than `most_blocks` of memory, twice as many as when all objects were
    last looked at, a full collection looks at all of them."""

    def __init__(self) -> None:
        self._freeze_all()

    def add_survivors(self) -> None:
        """Freezes what exists now, young garbage apart, in a time that does not depend on how much is frozen."""
        gc.collect(1)
        gc.freeze()
        if sys.getallocatedblocks() > self.most_blocks:  # Counting frozen objects takes 140 ms for a million.
            gc.unfreeze()
            self._freeze_all()

    def _freeze_all(self) -> None:
        gc.collect()
        gc.freeze()
        self.most_blocks = 2 * sys.getallocatedblocks()


@contextmanager
def gc_frozen(young: int = 0) -> Iterator[FrozenObjects]:
    """Freezes all objects that exist now, until the end of the block, which may add others. Inside it at least
    `young` objects are made before the young ones are looked at.

    A full collection scans all other objects and stops everything meanwhile: 19 ms in a controller and 104 ms in a
    worker with torch when nothing is frozen, and 127 ms for 100,000 samples in flight.
    """
    frozen = FrozenObjects()
    before = gc.get_threshold()
    gc.set_threshold(max(young, before[0]), *before[1:])
    try:
        yield frozen
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()

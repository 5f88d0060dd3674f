"""Excludes objects that live as long as their process from garbage collection."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Freezes all objects that exist now, until the end of the block.

    A full collection scans all other objects and stops everything meanwhile: 19 ms in a controller and 104 ms in a
    worker with torch when nothing is frozen.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()

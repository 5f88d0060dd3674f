"""Counts the bytecode instructions that Python executes: the same number at every repetition, on any machine."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Count:
    """instructions: executed so far, in all functions that began inside the block."""

    def __init__(self) -> None:
        self.instructions = 0


@contextmanager
def counting() -> Iterator[Count]:
    """Counts inside the block, at a hundred times the usual cost. Loops inside C functions, such as `sorted`, do not
    count, the Python functions that these call do."""
    count = Count()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call":
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
        elif event == "opcode":
            count.instructions += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)

"""Calls functions that only this process has in copies of it, from which nothing gets out but what they return."""

import asyncio
import ctypes
import io
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from asyncrl.rewards.execution.function_call import attempt
from asyncrl.rewards.sample import Function, FunctionResult, Sample, with_columns

NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x40000000
"""Flags of unshare(2): users, mounts, network."""
MOUNT_SETATTR, HERE, RECURSIVE, READ_ONLY = 442, -100, 0x8000, (ctypes.c_uint64 * 4)(1, 0, 0, 0)
"""The system call that makes all mounts read-only, and its arguments."""
OPEN = "this machine lets no process leave files and network (user namespaces)"
EXCERPT = 300


@dataclass(frozen=True, slots=True)
class ProcessCopies:
    """Has the method `run` of `ChildPool`. deadline: seconds of a function for all samples of a call."""

    functions: Sequence[Function]
    deadline: float

    async def run(self, function: int, samples: Sequence[Sample]) -> list[FunctionResult]:
        """Returns the result of function number `function` for each sample. What it keeps, prints, or writes to files
        or a network is lost with the copy; what it needs of both it lacks."""
        return await asyncio.to_thread(self._run, self.functions[function], samples)

    def _run(self, function: Function, samples: Sequence[Sample]) -> list[FunctionResult]:
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            _answer(writer, function, samples, self.deadline)
        os.close(writer)
        with open(reader, "rb") as answered:
            text = answered.read()
        os.waitpid(child, 0)
        if not text:
            return [FunctionResult(reason=f"it gave no answer within {self.deadline:g} s")] * len(samples)
        return [FunctionResult(value, reason) for value, reason in json.loads(text)]


def _answer(writer: int, function: Function, samples: Sequence[Sample], deadline: float) -> NoReturn:
    """Calls the function in a copy of the process, and ends the copy."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(math.ceil(deadline))
        sys.stdout = sys.stderr = io.StringIO()
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        system = ctypes.CDLL(None)
        if system.unshare(NEW_NAMESPACES) or system.syscall(MOUNT_SETATTR, HERE, b"/", RECURSIVE, READ_ONLY, 32):
            results = [FunctionResult(reason=OPEN)] * len(samples)
        else:
            calls = (attempt(function, [with_columns(sample)], False, deadline) for sample in samples)
            results = [asyncio.run(call)[0] for call in calls]
        os.write(writer, json.dumps([(each.value, each.reason[:EXCERPT]) for each in results]).encode())
    finally:
        os._exit(0)

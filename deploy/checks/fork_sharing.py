"""Checks whether workers can be forked on this machine, and how much memory they share by copy-on-write: tried with one
that has all imports and waits for its first line."""

import asyncio
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from asyncrl.deploy.checks.machine import Check
from asyncrl.deploy.process.fork_client import MODULES, CannotFork, ForkedWorker, Forks

NAME = "forked workers"
DEADLINE = 120.0
"""Seconds: a first import of torch from a cold disk takes up to a minute."""
INSTEAD = "workers are spawned, each imports for itself: a slower start and more memory, nothing else"


def fork_check(modules: Sequence[str] = MODULES) -> Check:
    """Fork a worker and look at its memory. modules: imported before."""
    if sys.platform != "linux":
        return Check(NAME, "note", "only on Linux", INSTEAD)
    try:
        return asyncio.run(_tried(modules))
    except CannotFork as why:
        return Check(NAME, "note", str(why), INSTEAD)


async def _tried(modules: Sequence[str]) -> Check:
    with Forks(os.environ, modules, DEADLINE, say=lambda text: None) as forks, tempfile.TemporaryFile() as output:
        _end(await forks.fork("torch", "doctor", output))  # It waits for the imports.
        began = time.monotonic()
        worker = await forks.fork("torch", "doctor", output)
        took = time.monotonic() - began
        try:
            shared, own = memory_of(worker.pid)
        finally:
            _end(worker)
    found = f"start in {took:.2f} s, share {shared / 2**20:.0f} MB and own {own / 2**20:.0f} MB at first"
    return Check(NAME, "ok", found)


def memory_of(pid: int) -> tuple[int, int]:
    """Bytes of memory that a process shares with others, and that it has alone; files that are mapped count."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text()
    size = {name: int(kilobytes) * 1024 for name, kilobytes in re.findall(r"^(\w+): +(\d+) kB$", lines, re.MULTILINE)}
    return size["Shared_Clean"] + size["Shared_Dirty"], size["Private_Clean"] + size["Private_Dirty"]


def _end(worker: ForkedWorker) -> None:
    worker.kill()
    worker.stdin.close()
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    worker.poll()

"""Forks a worker that waits for its first line, to check whether that works here and how much memory it shares."""

import asyncio
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from asyncrl.deploy.checks.machine import IMPORT_DEADLINE, Check
from asyncrl.deploy.process.fork_client import MODULES, CannotFork, ForkedWorker, Forks

INSTEAD = "workers are spawned and import for themselves, which makes the start slower and takes more memory"


def fork_check(modules: Sequence[str] = MODULES) -> Check:
    """Forks a worker and measures its memory. modules: imported before."""
    try:
        if sys.platform != "linux":
            raise CannotFork("only on Linux")
        return Check("forked workers", "ok", asyncio.run(_measure(modules)))
    except CannotFork as why:
        return Check("forked workers", "note", str(why), INSTEAD)


async def _measure(modules: Sequence[str]) -> str:
    with (
        Forks(os.environ, modules, IMPORT_DEADLINE, say=lambda text: None) as forks,
        tempfile.TemporaryFile() as output,
    ):
        _end(await forks.fork("torch", "doctor", output))  # It waits for the imports.
        began = time.monotonic()
        worker = await forks.fork("torch", "doctor", output)
        took = time.monotonic() - began
        try:
            return f"start in {took:.2f} s, {_memory_text(worker.pid)} at first"
        finally:
            _end(worker)


def _memory_text(pid: int) -> str:
    """Returns the memory that a process shares with others and has alone, with the files that it maps."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text()
    kilobytes = {name: int(size) for name, size in re.findall(r"^(\w+): +(\d+) kB$", lines, re.MULTILINE)}
    shared, own = (kilobytes[f"{kind}_Clean"] + kilobytes[f"{kind}_Dirty"] for kind in ("Shared", "Private"))
    return f"share {shared / 1024:.0f} MB and own {own / 1024:.0f} MB"


def _end(worker: ForkedWorker) -> None:
    worker.kill()
    worker.stdin.close()
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    worker.poll()

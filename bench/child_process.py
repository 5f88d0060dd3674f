"""Starts programs in processes of their own, with one environment for every side of a comparison."""

import os
import subprocess
from collections.abc import Sequence

MALLOC = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592:glibc.malloc.top_pad=268435456"
RUN_DEADLINE = 1800.0
"""Seconds for one run of a side."""


def environment(threads: int) -> dict[str, str]:
    """Returns the environment of a side. Waiting threads must not spin: they would take CPU time from other workers."""
    chosen = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "GLIBC_TUNABLES": MALLOC}
    return {**os.environ, **chosen, "TOKENIZERS_PARALLELISM": "false"}


def run_program(command: Sequence[str], variables: dict[str, str], deadline: float = RUN_DEADLINE) -> str:
    """Returns the standard output of a program.

    Raises:
        SystemExit: the program failed; the message holds the end of its output.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline, check=False, env=variables)
    if done.returncode != 0:
        raise SystemExit(f"{command[:3]} failed\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return done.stdout

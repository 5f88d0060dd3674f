"""Locks a run directory, so that two processes never write the same journal."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.errors import ConfigError


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Holds `run.lock`, so that one process works in a run directory. Raises ConfigError when another process does."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / "run.lock", "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise ConfigError(
                f"{run_dir} is in use by process {holder}; wait for it, end it, or choose another --run-dir"
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield

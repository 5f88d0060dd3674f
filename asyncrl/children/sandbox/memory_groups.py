"""Makes a memory cgroup for each sandbox, where this process may make one, so that the kernel limits all that the
sandbox is charged for: pages that no process shows, page tables, buffers of sockets, files in memory.

A group lies beside or below the group of this process, of version 1 or 2, and is removed with its sandbox. What a
process that was killed has left, the next one removes.
"""

import asyncio
import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

NAME = "asyncrl-sandbox-{}-{}"
JOINED = 'echo 0 >"$0"'
"""Shell command with which a process enters the group whose file is its argument."""
LIMITS_V1 = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.limit_in_bytes")
"""Both may not cross on the way, up or down: the first is written again. The second is there where swap is counted."""
SOCKETS_V1 = "memory.kmem.tcp.limit_in_bytes"
LIMITS_V2 = ("memory.max", "memory.swap.max")
TRIAL = 64 * 2**20
EMPTIED = 2.0
"""Seconds in which processes that were killed leave their group, which takes milliseconds."""
_numbers = itertools.count()


@dataclass(slots=True)
class MemoryGroup:
    """The group of one sandbox. folder: of the group. It is the sandbox's for its whole life; who starts the sandbox
    limits and removes it."""

    folder: Path
    _limit: int = field(default=0, init=False)

    @property
    def file(self) -> str:
        """Returns the file into which a process writes 0 to enter."""
        return str(self.folder / "cgroup.procs")

    def limit(self, most: int) -> None:
        """Limits memory to `most` bytes, without swap; raises OSError where the kernel does not take it."""
        if most == self._limit:
            return
        if (self.folder / LIMITS_V2[0]).exists():
            (self.folder / LIMITS_V2[0]).write_text(str(most))
            with suppress(OSError):  # Where the kernel has no swap.
                (self.folder / LIMITS_V2[1]).write_text("0")
        else:
            for name in (*LIMITS_V1[:2], SOCKETS_V1):
                with suppress(OSError):
                    (self.folder / name).write_text(str(most))
            (self.folder / LIMITS_V1[2]).write_text(str(most))
        self._limit = most

    def ended(self) -> int:
        """Returns how many processes the kernel has ended for want of memory in this group."""
        with suppress(OSError, ValueError):
            names = ("memory.events", "memory.oom_control")
            text = next(path for name in names if (path := self.folder / name).exists()).read_text()
            return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill "))
        return 0

    def remove(self) -> None:
        """Removes the group. One whose processes are about to end stays until the next start of a process."""
        with suppress(OSError):
            self.folder.rmdir()

    async def remove_emptied(self) -> None:
        """Removes the group once its last processes, which were killed, have left it; after EMPTIED it stays as above.
        No group of version 1 tells when that is."""
        with suppress(TimeoutError):
            async with asyncio.timeout(EMPTIED):
                while self.folder.exists():
                    self.remove()
                    await asyncio.sleep(0.005)


def places(root: Path = Path("/")) -> Iterator[Path]:
    """Yields folders in which a group with the controller for memory may be made: of version 1 the group of this
    process; of version 2 those around it which pass the controller on. root: of the file system, for tests."""
    own = dict[str, str]()
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        own |= dict.fromkeys(names.split(","), path)
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        _, _, _, top, mounted, *_ = before.split()
        kind, _, options = after.split()[:3]
        name = {"cgroup": "memory", "cgroup2": ""}.get(kind)
        if name is None or name not in own or (name and name not in options.split(",")):
            continue
        inside = os.path.relpath(own[name], top)
        folder = root / mounted.lstrip("/") / inside
        if inside.startswith("..") or own[name].startswith("/.."):  # The group lies outside of what is mounted.
            continue
        if name:
            yield folder
            continue
        for each in (folder, *folder.parents)[: len(Path(inside).parts) + 1]:
            with suppress(OSError):
                if "memory" in (each / "cgroup.subtree_control").read_text().split():
                    yield each


@cache
def home() -> tuple[Path | None, str]:
    """Returns the folder in which this process makes groups, after a trial; else None and why there is none."""
    reasons = []
    try:
        for folder in places():
            try:
                _sweep(folder)
                return _tried(folder), ""
            except OSError as error:
                reasons.append(f"{folder}: {error.strerror or error}")
    except (OSError, ValueError) as error:
        reasons.append(str(error))
    return None, "; ".join(reasons) or "no memory controller is passed on to the group of this process"


def new_group() -> MemoryGroup | None:
    """Makes a group; None where this process cannot."""
    folder, _ = home()
    return None if folder is None else _made(folder)


def _made(folder: Path) -> MemoryGroup:
    group = MemoryGroup(folder / NAME.format(os.getpid(), next(_numbers)))
    group.folder.mkdir()
    return group


def _tried(folder: Path) -> Path:
    """Returns the folder, once a process has entered a group there; raises OSError where none can."""
    group = _made(folder)
    try:
        group.limit(TRIAL)
        done = subprocess.run(["/bin/sh", "-c", JOINED, group.file], capture_output=True, check=False)
        if done.returncode:
            raise OSError(done.stderr.decode(errors="replace").strip().rpartition(": ")[2] or "no process may enter")
    finally:
        group.remove()
    return folder


def _sweep(folder: Path) -> None:
    """Removes empty groups of processes that have ended."""
    for path in folder.glob(NAME.format("*", "*")):
        if not Path("/proc", path.name.split("-")[2]).exists():
            MemoryGroup(path).remove()

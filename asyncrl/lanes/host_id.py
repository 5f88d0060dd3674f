"""Names hosts, so that workers know whether they share memory, and the controller which of them may fail together."""

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NewType

from asyncrl.lanes.shared_memory import SHARED_MEMORY

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
DEVICES = Path("/dev")

FaultDomain = NewType("FaultDomain", str)
"""Names what may fail at one moment with all workers in it: the machine of a host, whose containers share it."""

UNKNOWN_DOMAIN = FaultDomain("")


@dataclass(frozen=True, slots=True)
class HostId:
    """Names a host: equal for two processes if they can map the same shared memory.

    machine: the boot id of the kernel. memory: the file system at /dev/shm, which differs between two containers of one
    machine. name: for messages.
    """

    machine: str
    memory: str = ""
    name: str = field(default="", compare=False)

    @classmethod
    def here(cls) -> "HostId":
        """Returns the host of this process."""
        return _this_host()

    @property
    def fault_domain(self) -> FaultDomain:
        return FaultDomain(self.machine)


@cache
def _this_host() -> HostId:
    name = socket.gethostname()
    try:
        return HostId(BOOT_ID.read_text().strip(), str(SHARED_MEMORY.stat().st_dev), name)
    except OSError:
        return HostId(name, name=name)


def gpus_of_host(environment: Mapping[str, str], devices: Path = DEVICES) -> list[str]:
    """Returns the names of the NVIDIA GPUs that a process with this environment can use, without torch."""
    nodes = [path.name for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        count = len(nodes)
    else:
        chosen = [each.strip() for each in visible.split(",") if each.strip()]
        count = len(chosen[: chosen.index("-1")] if "-1" in chosen else chosen)
    return [f"cuda:{number}" for number in range(min(count, len(nodes)))]

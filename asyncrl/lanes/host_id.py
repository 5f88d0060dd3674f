"""Names hosts, so that workers know whether they share memory, and the controller which of them may fail together."""

import socket
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NewType

from asyncrl.lanes.shared_memory import SHARED_MEMORY

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

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

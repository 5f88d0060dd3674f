"""The choice of a transport of weights from where its two ends are."""

import socket
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.lanes.shared_memory import SHARED_MEMORY

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Says where an end is. host: the same for all processes that see the same shared memory. device: of its model."""

    host: str
    device: str

    @classmethod
    def here(cls, device: str) -> "WorkerPlace":
        """Returns the place of this process: two containers of one machine differ in the file system at /dev/shm."""
        try:
            return cls(f"{BOOT_ID.read_text().strip()}/{SHARED_MEMORY.stat().st_dev}", device)
        except OSError:
            return cls(socket.gethostname(), device)


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """Names a transport ("inproc", "shm", "tcp" or "file"), and says why it was chosen."""

    name: str
    reason: str


def choose_transport(
    named: str, trainer: WorkerPlace, generator: WorkerPlace, *, in_process: bool = False
) -> TransportChoice:
    """Chooses from `weights.transport` and the places of both ends. in_process: whether all workers are one process.

    Raises ConfigError for shared memory between hosts.
    """
    same_host = trainer.host == generator.host
    if named == "shm" and not same_host:
        raise ConfigError('weights.transport = "shm": trainer and generation are on different hosts; write "auto"')
    if in_process and named in ("auto", "shm"):
        return TransportChoice("inproc", "all workers are one process")
    if named != "auto":
        return TransportChoice(named, "as weights.transport says")
    if not same_host:
        return TransportChoice("tcp", "trainer and generation are on different hosts")
    copies = "" if (trainer.device, generator.device) == ("cpu", "cpu") else "; devices copy from and to it"
    return TransportChoice("shm", f"trainer and generation are on one host{copies}")

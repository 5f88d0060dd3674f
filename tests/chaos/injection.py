"""Does faults to a fleet on hosts, and ends them."""

import asyncio
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.faults import Fault
from tests.chaos.fleet_on_hosts import FleetOnHosts
from tests.chaos.victims import parent_of

BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault that was done. began, ended: by the monotonic clock."""

    fault: Fault
    began: float
    ended: float


async def inject(fault: Fault, fleet: FleetOnHosts) -> Injected | None:
    """Does a fault and returns when it has ended; returns None when there is nobody to do it to."""
    families: dict[str, Callable[[Fault, FleetOnHosts], Iterator[None]]] = {
        "network": _bad_network,
        "stop": _stopped,
        "disk": _full_disk,
        "memory": _full_memory,
        "clock": _stepped,
        "kill": _killed,
        "host": _hosts_down,
    }
    try:
        began = time.monotonic()
        with contextmanager(families[fault.kind.family])(fault, fleet):
            await asyncio.sleep(fault.seconds)
        return Injected(fault, began, time.monotonic())
    except NobodyThere:
        return None


class NobodyThere(Exception):
    """The victim does not run now."""


def _bad_network(fault: Fault, fleet: FleetOnHosts) -> Iterator[None]:
    (host,), hosts = fault.hosts, fleet.hosts
    begin, end = {
        "partition": (lambda: hosts.cut(host), lambda: hosts.heal(host)),
        "loss in one": (lambda: hosts.lose(host, 1), lambda: hosts.lose_no_more(host, 1)),
        "10 %": (lambda: hosts.lose(host, 0.1), lambda: hosts.lose_no_more(host, 0.1)),
        "10 Mbit": (lambda: hosts.limit_rate(host, "10mbit"), lambda: hosts.limit_no_more(host)),
    }[next(word for word in ("partition", "loss in one", "10 %", "10 Mbit") if fault.kind.name.startswith(word))]
    begin()
    try:
        yield
    finally:
        end()


def _chosen(fault: Fault, fleet: FleetOnHosts) -> list[int]:
    """Returns one process for each role, two different ones for a role that is named twice."""
    pids: list[int] = []
    for role in fault.roles:
        present = [pid for pid in fleet.victims(fault.hosts[0], role) if pid not in pids]
        if not present:
            raise NobodyThere
        pids.append(present[int(fault.chance * len(present))])
    return pids


def _stopped(fault: Fault, fleet: FleetOnHosts) -> Iterator[None]:
    (pid,) = _chosen(fault, fleet)
    parent = parent_of(pid)  # The entrance of a program stops with it.
    _signal(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for each in (pid, parent):
            if each is not None:
                _signal(each, signal.SIGCONT)


def _killed(fault: Fault, fleet: FleetOnHosts) -> Iterator[None]:
    for pid in _chosen(fault, fleet):
        fleet.note_killed(pid=pid)
        _signal(pid, signal.SIGKILL)
    yield


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _hosts_down(fault: Fault, fleet: FleetOnHosts) -> Iterator[None]:
    fleet.kill_hosts(fault.hosts)
    try:
        yield
    finally:
        fleet.down -= set(fault.hosts)


def _stepped(fault: Fault, fleet: FleetOnHosts) -> Iterator[None]:
    if fleet.clock is None:
        raise NobodyThere
    with fleet.clock_file(fault.hosts[0]).open("r+b") as file:
        file.write(struct.pack("=q", fault.amount))
    yield


def _full_disk(fault: Fault, fleet: FleetOnHosts) -> Iterator[None]:
    (host,) = fault.hosts
    return _filled(fleet.disk if host == 1 else _seen_by(fleet, host, fleet.cache))


def _full_memory(fault: Fault, fleet: FleetOnHosts) -> Iterator[None]:
    return _filled(_seen_by(fleet, fault.hosts[0], Path("/dev/shm")))


def _seen_by(fleet: FleetOnHosts, host: int, path: Path) -> Path:
    first = fleet.hosts.first_process(host)
    if first is None:
        raise NobodyThere
    return Path(f"/proc/{first}/root") / path.relative_to("/")


def _filled(folder: Path) -> Iterator[None]:
    """Fills a small disk to its last byte. It may vanish with its host meanwhile."""
    path = folder / "filled"
    with suppress(FileNotFoundError, ProcessLookupError):
        with path.open("wb") as file, suppress(OSError):
            disk = os.statvfs(folder)
            os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_frsize)
        with path.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(BLOCK))
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)

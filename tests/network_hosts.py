"""Hosts on this machine with a network of their own: each has namespaces for network, processes, names and mounts, its
own /dev/shm and its own identity. A bridge in one more namespace connects them, and nothing leaves it.

    h1 10.77.0.1 ──veth──┐
    h2 10.77.0.2 ──veth──┼── bridge
    h3 10.77.0.3 ──veth──┘

Needs root, iproute2 and util-linux; faults of the network need iptables, too.
"""

import os
import secrets
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

LIMIT = 20.0
"""Seconds that one command may take, and that a killed process may take to end."""

PACKAGES = {"iproute2": ["ip", "tc"], "util-linux": ["unshare", "nsenter"], "iptables": ["iptables"]}
"""Programs that hosts need, by the package of Debian that has them."""

FIRST_PROCESS = """\
hostname "$0"
mount -t tmpfs -o "size=$1" tmpfs /dev/shm
mount --bind "$2" /etc/hosts
mount --bind /dev/null /etc/resolv.conf
mount --bind "$3" /proc/sys/kernel/random/boot_id
echo ready
while :; do sleep 3600; done
"""
"""Shell script that makes a host of new namespaces and stays its first process, which buries orphans. $0: its name.
$1: size of its shared memory. $2: the names of all hosts. $3: its boot id, by which asyncrl knows machines."""


def why_no_hosts() -> str:
    """Returns why this machine can have no network hosts and how to change that, "" if it can."""
    if os.geteuid() != 0:
        return "network hosts need root"
    if absent := [package for package, programs in PACKAGES.items() if not all(map(shutil.which, programs))]:
        return f"network hosts need more programs: apt-get install {' '.join(absent)}"
    probe = f"arl{secrets.token_hex(3)}"
    if not _succeeds("ip", "netns", "add", probe):
        return "this machine lets nobody make network namespaces"
    enters = _succeeds("ip", "netns", "exec", probe, "unshare", "--mount", "--pid", "--fork", "--mount-proc", "true")
    _run("ip", "netns", "del", probe)
    return "" if enters else "this machine lets nobody make namespaces of processes and file systems"


def _succeeds(*command: str) -> bool:
    return subprocess.run(command, check=False, timeout=LIMIT, capture_output=True).returncode == 0


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, timeout=LIMIT, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


def _child_of(process: "subprocess.Popen[bytes]") -> int | None:
    with suppress(FileNotFoundError, ProcessLookupError):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return int(children[0]) if children else None
    return None


class HostProgram:
    """A program on a host. Its exit status is that of the program, which ends with its host."""

    def __init__(self, entrance: "subprocess.Popen[bytes]") -> None:
        self._entrance = entrance

    @property
    def pid(self) -> int | None:
        """Returns its process id as seen from outside; None before it was started and after it has ended."""
        return _child_of(self._entrance)

    def poll(self) -> int | None:
        return self._entrance.poll()

    def wait(self, timeout: float) -> int:
        return self._entrance.wait(timeout)

    def send_signal(self, number: int) -> None:
        if (pid := self.pid) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Kills the program, but not what it started, and waits for its end."""
        self.send_signal(signal.SIGKILL)
        if self.pid is None:  # It has not entered its host yet.
            self._entrance.kill()
        self._entrance.wait(LIMIT)


@dataclass(eq=False)
class NetworkHosts:
    """Hosts by their numbers from 1. Use `network_hosts`.

    folder: keeps their names. shared_memory: size of each /dev/shm. prefix: of all that `ip netns list` shows of them.
    """

    folder: Path
    count: int
    shared_memory: str = "512m"
    prefix: str = field(default_factory=lambda: f"arl{secrets.token_hex(3)}")

    def __post_init__(self) -> None:
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._programs: list[HostProgram] = []
        self._names = self.folder / f"{self.prefix}.hosts"

    @property
    def _switch(self) -> str:
        return f"{self.prefix}-switch"

    def _network(self, number: int) -> str:
        return f"{self.prefix}-h{number}"

    def address(self, number: int) -> str:
        return f"10.77.0.{number}"

    # ---- programs

    def start(
        self, number: int, command: Sequence[str], output: Path, environment: Mapping[str, str] | None = None
    ) -> HostProgram:
        """Starts a program on a host, in the folder of this process, and appends to `output` what it prints. Boots the
        host if it does not run."""
        into = ["nsenter", "-t", str(self.boot(number)), "-m", "-u", "-i", "-n", "-p", f"--wd={Path.cwd()}"]
        with output.open("ab") as file:
            entrance = subprocess.Popen(
                [*into, *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
            )
        self._programs.append(HostProgram(entrance))
        return self._programs[-1]

    def first_process(self, number: int) -> int | None:
        """Returns the process id of the first process of a host; None when the host does not run."""
        return _child_of(self._running[number]) if number in self._running else None

    def boot(self, number: int) -> int:
        """Returns the process id of the first process of a host, which is started if the host does not run."""
        if (pid := self.first_process(number)) is None:
            self._running[number] = self._booted(number)
            pid = self.first_process(number)
        assert pid is not None, f"host {number} ended while it booted"
        return pid

    def _booted(self, number: int) -> "subprocess.Popen[bytes]":
        boot_id = self.folder / f"{self.prefix}.boot{number}"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        self.heal(number)
        process = subprocess.Popen(
            [
                *("ip", "netns", "exec", self._network(number)),
                *["unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"],
                *("bash", "-e", "-c", FIRST_PROCESS, f"h{number}", self.shared_memory, self._names, boot_id),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        with process.stdout as output:
            assert output.readline() == b"ready\n", f"host {number} did not boot"
        return process

    def kill(self, number: int) -> None:
        """Kills a host with all its processes at once, unplugged like one without power: no connection is closed. The
        next `start` boots it again and plugs it in."""
        if (process := self._running.pop(number, None)) is not None:
            self.cut(number)
            process.kill()
            process.wait(LIMIT)

    # ---- the network

    def cut(self, number: int) -> None:
        """Unplugs a host: packets vanish, and nobody is told."""
        _run("ip", "-n", self._switch, "link", "set", f"port{number}", "down")

    def heal(self, number: int) -> None:
        _run("ip", "-n", self._switch, "link", "set", f"port{number}", "up")

    def lose(self, number: int, share: float) -> None:
        """Drops this share of the packets that the host is sent; 1 is a loss in one direction."""
        self._filter(number, "-A", share)

    def lose_no_more(self, number: int, share: float) -> None:
        """Ends what `lose` began with the same share."""
        self._filter(number, "-D", share)

    def _filter(self, number: int, change: str, share: float) -> None:
        chance = [] if share == 1 else ["-m", "statistic", "--mode", "random", "--probability", f"{share:g}"]
        rule = ["iptables", "-w", change, "INPUT", "-i", "eth0", *chance, "-j", "DROP"]
        _run("ip", "netns", "exec", self._network(number), *rule)

    def limit_rate(self, number: int, rate: str) -> None:
        """Limits both directions to a rate such as "10mbit"."""
        for network, device in ((self._network(number), "eth0"), (self._switch, f"port{number}")):
            bucket = ["tbf", "rate", rate, "burst", "64kb", "latency", "200ms"]
            _run("tc", "-n", network, "qdisc", "replace", "dev", device, "root", *bucket)

    def limit_no_more(self, number: int) -> None:
        for network, device in ((self._network(number), "eth0"), (self._switch, f"port{number}")):
            _run("tc", "-n", network, "qdisc", "del", "dev", device, "root")

    # ---- their life

    def up(self) -> None:
        numbers = range(1, self.count + 1)
        names = [f"{self.address(number)} h{number}" for number in numbers]
        self._names.write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for number in numbers:
            host = self._network(number)
            port = f"port{number}"
            _run("ip", "netns", "add", host)
            ends = ["link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host]
            _run("ip", "-n", self._switch, *ends)
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", host, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            _run("ip", "-n", host, "link", "set", "lo", "up")
            _run("ip", "-n", host, "link", "set", "eth0", "up")

    def down(self) -> None:
        """Kills all processes on the hosts, and removes the hosts."""
        for number in [*self._running]:
            self.kill(number)
        for program in self._programs:
            program.wait(LIMIT)
        for line in _run("ip", "netns", "list").splitlines():
            if line.startswith(f"{self.prefix}-"):
                _run("ip", "netns", "del", line.split()[0])
        for path in self.folder.glob(f"{self.prefix}.*"):
            path.unlink()


@contextmanager
def network_hosts(folder: Path, count: int, shared_memory: str = "512m") -> Iterator[NetworkHosts]:
    """Makes hosts, and removes them with all that runs there at the end of the block."""
    hosts = NetworkHosts(folder, count, shared_memory)
    try:
        hosts.up()
        yield hosts
    finally:
        hosts.down()

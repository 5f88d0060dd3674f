"""A run whose workers join from two other hosts, and its programs. One that a fault killed is started again, as a
machine does that boots. One that ends by itself is a failure of the product, and stays ended.

    h1  asyncrl run --restarts ── controller ── trainer      its run directory is a small disk that only h1 sees
    h2  asyncrl join x 3 ── generation, generation, reward      its cache is a small disk, too
    h3  as h2

The run begins, and goes on, with the workers of one host.
"""

import asyncio
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.faults import AGENT, CHILD, CONTROLLER, JOINED
from tests.chaos.run_watch import RunWatch
from tests.chaos.victims import children_of, from_outside, has_argument
from tests.network_hosts import HostProgram, NetworkHosts, network_hosts
from tests.processes import descendants

CLI = (sys.executable, "-m", "asyncrl.deploy.cli")
SERVED = ("generation", "generation", "reward")
"""Roles of the programs on each host of workers."""
LOOK = 0.03
"""Seconds between two looks at the run and its programs."""
RESTART = 0.3
"""Seconds until a program that a fault killed is started again."""
END = 60.0
"""Seconds that the run may take to end."""
FRUITLESS = 12
"""Starts of the run, without a step in between, after which no resume goes on."""
TRAINS = "--fleet.restarts=0"
"""Argument of the process below `asyncrl run --restarts` that trains."""
PORT = 7000
RUN_DISK = "2g"
CACHE_DISK = "256m"
CLOCK_SOURCE = Path(__file__).with_name("stepped_clock.c")


@dataclass(eq=False)
class Program:
    """A program of the fleet. exits: how often it ended with which status. killed: whether a fault killed it. began:
    when it was started, by the monotonic clock."""

    name: str
    role: str
    host: int
    command: Sequence[str]
    output: Path
    process: HostProgram | None = None
    exits: Counter[int] = field(default_factory=Counter)
    killed: bool = False
    began: float = 0.0

    @property
    def age(self) -> float:
        return time.monotonic() - self.began if self.process is not None else 0.0


class RunEnded(Exception):
    """The run ended in a way from which no resume goes on."""


@dataclass
class FleetOnHosts:
    """folder: of everything. flags: further ones for `asyncrl run`. down: hosts that are not to be booted. failures:
    programs that ended by themselves. controllers: how many there were. stay: the longest that a program on another
    host had been there when a controller died."""

    hosts: NetworkHosts
    folder: Path
    experiment: str
    flags: Sequence[str]
    down: set[int] = field(default_factory=set)
    ending: bool = False
    clock: Path | None = None
    fruitless: int = 0
    failures: list[str] = field(default_factory=list)
    controllers: int = 0
    stay: float = 0.0
    controller: int | None = None

    def __post_init__(self) -> None:
        self.disk = self.folder / "controller"
        self.run_dir = self.disk / "run"
        self.cache = self.folder / "cache"
        self.watch = RunWatch(self.run_dir, 1 + len(JOINED) * len(SERVED))
        self.run = Program("run", CONTROLLER, 1, self._run_command(), self.folder / "run.out")
        self._steps_at_end = 0
        self.programs = [self.run]
        for host in JOINED:
            for number, role in enumerate(SERVED):
                name = f"h{host}-{number}-{role}"
                self.programs.append(Program(name, role, host, self._serve_command(role), self.folder / f"{name}.out"))

    def _run_command(self) -> list[str]:
        counts = Counter(SERVED * len(JOINED))
        replicas = [text for role, count in counts.items() for text in (f"--{role}.replicas", str(count))]
        joined = ", ".join(f"{role} = {count // len(JOINED)}" for role, count in counts.items())
        address = f"tcp://{self.hosts.address(1)}:{PORT}"
        where = ["--run-dir", str(self.run_dir), "--listen", address, "--fleet.join_keys", str(self.disk / "keys")]
        return [*CLI, "run", self.experiment, *where, "--fleet.joined", f"{{{joined}}}", *replicas, *self.flags]

    def _serve_command(self, role: str) -> list[str]:
        where = ["--to", f"tcp://{self.hosts.address(1)}:{PORT}", "--cache", str(self.cache)]
        return [*CLI, "join", role, *where, "--key", str(self.folder / "keys" / f"{role}.key")]

    # ---- keeping alive

    def boot(self, host: int) -> None:
        """Boots a host that does not run, and hides from it what lies on the others."""
        if self.hosts.first_process(host) is not None:
            return
        self.hosts.boot(host)
        if host in JOINED:
            for path, size in ((self.disk, "1m"), (self.cache, CACHE_DISK)):
                mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
                assert self.hosts.start(host, mount, self.folder / "mounts.out").wait(END) == 0

    def environment(self, host: int) -> dict[str, str]:
        variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        if self.clock is not None:
            variables |= {"LD_PRELOAD": str(self.clock), "STEPPED_CLOCK": str(self.clock_file(host))}
        return variables

    def clock_file(self, host: int) -> Path:
        """Returns the file with the seconds by which the wall clock of a host is wrong."""
        return self.folder / f"clock{host}"

    async def keep(self, program: Program) -> None:
        """Starts a program, and again whenever a fault killed it; returns when the run is to end and the program has,
        or when it has ended by itself."""
        while not self.ending:
            if program.host not in self.down:
                self.boot(program.host)
                environment = self.environment(program.host)
                program.killed, program.began = False, time.monotonic()
                program.process = self.hosts.start(program.host, program.command, program.output, environment)
                while (status := program.process.poll()) is None:
                    await asyncio.sleep(LOOK)
                age = program.age
                program.process = None
                program.exits[status] += 1
                if not self.ending and not program.killed:
                    self._note_failure(program, f"after {age:.0f} s with exit status {status}")
                    return
            await asyncio.sleep(RESTART)

    def _note_failure(self, program: Program, how: str) -> None:
        self.failures.append(f"{program.name} ended by itself {how}")
        if program is self.run:
            raise RunEnded(f"{self.failures[-1]}:\n{self.shown[-3000:]}")
        self.watch.expected -= 1

    async def look(self) -> None:
        while True:
            self.watch.look()
            if (controller := self._find_controller()) != self.controller:
                if self.controller is not None:
                    self._note_end()
                self.controllers += controller is not None
                self.controller = controller
            await asyncio.sleep(LOOK)

    def _find_controller(self) -> int | None:
        """Returns the process that trains below the one that restarts it."""
        parent = self.run.process.pid if self.run.process is not None else None
        return next((pid for pid in children_of(parent) if has_argument(pid, TRAINS)), None) if parent else None

    def _note_end(self) -> None:
        """Notes the end of a controller, which `--restarts` follows with another one."""
        self.watch.controller_died()
        self.stay = max(self.stay, *(each.age for each in self.programs if each is not self.run))
        self.fruitless = 0 if len(self.watch.steps) > self._steps_at_end else self.fruitless + 1
        self._steps_at_end = len(self.watch.steps)
        if self.fruitless == FRUITLESS:
            raise RunEnded(f"{FRUITLESS} starts without a step:\n{self.shown[-3000:]}")

    async def until(self, true: Callable[[], bool], what: str, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not true():
                    await asyncio.sleep(LOOK)
        except TimeoutError:
            raise RunEnded(f"waited {seconds:g} s for {what}; it shows:\n{self.shown[-3000:]}") from None

    @property
    def shown(self) -> str:
        return self.run.output.read_text() if self.run.output.exists() else ""

    # ---- victims

    def victims(self, host: int, role: str) -> list[int]:
        """Returns the processes of a role that run on a host, as process ids of this machine."""
        if role == CONTROLLER:
            return [self.controller] if self.controller is not None else []
        if role == AGENT:
            programs = (each.process for each in self.programs if each.host == host)
            return [pid for process in programs if process is not None and (pid := process.pid) is not None]
        service = "reward" if role == CHILD else role
        instances = (each for each in self.watch.alive.values() if each.startswith(service))
        places = [self.watch.places[each] for each in instances if each in self.watch.places]
        first = self.hosts.first_process(host)
        inside = {pid for name, pid in places if name == f"h{host}"}
        pids = from_outside(first, inside) if first is not None and inside else []
        return [each for pid in pids for each in descendants(pid)] if role == CHILD else pids

    def note_killed(self, hosts: Sequence[int] = (), pid: int | None = None) -> None:
        """Notes the programs that a fault kills: those of these hosts, or the one with this process id."""
        for each in self.programs:
            is_it = pid is not None and each.process is not None and each.process.pid == pid
            each.killed |= is_it or each.host in hosts

    def kill_hosts(self, hosts: Sequence[int]) -> None:
        self.note_killed(hosts)
        self.down |= set(hosts)
        for host in hosts:
            self.hosts.kill(host)

    # ---- the end

    async def end(self) -> None:
        """Ends the run in order, by a signal that programs in the background of a shell do not ignore."""
        self.ending = True
        process = self.run.process
        assert process is not None, "the run was whole a moment ago"
        process.send_signal(signal.SIGTERM)
        await self.until(lambda: process.poll() is not None, "the end of the run", END)
        if process.poll() != 0:
            raise RunEnded(f"exit status {process.poll()} at the end:\n{self.shown[-3000:]}")


@contextmanager
def fleet_on_hosts(folder: Path, experiment: str, flags: Sequence[str]) -> Iterator[FleetOnHosts]:
    """Makes hosts, disks and keys for a fleet of which nothing runs yet; at the end of the block nothing runs any more.
    The folder keeps what programs printed, and the run directory."""
    disk = folder / "controller"
    for path in (disk, folder / "cache"):
        path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={RUN_DISK}", "tmpfs", disk], check=True, timeout=END)
    try:
        for role in set(SERVED):
            subprocess.run([*CLI, "admit", disk / "keys", role], check=True, timeout=END, stdout=subprocess.DEVNULL)
            (folder / "keys").mkdir(exist_ok=True)
            shutil.copy2(disk / "keys" / f"{role}.key", folder / "keys")
        with network_hosts(folder, 1 + len(JOINED)) as hosts:
            fleet = FleetOnHosts(hosts, folder, experiment, flags, clock=_stepped_clock(folder))
            for host in (1, *JOINED):
                fleet.clock_file(host).write_bytes(bytes(8))
            yield fleet
    finally:
        if (disk / "run").exists():
            shutil.copytree(disk / "run", folder / "run", ignore_dangling_symlinks=True)
        subprocess.run(["umount", disk], check=True, timeout=END)


def _stepped_clock(folder: Path) -> Path | None:
    """Returns the library that shifts the wall clock of a program; None where no compiler is."""
    if shutil.which("cc") is None:
        return None
    library = folder / "stepped_clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, CLOCK_SOURCE, "-ldl"], check=True, timeout=END)
    return library

"""Starts workers as processes of this machine, forked from one that has done their imports (fork_client.py) or spawned,
and allows them the files that a fleet opens.

The child reads its specification as one line on stdin, which stays open: at its end of file an orphan dies, and the
line "stop" asks a worker to finish. A pidfd reports a death the moment it happens.
"""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Literal, Self

from asyncrl.deploy.process.fork_client import CannotFork, ForkedWorker, Forks, worker_environment
from asyncrl.fleet.launching.launcher import remove_leftovers
from asyncrl.fleet.worker.worker_spec import Addresses, WorkerSpec
from asyncrl.lanes.bound_socket import family_of, on_tcp
from asyncrl.lanes.host_id import HostId
from asyncrl.lanes.shared_memory import unlink_instance_segments

# Limits of the files that the processes of a fleet may have open.


OWN_DESCRIPTORS = 64
WORKERS_DESCRIPTORS = 24
"""Descriptors that a process of a fleet may have open: its own, and for each worker connections, a pipe, a process
handle and mapped rows. With fewer, libzmq aborts the process or never returns."""

LARGE_FLEET = 1000
"""Workers for which a process that joins a fleet of unknown size is made ready, where its user may."""


def needed_descriptors(workers: int) -> int:
    """Returns how many a process of a fleet of so many workers needs."""
    return OWN_DESCRIPTORS + WORKERS_DESCRIPTORS * workers


def allow_descriptors(workers: int) -> None:
    """Lets this process and its children open as many files as a fleet of so many workers needs, within the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = needed_descriptors(workers)
    if hard != resource.RLIM_INFINITY:
        needed = min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


LOOPBACK = "127.0.0.1"
LAST_WORDS = 300
"""Characters of a dead worker's output that its cause of death quotes."""
SWEEP = """\
trap '' INT TERM HUP
read -r end_of_input
rm -rf "$1" /dev/shm/"asyncrl-$0-"*
"""
"""Shell script that waits until its standard input, a pipe that only the controller holds, ends: the controller has
closed its launcher, and has removed all itself, or is dead, and its workers with it. Then it removes what is left.
$0: name of one start of a run; a resume has another, so this may run late. $1: folder of sockets."""
SWEEPING = 5.0
"""Seconds that removing some files in memory may take."""


class LocalWorker:
    """A child process that was spawned or forked, and reads its specification as its first line. output: the file that
    it writes to. killed_at_stop: whether a worker that is asked to stop is killed instead."""

    def __init__(self, process: "subprocess.Popen[bytes] | ForkedWorker", spec: WorkerSpec, output: Path) -> None:
        assert process.stdin is not None
        self._process = process
        self._stdin = process.stdin
        self._output = output
        self._is_stopping = False
        self.killed_at_stop = False
        self.spec = spec
        self.host = HostId.here()
        self.pid = process.pid
        self.labels: Mapping[str, int | str] = {"pid": process.pid}
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pidfd = os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)
        self._send(f"{os.getpid()} {spec.to_json()}\n")

    def _send(self, line: str) -> None:
        """Writes a few kB into an empty pipe of 64 kB, which does not block."""
        if not self._ended.done():
            with suppress(BrokenPipeError):  # The worker is dead already, and `wait` says so.
                self._stdin.write(line.encode())

    def _reap(self) -> None:
        if self._process.poll() is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._stdin.close()
            self._ended.set_result(None)

    @property
    def has_left(self) -> bool:
        return False

    async def wait(self) -> str:
        await asyncio.shield(self._ended)
        status = self._process.returncode
        assert status is not None, "it has ended"
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        words = self._output.read_bytes()[-LAST_WORDS:].decode(errors="replace").strip().splitlines()
        said = f", its last words: {words[-1]}" if words else ""
        return f"exited with status {status}{said} (output: {self._output})"

    def stop(self) -> None:
        self._is_stopping = True
        self._send("stop\n")
        if self.killed_at_stop:
            self.kill()

    def terminate(self) -> None:
        self._process.terminate()

    def hurry(self) -> None:
        """Kills the worker if it is stopping, else as soon as it is to stop."""
        self.killed_at_stop = True
        if self._is_stopping:
            self.kill()

    def kill(self) -> None:
        self._process.kill()


class LocalLauncher:
    """Starts processes; leaving it removes the folder of their sockets and their shared memory. When this process is
    killed, the shell that runs SWEEP removes them.

    run: names both, and nothing that another launcher made. forks: what workers are forked from; None: all are spawned.
    host: address at which workers listen where `wire` is "tcp".
    """

    def __init__(
        self, run: str, wire: Literal["ipc", "tcp"] = "ipc", forks: Forks | None = None, host: str = LOOPBACK
    ) -> None:
        self._wire = wire
        self.host = host
        self._run = run
        self._forks = forks
        self._is_hurried = False
        self._workers: dict[str, LocalWorker] = {}
        self.sockets = Path(tempfile.mkdtemp(prefix=f"asyncrl-{run}-"))

    def __enter__(self) -> Self:
        command = ["/bin/sh", "-c", SWEEP, self._run, str(self.sockets)]
        self._sweeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        return self

    def __exit__(self, *_: object) -> None:
        """Removes sockets and shared memory, also when the sweeper is dead."""
        remove_leftovers(self._run)
        assert self._sweeper.stdin is not None
        self._sweeper.stdin.close()
        try:
            self._sweeper.wait(SWEEPING)
        except subprocess.TimeoutExpired:
            self._sweeper.kill()
            self._sweeper.wait(SWEEPING)

    def addresses(self, instance: str) -> Addresses:
        """Returns where an instance of this name is to listen."""
        if self._wire == "tcp":
            return Addresses(*(on_tcp(self.host, port) for port in _free_ports(3, self.host)))
        return Addresses(*(f"ipc://{self.sockets}/{instance}.{lane}" for lane in ("control", "work", "data")))

    async def spawn(self, spec: WorkerSpec) -> LocalWorker:
        guest = spec.guest and replace(spec.guest, addresses=self.addresses(spec.guest.instance))
        spec = replace(spec, addresses=self.addresses(spec.instance), guest=guest)
        output = spec.facts.run_dir / "logs" / f"{spec.instance}.out"
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("ab") as file:
            process = await self._fork(spec, file) or _spawn(spec, file)
        worker = self._workers[spec.instance] = LocalWorker(process, spec, output)
        worker.killed_at_stop = self._is_hurried
        return worker

    async def _fork(self, spec: WorkerSpec, output: IO[bytes]) -> ForkedWorker | None:
        """Returns the forked worker, or None when it is to be spawned."""
        fleet = spec.facts.config.fleet
        if self._forks is None or spec.origin == "spawn" or fleet.start == "spawn":
            return None
        if not self._forks.have_threads(fleet.threads):
            return None
        try:
            return await self._forks.fork(spec.origin, f"{spec.service}{spec.replica}.{spec.rank}", output)
        except CannotFork as why:
            self._forks.say(f"{spec.instance} is spawned instead of forked: {why}")
            return None

    def hurry(self) -> None:
        """Kills workers that are stopping, and from now on each that is to stop, but none that still works."""
        self._is_hurried = True
        for worker in self._workers.values():
            worker.hurry()

    def clean_up(self, spec: WorkerSpec) -> None:
        del self._workers[spec.instance]
        unlink_instance_segments(spec.facts.run, spec.facts.incarnation, spec.instance)
        for path in self.sockets.glob(f"{spec.instance}.*"):
            path.unlink()


def _spawn(spec: WorkerSpec, output: IO[bytes]) -> "subprocess.Popen[bytes]":
    """Starts a fresh Python that waits for its first line."""
    fleet = spec.facts.config.fleet
    return subprocess.Popen(
        [sys.executable, "-m", "asyncrl.deploy.process.worker_main"],
        stdin=subprocess.PIPE,
        bufsize=0,  # What a dead worker did not take is gone; a buffer would fail once more as it is closed.
        stdout=output,
        stderr=subprocess.STDOUT,
        process_group=0,  # A signal to our whole group is for us to act on.
        env=worker_environment(os.environ, fleet.threads, fleet.wire),
    )


def _free_ports(count: int, host: str) -> list[int]:
    """Returns free ports of an address of this host. Should another program take one before the worker does, the worker
    cannot listen, ends, and is started again with other ports."""
    with ExitStack() as scope:
        sockets = [scope.enter_context(socket.socket(family_of(host))) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]

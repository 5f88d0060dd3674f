"""The interface of launchers, which start workers, the launcher that runs workers as tasks of this process, and what
an earlier start of the run left behind. deploy/process/local_launcher.py starts processes."""

import asyncio
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from asyncrl.concurrency import unwrap
from asyncrl.fleet.worker.worker_runtime import OpenInstruments, instruments, run_worker
from asyncrl.fleet.worker.worker_spec import Addresses, WorkerSpec
from asyncrl.lanes.control.wire import InprocWire, Wire
from asyncrl.lanes.host_id import HostId
from asyncrl.lanes.shared_memory import unlink_instance_segments, unlink_run_segments
from asyncrl.lanes.weights.version_folder import folder_of_start
from asyncrl.telemetry.run_directory import RunDirectory

STOP_STAGES = (("stop", 5.0), ("terminate", 2.0), ("kill", 2.0))
"""Ways to end a worker, with the seconds until the next one; under 10 s in all."""


class LaunchedWorker(Protocol):
    """A started worker, wherever it runs. spec: with the addresses at which it listens. host: where it runs. labels:
    how a person finds it there, for fleet.jsonl ({"pid": 12}); the fleet does not read them."""

    spec: WorkerSpec
    host: HostId
    labels: Mapping[str, int | str]

    @property
    def has_left(self) -> bool:
        """Returns whether its host was asked to leave, so that its end is no death that something caused."""

    async def wait(self) -> str:
        """Returns how the worker ended ("killed by SIGKILL") once it is dead, or can never answer again. May be awaited
        repeatedly."""

    def stop(self) -> None:
        """Asks the worker to finish."""

    def terminate(self) -> None:
        """Ends a worker that does not react to `stop`."""

    def kill(self) -> None:
        """Ends the worker at once, without a chance to clean up."""


class Launcher(Protocol):
    """Starts workers."""

    async def spawn(self, spec: WorkerSpec) -> LaunchedWorker:
        """Starts a worker, and chooses where it listens. When it is cancelled, nothing is left running. Raises PeerLost
        where another instance has to be tried."""

    def clean_up(self, spec: WorkerSpec) -> None:
        """Removes what a dead instance left: shared memory and socket files."""


class InprocWorker:
    """A worker that is a task of this process. run: serves until its event is set. sever: breaks its connections.
    host: where it seems to run; None: here."""

    def __init__(
        self,
        spec: WorkerSpec,
        run: Callable[[asyncio.Event], Coroutine[Any, Any, None]],
        sever: Callable[[], None],
        host: HostId | None = None,
    ) -> None:
        self.spec = spec
        self.host = host or HostId.here()
        self.labels: Mapping[str, int | str] = {"pid": os.getpid()}
        self._sever = sever
        self._stop = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(run(self._stop), name=spec.instance)

    @property
    def has_left(self) -> bool:
        return False

    async def wait(self) -> str:
        await asyncio.wait([self.task])
        return self.how_ended()

    def how_ended(self) -> str:
        if self.task.cancelled():
            return "was killed"
        error = self.task.exception()
        return "ended" if error is None else f"failed: {unwrap(error)!r}"

    def stop(self) -> None:
        self._stop.set()

    def terminate(self) -> None:
        self.kill()

    def kill(self) -> None:
        """Severs the connections first, because a dead process sends nothing more, and then cancels the task."""
        self._sever()
        self.task.cancel()


@dataclass(slots=True)
class InprocLauncher:
    """Owns the tasks of its workers; `close` kills those that still run. wire: on which workers listen and connect;
    inproc: its part for addresses inside this process. open_instruments: of a worker."""

    wire: Wire
    inproc: InprocWire
    open_instruments: OpenInstruments = instruments
    _workers: list[InprocWorker] = field(default_factory=list)

    async def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            await worker.wait()

    async def spawn(self, spec: WorkerSpec) -> InprocWorker:
        spec = replace(spec, addresses=Addresses.inproc(spec.instance))

        def sever() -> None:
            for address in (spec.addresses.control, spec.addresses.work, spec.addresses.data):
                self.inproc.sever(address)

        self._workers = [worker for worker in self._workers if not worker.task.done()]
        runs = partial(run_worker, spec, self.wire, open_instruments=self.open_instruments)
        self._workers.append(InprocWorker(spec, runs, sever))
        return self._workers[-1]

    def clean_up(self, spec: WorkerSpec) -> None:
        unlink_instance_segments(spec.facts.run, spec.facts.incarnation, spec.instance)


class GuestWorker:
    """A worker in the process of another one, its host, with which it starts and ends."""

    def __init__(self, host: LaunchedWorker) -> None:
        assert host.spec.guest is not None, "the host was started with a guest"
        self._host = host
        self.spec = host.spec.guest
        self.host = host.host
        self.labels = host.labels

    @property
    def has_left(self) -> bool:
        return self._host.has_left

    async def wait(self) -> str:
        return await self._host.wait()

    def stop(self) -> None:
        self._host.stop()

    def terminate(self) -> None:
        self._host.terminate()

    def kill(self) -> None:
        self._host.kill()


@dataclass(slots=True, eq=False)
class SharedProcess:
    """Launches a host, a worker of this service, and its guest, once both are wanted. Neither is started again.
    launcher: of the host."""

    service: str
    launcher: Launcher | None = None
    guest: asyncio.Future[WorkerSpec] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    started: asyncio.Future[LaunchedWorker] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def spawn(self, spec: WorkerSpec) -> LaunchedWorker:
        if spec.service != self.service:
            self.guest.set_result(spec)
            return GuestWorker(await asyncio.shield(self.started))
        assert self.launcher is not None, "the host has a launcher"
        launched = await self.launcher.spawn(replace(spec, guest=await self.guest))
        self.started.set_result(launched)
        return launched

    def clean_up(self, spec: WorkerSpec) -> None:
        if spec.service == self.service and self.launcher is not None:
            self.launcher.clean_up(spec)
        else:
            unlink_instance_segments(spec.facts.run, spec.facts.incarnation, spec.instance)


class SharedProcesses:
    """The processes of a fleet that have guests. hosts: the service that is the host, by that of its guests, and those
    of its ranks that have the guests, by replica and rank of these; none: rank N has replica N."""

    def __init__(self, hosts: Mapping[str, tuple[str, Sequence[Sequence[int]]]]) -> None:
        self._hosts = hosts
        self._processes: dict[tuple[str, int], SharedProcess] = {}

    def launcher_of(self, service: str, replica: int, rank: int, launcher: Launcher) -> Launcher:
        """Returns what starts a worker. launcher: what would, without guests."""
        if service in self._hosts:
            host, ranks = self._hosts[service]
            return self._process(host, ranks[replica][rank] if ranks else replica)
        if service not in {host for host, _ in self._hosts.values()}:
            return launcher
        process = self._process(service, rank)
        process.launcher = launcher
        return process

    def _process(self, host: str, number: int) -> SharedProcess:
        return self._processes.setdefault((host, number), SharedProcess(host))


async def end_worker(launched: LaunchedWorker) -> None:
    """Ends a worker, stage by stage; returns when it is dead, or when it survived SIGKILL for its whole stage."""
    for stage, seconds in STOP_STAGES:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                getattr(launched, stage)()
                await launched.wait()
                return


# ---- leftovers of an earlier start: shared memory, folders of sockets, files of weights ----------------------------


def new_start(directory: RunDirectory, weights_folder: str | None = None) -> str:
    """Returns a name that no other start has: 16 hex digits, of which the first 8 are the run's id. weights_folder:
    value of `weights.folder` in a run whose weights are files.

    The caller holds run.lock, so the last start in this directory is over, and what it left is removed. A copy of the
    directory names a start whose run may be alive; device and inode, which a moved directory keeps and a copy does not,
    tell the two apart.
    """
    status = directory.path.stat()
    here = f"{status.st_dev} {status.st_ino}"
    text = directory.start.read_text() if directory.start.exists() else ""
    if last := re.fullmatch(rf"([0-9a-f]{{16}}) {here}\n(?:weights (.+)\n)?", text):
        remove_leftovers(last[1], None if last[2] is None else Path(last[2]))
    start = f"{directory.run_id()}{secrets.token_hex(4)}"
    weights = None if weights_folder is None else folder_of_start(weights_folder, directory.path, start)
    directory.start.write_text(f"{start} {here}\n" + ("" if weights is None else f"weights {weights}\n"))
    return start


def remove_leftovers(start: str, weights: Path | None = None) -> None:
    """Removes the shared memory and the socket folders named after this start, which must be over. weights: folder with
    its files of weights, of the same name."""
    unlink_run_segments(start)
    if weights is not None and weights.name == start:
        shutil.rmtree(weights, ignore_errors=True)
    for folder in Path(tempfile.gettempdir()).glob(f"asyncrl-{start}-*"):
        shutil.rmtree(folder, ignore_errors=True)

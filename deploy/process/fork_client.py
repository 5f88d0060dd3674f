"""The controller's end of the processes that workers are forked from (fork_server.py).

    begin ──> two processes import, beside the controller ──> fork ──> a child of this process
                      └── one of them is gone, hangs or refuses: both are started anew, or the worker is spawned

Imports little, so that `asyncrl run` can begin before it has imported the code that reads its config.
"""

import asyncio
import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

# The environment of worker processes, forked or spawned.


FRAME_MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "67108864",
}
"""Keep the memory of large received frames instead of mapping it anew for each: 3 to 8 times faster on frames of 64 MB.
Only where rows travel as frames; elsewhere it would merely hold memory."""

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
RANKS_MEET = {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
"""torch.distributed would listen where the host's name leads, which may be the network."""


def worker_environment(inherited: Mapping[str, str], threads: int = 1, wire: str = "ipc") -> dict[str, str]:
    """Returns the environment variables of a worker. threads, wire: `fleet.threads` and `fleet.wire` of the config."""
    openmp = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    malloc = FRAME_MALLOC if wire == "tcp" else {}
    return {**malloc, **RANKS_MEET, **inherited, **openmp, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


Stage = Literal["plain", "torch"]
STAGES: tuple[Stage, ...] = ("plain", "torch")

PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37
MODULES = (
    "torch",
    "torch.fx.experimental.symbolic_shapes",  # Loading the first model imports it and sympy, which takes 0.6 s.
    "asyncrl.services.generation",
    "asyncrl.services.training",
)
"""Modules that are imported before torch workers are forked; all other services import little more."""
NUMPY_THREADS = {"OPENBLAS_NUM_THREADS": "1"}
"""numpy would start threads as it is imported; workers multiply matrices with torch."""
ANSWER_BYTES = 4096
ENDING = 5.0
"""Seconds that the kernel may take to end a process that was killed."""
LOOK = 1.0
"""Seconds between two looks at a process whose answer is awaited: one that was stopped (SIGSTOP) never answers."""
CANCELLED = 1.0
"""Seconds that a cancelled request for a worker waits for its answer; a fork takes 0.05."""
LAST_WORDS = 300
LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})


class CannotFork(Exception):
    """The worker must be spawned; the message says why."""


@dataclass(slots=True)
class ForkedWorker:
    """A child of this process that another process forked, with the interface of `subprocess.Popen`."""

    pid: int
    stdin: IO[bytes]
    returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit status once the process has ended; negative: the signal that ended it."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.returncode is None:  # Until `poll` has returned its status, no other process can have its pid.
            os.kill(self.pid, number)


@dataclass(slots=True)
class _Servers:
    """Holds both processes. output: what they write. pids: of those that have imported all."""

    process: "subprocess.Popen[bytes]"
    channels: Mapping[Stage, socket.socket]
    output: IO[bytes]
    pids: dict[Stage, int]

    def end(self) -> None:
        """Ends both: the kernel kills the second process with the first. Calls that wait for an answer fail."""
        self.process.kill()
        self.process.wait(ENDING)
        if "torch" in self.pids:
            with suppress(ChildProcessError):  # It is a child of this process if it was orphaned during a fork.
                os.waitpid(self.pids["torch"], 0)
        for channel in self.channels.values():
            with suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)

    def are_stopped(self, stage: Stage) -> bool:
        """Returns whether the process of a stage is stopped; before its imports either of both may be the cause."""
        if stage in self.pids:
            return _is_stopped(self.pids[stage])
        first = self.process.pid
        with suppress(OSError):
            children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
            return any(map(_is_stopped, (first, *map(int, children))))
        return False

    def last_words(self) -> str:
        self.output.seek(0)
        words = self.output.read()[-LAST_WORDS:].decode(errors="replace").strip().splitlines()
        return f", its last words: {words[-1]}" if words else ""


@dataclass(eq=False)
class Forks:
    """Forks workers. Processes are started by `begin`, and anew for the next worker after they have died.

    environment: of all workers. modules: that those with torch need. deadline: seconds that imports may take. say: gets
    a line when something is wrong with the processes to fork from.
    """

    environment: Mapping[str, str]
    modules: Sequence[str] = MODULES
    deadline: float = 120.0
    say: Callable[[str], None] = print

    def __post_init__(self) -> None:
        self._servers: _Servers | None = None
        self._files = ExitStack()  # Closed at the end: calls may still wait for answers of ended processes.
        self._unfit: dict[Stage, str] = {}  # Stages that died before they had imported all, and would again.
        self._turn: dict[Stage, asyncio.Lock] = {}

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._files.close()

    def serve(self, deadline: float, say: Callable[[str], None]) -> None:
        """Serves another run from now on, which may have another event loop; the run before it has ended."""
        self.deadline = deadline
        self.say = say
        self._turn = {}

    def begin(self) -> None:
        """Starts both processes, which import while this one goes on."""
        pairs = {stage: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for stage in STAGES}
        theirs = [other.fileno() for _, other in pairs.values()]
        output = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        arguments = [str(os.getpid()), *map(str, theirs), *self.modules]
        process = start_servers(arguments, theirs, output, {**NUMPY_THREADS, **self.environment})
        for ours, other in pairs.values():
            other.close()
            self._files.enter_context(ours).setblocking(False)
        self._servers = _Servers(process, {stage: ours for stage, (ours, _) in pairs.items()}, output, {})

    def end(self) -> None:
        """Ends both processes; workers live on, and the next fork starts the processes anew."""
        if self._servers is not None:
            self._servers.end()
            self._servers = None

    @property
    def pids(self) -> Mapping[Stage, int]:
        """Process ids of the processes to fork from, as far as they have answered."""
        return dict(self._servers.pids) if self._servers is not None else {}

    async def fork(self, stage: Stage, name: str, output: IO[bytes]) -> ForkedWorker:
        """Returns a worker that has the imports of this stage and waits for its first line. name: what `ps` shows.
        Raises CannotFork when the worker must be spawned."""
        async with self._turn.setdefault(stage, asyncio.Lock()):
            if stage in self._unfit:
                raise CannotFork(self._unfit[stage])
            try:
                return await self._fork(stage, name, output)
            except _ServerGone as gone:
                self.say(f"{gone}; another one is started, workers live on")
            return await self._fork(stage, name, output)

    def have_threads(self, threads: int) -> bool:
        """Returns whether the processes compute with so many threads, which are set before their imports."""
        return self.environment.get("OMP_NUM_THREADS", str(threads)) == str(threads)

    async def prepare(self, stage: Stage) -> None:
        """Waits until workers of this stage can be forked at once, for `deadline` seconds at most. Where that fails,
        `fork` says why."""
        async with self._turn.setdefault(stage, asyncio.Lock()):
            servers = self._servers
            if servers is not None and stage not in servers.pids:
                with suppress(TimeoutError, CannotFork):
                    async with asyncio.timeout(self.deadline):
                        servers.pids |= (await self._answer(servers, stage))["ready"]

    async def _fork(self, stage: Stage, name: str, output: IO[bytes]) -> ForkedWorker:
        if self._servers is None:
            self.begin()
        servers = self._servers
        assert servers is not None
        try:
            async with asyncio.timeout(self.deadline):
                if stage not in servers.pids:
                    servers.pids |= (await self._answer(servers, stage))["ready"]
                return await self._asked(servers, stage, name, output)
        except TimeoutError:
            self._drop(servers)
            why = f"the process to fork workers from ({stage}) was silent for {self.deadline:g} s"
            raise _ServerGone(why) from None
        except asyncio.CancelledError:
            self._drop(servers)  # A worker may be under way that nobody would wait for.
            raise

    async def _asked(self, servers: _Servers, stage: Stage, name: str, output: IO[bytes]) -> ForkedWorker:
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb"), ExitStack() as unless_forked:
            stdin = unless_forked.enter_context(os.fdopen(writing, "wb", buffering=0))
            with _subreaper:
                request = json.dumps({"name": name}).encode()
                try:
                    socket.send_fds(servers.channels[stage], [request], [reading, output.fileno()])
                except (BrokenPipeError, ConnectionResetError):
                    raise self._gone(servers, stage) from None
                answer = await self._answer_to_fork(servers, stage)
            if "refused" in answer:
                raise CannotFork(answer["refused"])
            worker = ForkedWorker(answer["pid"], stdin)
            _as_this_process(worker.pid)
            unless_forked.pop_all()
            return worker

    async def _answer_to_fork(self, servers: _Servers, stage: Stage) -> Any:
        """Returns the answer to a request for a worker. When it is cancelled, it waits for the answer a moment longer
        and kills the worker, which would remain as a child of this process with a pid that is not known."""
        answering = asyncio.create_task(self._answer(servers, stage), name="answer to a fork")
        try:
            return await asyncio.shield(answering)
        except asyncio.CancelledError:
            await asyncio.wait([answering], timeout=CANCELLED)
            if not answering.cancel() and answering.exception() is None and "pid" in answering.result():
                _kill(answering.result()["pid"])
            raise

    async def _answer(self, servers: _Servers, stage: Stage) -> Any:
        answer_bytes = asyncio.get_running_loop().sock_recv(servers.channels[stage], ANSWER_BYTES)
        receiving = asyncio.create_task(answer_bytes, name=f"bytes of the fork server ({stage})")
        try:
            while not (await asyncio.wait([receiving], timeout=LOOK))[0]:
                if servers.are_stopped(stage):
                    self._drop(servers)
                    raise _ServerGone(f"the process to fork workers from ({stage}) is stopped (SIGSTOP)")
            answer = receiving.result()
        except ConnectionResetError:
            answer = b""
        finally:
            receiving.cancel()
        if not answer:
            raise self._gone(servers, stage)
        return json.loads(answer)

    def _gone(self, servers: _Servers, stage: Stage) -> CannotFork:
        why = f"the process to fork workers from ({stage}) has ended{servers.last_words()}"
        if stage not in servers.pids and self._servers is servers:
            self._unfit[stage] = why
        self._drop(servers)
        return CannotFork(why) if stage in self._unfit else _ServerGone(why)

    def _drop(self, servers: _Servers) -> None:
        """Ends the processes of both stages, unless another call has done so before."""
        if self._servers is servers:
            self.end()


def start_servers(
    arguments: Sequence[str], sockets: Sequence[int], output: IO[bytes], environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Starts fork_server.py in a fresh Python. sockets: descriptors that it inherits."""
    return subprocess.Popen(
        [sys.executable, "-m", "asyncrl.deploy.process.fork_server", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=sockets,
        process_group=0,
        env=environment,
    )


def early_forks() -> AbstractContextManager[Forks | None]:
    """Starts the processes that workers are forked from, as the default config would have them."""
    return Forks(worker_environment(os.environ)) if sys.platform == "linux" else nullcontext()


def forks_of(
    config: "Config", begun: Forks | None = None, say: Callable[[str], None] = print
) -> AbstractContextManager[Forks | None]:
    """Starts the processes that workers are forked from; gives None where they are spawned or live in this process.
    begun: used if it has the environment of the config, and then left as it is at the end; it is ended otherwise."""
    environment = worker_environment(os.environ, config.fleet.threads, config.fleet.wire)
    forked = config.fleet.start == "fork" and config.fleet.wire != "inproc" and sys.platform == "linux"
    if begun is not None and forked and begun.environment == environment:
        begun.serve(config.fleet.start_deadline, say)
        return nullcontext(begun)
    if begun is not None:
        begun.end()
    return Forks(environment, deadline=config.fleet.start_deadline, say=say) if forked else nullcontext()


def _is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _as_this_process(pid: int) -> None:
    """Gives a child the niceness and the limits of this process, which may have changed since `begin`."""
    with suppress(ProcessLookupError, PermissionError):
        if (niceness := os.getpriority(os.PRIO_PROCESS, 0)) != os.getpriority(os.PRIO_PROCESS, pid):
            os.setpriority(os.PRIO_PROCESS, pid, niceness)
        for limit in LIMITS:
            if (values := resource.getrlimit(limit)) != resource.prlimit(pid, limit):
                resource.prlimit(pid, limit, values)


class _ServerGone(CannotFork):
    """A process to fork from is no more; another one may be started."""


class _Subreaper:
    """While it is entered, however often, this process is the parent of its orphaned descendants; a worker is one as it
    is forked. Not longer: it would have to wait for orphans that it knows nothing of."""

    def __init__(self) -> None:
        self._entered = 0
        self._before = ctypes.c_int()

    def __enter__(self) -> None:
        if not self._entered:
            prctl = ctypes.CDLL(None).prctl
            prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(self._before))
            prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._entered += 1

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        if not self._entered:
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, self._before.value)


_subreaper = _Subreaper()

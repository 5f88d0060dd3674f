"""One sandbox seen from outside: compiles what runs inside, starts it, sends it test cases, reads how they ended, and
kills it."""

import asyncio
import fcntl
import marshal
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Self

from asyncrl.children.sandbox.bubblewrap import ENVIRONMENT, filter_file, sandbox_command
from asyncrl.children.sandbox.memory_groups import MemoryGroup, new_group
from asyncrl.children.sandbox.program_requests import Limits, Outcome, SandboxError
from asyncrl.concurrency import to_its_end

# Compiles the files of `inside/` with the interpreter of the programs, once for each pool.


INSIDE = Path(__file__).parent / "inside"
FIRST = "first_process"
PARTS = ("program_server", "examiner", "package_server")
COMPILE_TIMEOUT = 30.0

COMPILER = """
import marshal, sys
sources = marshal.loads(sys.stdin.buffer.read())
code_of = lambda name: compile(sources[name], name + ".py", "exec", dont_inherit=True, optimize=2)
sys.stdout.buffer.write(marshal.dumps({name: marshal.dumps(code_of(name)) for name in sources}))
"""
MODULE = f"{__package__}.inside.{FIRST}"
"""Name under which the other files import the first."""
STARTER = (
    "import marshal,sys;f=open(int(sys.argv[1]),'rb');p=marshal.loads(f.read());f.close();"
    f"m=sys.modules['{MODULE}']=type(sys)('{MODULE}');"
    f"exec(marshal.loads(p['{FIRST}']),m.__dict__);m.main(p,int(sys.argv[2]))"
)
"""Code that a sandbox is started with; its arguments are descriptors: of the compiled files, and of the socket."""


def compiled_harness(python: str) -> bytes:
    """Returns the code of all files inside, as `python` compiles it; raises SandboxError if that fails."""
    import marshal  # Data goes into the sandbox, never out of it.

    sources = {name: (INSIDE / f"{name}.py").read_text() for name in (FIRST, *PARTS)}
    done = subprocess.run(
        [python, "-I", "-S", "-c", COMPILER],
        input=marshal.dumps(sources, 2),
        capture_output=True,
        timeout=COMPILE_TIMEOUT,
        check=False,
    )
    if done.returncode:
        raise SandboxError(f"{python} cannot compile the harness of the sandbox: {done.stderr.decode()[-300:]}")
    return done.stdout


GRACE = 2.0
"""Seconds beyond the limit of a case in which its sandbox reports that it ended the case."""
END_TIMEOUT = 10.0
"""Seconds the kernel may take to end a sandbox that was killed."""
LARGEST_REPORT = 8192
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


RESERVE = 32 * 2**20
"""Bytes that a sandbox may have beside the limits of its case: its first process, bubblewrap, and what the kernel needs
for them."""


class SandboxEnded(Exception):
    """The sandbox ended, or did not report, while a case ran in it. outcome: of the case."""

    def __init__(self, why: str, outcome: Outcome = "killed") -> None:
        super().__init__(why)
        self.outcome = outcome


class EndedAtStart(Exception):
    """The sandbox ended before it was ready; the message is what it printed."""


@dataclass(frozen=True, slots=True)
class SandboxCase:
    """Describes what runs in a sandbox. kind: a function of `inside/first_process.py`. file: name of the file of the
    source. objects: a test works with objects of the program."""

    kind: Literal["script", "command", "program_server", "examiner", "package_server"]
    source: str
    stdin: str = ""
    command: tuple[str, ...] = ()
    file: str = ""
    objects: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """Holds what the first process of a sandbox reports about a case. status: as `waitpid` gives it. left: the case
    left processes or files. why: the limit for which it was ended, "ended" on demand, else "-". note: text of the
    case."""

    status: int
    seconds: float
    cpu_seconds: float
    memory_bytes: int
    left: bool
    why: str
    note: str

    @property
    def is_clean(self) -> bool:
        """True when another case of the same program may follow."""
        return not self.left and self.why in ("-", "ended")

    @classmethod
    def parsed(cls, message: bytes) -> Self:
        line, _, note = message.decode(errors="replace").partition("\n")
        try:
            status, seconds, cpu_seconds, memory, left, why = line.split(" ")
            numbers = int(status), float(seconds), float(cpu_seconds), int(memory), left == "1"
        except ValueError:
            raise SandboxEnded(f"its first process reported {line!r:.80}") from None
        return cls(*numbers, why, note)


def file_with(data: bytes, *, sealed: bool = False) -> int:
    """Returns the descriptor of a new file in memory, to be read from its beginning. sealed: nobody may change it."""
    file = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(file, "wb", closefd=False) as writer:
        writer.write(data)
    if sealed:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
    os.lseek(file, 0, os.SEEK_SET)
    return file


class RunningCase:
    """A case that runs in a sandbox, with the files of its output."""

    def __init__(self, sandbox: "Sandbox", limits: Limits, stdout: int, stderr: int) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self.stdout = stdout
        self.stderr = stderr

    async def report(self) -> Report:
        """Waits until the case has ended; raises SandboxEnded if its sandbox does not say so in time."""
        return await self._sandbox.receive_report(self._limits.seconds + GRACE)

    def end(self) -> None:
        """Ends the case, if it still runs."""
        self._sandbox.end_case()

    def outputs(self) -> tuple[bytes, bytes]:
        """Returns stdout and stderr up to now: at most one byte more than the limit of each."""
        most = self._limits.output_bytes + 1
        return os.pread(self.stdout, most, 0), os.pread(self.stderr, most, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self.stdout)
        os.close(self.stderr)


def _started(command: list[str], log: int, passed: list[int]) -> "subprocess.Popen[bytes]":
    """Starts a process in a session of its own; asyncio would start a thread to wait for each."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=ENVIRONMENT,
        start_new_session=True,
        pass_fds=passed,
    )


class Sandbox:
    """A sandbox whose interpreter waits for a case; cases run one after the other. group: None where no memory cgroup
    can be made."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", control: socket.socket, disk_bytes: int, group: MemoryGroup | None
    ) -> None:
        self._process = process
        self._control = control
        self._disk_bytes = disk_bytes
        self._group = group
        self._ended_before = 0
        self._is_idle = False

    @classmethod
    async def start(
        cls,
        python: str,
        harness: bytes,
        disk_bytes: int,
        deadline: float,
        *,
        contained: bool,
        folders: Sequence[str] = (),
    ) -> Self:
        """Starts a sandbox; raises EndedAtStart if it ends before it is ready, SandboxError if it is not ready within
        `deadline` seconds. harness: compiled code. contained: False starts the interpreter without bubblewrap. folders:
        that it sees beside /usr."""
        with ExitStack() as files:
            group = new_group() if contained else None
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            files.enter_context(theirs)
            unless_ready = files.enter_context(ExitStack())
            unless_ready.enter_context(ours)
            if group is not None:
                unless_ready.callback(group.remove)
            ours.setblocking(False)
            filtered = [filter_file(is_limited=group is not None)] if contained else []
            code = file_with(harness)
            log = os.memfd_create("log")
            for file in (code, log, *filtered):
                files.callback(os.close, file)
            entered = "" if group is None else group.file
            wrapper = sandbox_command(disk_bytes, filtered[0], folders, entered) if contained else []
            inner = [python, "-I", "-S", "-c", STARTER, str(code), str(theirs.fileno())]
            process = _started([*wrapper, *inner], log, [code, *filtered, theirs.fileno()])
            sandbox = cls(process, ours, disk_bytes, group)
            theirs.close()
            await sandbox._wait_until_ready(deadline, log)
            unless_ready.pop_all()
        return sandbox

    async def _wait_until_ready(self, deadline: float, log: int) -> None:
        message = b""
        try:
            async with asyncio.timeout(deadline):
                message = await asyncio.get_running_loop().sock_recv(self._control, LARGEST_REPORT)
        except TimeoutError:
            raise SandboxError(f"a sandbox was not ready within {deadline:g} s; is this machine overloaded?") from None
        finally:
            self._is_idle = message == b"ready"
            if not self._is_idle:
                await self.kill()
        if not self._is_idle:
            said = os.pread(log, 2000, 0).decode(errors="replace").strip()
            raise EndedAtStart(repr(said) if said else "nothing")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def begin(self, case: SandboxCase, limits: Limits, link: socket.socket | None = None) -> RunningCase:
        """Starts a case; raises SandboxEnded if the sandbox is gone. link: between program and examiner."""
        self._limit_memory(limits)
        running = RunningCase(self, limits, os.memfd_create("stdout"), os.memfd_create("stderr"))
        plain = {**asdict(case), **asdict(limits), "command": list(case.command)}
        plain["is_limited"] = self._group is not None
        stdin = file_with(case.stdin.encode(errors="surrogatepass"), sealed=True)
        files = [file_with(marshal.dumps(plain, 2)), stdin]
        links = [link.fileno()] if link is not None else []
        try:
            socket.send_fds(self._control, [b"case"], [*files, running.stdout, running.stderr, *links])
        except OSError as error:
            running.close()
            raise SandboxEnded(f"it was gone: {error.strerror}") from None
        finally:
            self._is_idle = False
            for each in files:
                os.close(each)
        return running

    def _limit_memory(self, limits: Limits) -> None:
        """Has the kernel limit the case; raises SandboxEnded where the group is gone."""
        if self._group is None:
            return
        files = 2 * max(self._disk_bytes, limits.disk_bytes) + 2 * limits.output_bytes
        try:
            self._group.limit(limits.memory_bytes + files + RESERVE)
        except OSError as error:
            raise SandboxEnded(f"its memory cannot be limited: {error}") from None
        self._ended_before = self._group.ended()

    def _ran_out_of_memory(self) -> bool:
        """Returns whether the kernel has ended a process of this case because the group had no memory left."""
        return self._group is not None and self._group.ended() > self._ended_before

    def end_case(self) -> None:
        with suppress(OSError):
            self._control.send(b"end")

    async def receive_report(self, timeout: float) -> Report:
        try:
            async with asyncio.timeout(timeout):
                message = await asyncio.get_running_loop().sock_recv(self._control, LARGEST_REPORT)
        except TimeoutError:
            raise SandboxEnded(f"it did not report within {timeout:g} s") from None
        except OSError:
            message = b""
        if not message and self._ran_out_of_memory():
            raise SandboxEnded("the kernel ended all its processes for want of memory", "memory")
        if not message:
            raise SandboxEnded("all its processes were ended from outside, perhaps where memory ran out")
        report = Report.parsed(message)
        self._is_idle = True
        return replace(report, why="memory") if self._ran_out_of_memory() else report

    async def kill(self) -> None:
        """Ends all processes of the sandbox: at once while a case runs, else by closing its socket. A cancelled call
        ends them too."""
        await to_its_end(self._killed())

    async def _killed(self) -> None:
        self._control.close()
        try:
            async with asyncio.timeout(GRACE if self._is_idle else 0):
                await self._end()
        except TimeoutError:
            try:
                async with asyncio.timeout(GRACE if self._kill_first() else 0):
                    await self._end()
            except TimeoutError:
                self._kill_now()
                async with asyncio.timeout(END_TIMEOUT):
                    await self._end()

    async def _end(self) -> None:
        """Waits until bubblewrap has ended, and collects it."""
        if self._process.poll() is None:
            await self._until_ended()
        if self._group is not None:
            await self._group.remove_emptied()

    async def _until_ended(self) -> None:
        loop = asyncio.get_running_loop()
        handle = os.pidfd_open(self._process.pid)
        ended = asyncio.Event()
        loop.add_reader(handle, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)
        self._process.wait()

    def _kill_first(self) -> bool:
        """Kills the first process, with which all others end before bubblewrap does; returns whether there is one."""
        killed = False
        with suppress(OSError):
            for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
                killed = True
        return killed

    def _kill_now(self) -> None:
        """Kills bubblewrap and its child, which waits for bubblewrap for ever if that dies early."""
        self._kill_first()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

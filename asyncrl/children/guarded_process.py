"""A child process of a worker, behind a guard that ends it with everything that it started (guard_program.py), and the
slot that starts the next one."""

import asyncio
import os
import re
import signal
import sys
from abc import ABC, abstractmethod
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from asyncrl.children.child_messages import packed, receive, received
from asyncrl.children.containment import OF_SECRETS, Surroundings, exit_status, try_containment
from asyncrl.children.printed_output import ChildOutput
from asyncrl.errors import AsyncrlError, ConfigError, DeadlineExceeded, WireError

CONFIGURES = "ASYNCRL_"
"""Beginning of the variables that set keys of a config, passwords of sinks among them; no child gets them."""
HARMLESS = re.compile(
    "PATH|HOME|USER|LOGNAME|SHELL|TERM|COLORTERM|TZ|TMPDIR|TEMP|TMP|LANG|LANGUAGE|LC_[A-Z]+|LD_LIBRARY_PATH|"
    "VIRTUAL_ENV|CONDA_PREFIX|CONDA_DEFAULT_ENV|XDG_[A-Z_]+|CC|CXX|JAVA_HOME|NODE_PATH|"
    "PYTHON(PATH|HOME|HASHSEED|UNBUFFERED|DONTWRITEBYTECODE|PYCACHEPREFIX|UTF8|IOENCODING|WARNINGS|OPTIMIZE|"
    "FAULTHANDLER|NOUSERSITE|SAFEPATH|MALLOC|DEVMODE|INTMAXSTRDIGITS|ASYNCIODEBUG)|"
    "(OMP|MKL|OPENBLAS|NUMEXPR|VECLIB_MAXIMUM|RAYON)_[A-Z_]*THREADS|OMP_[A-Z_]+|KMP_[A-Z_]+|MKL_[A-Z_]+|"
    "CUDA_[A-Z_]+|NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES)|ROCR_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES|NCCL_[A-Z_]+|"
    "HF_(HOME|HUB_CACHE|ENDPOINT|(HUB|DATASETS)_OFFLINE|DATASETS_CACHE|HUB_DISABLE_[A-Z_]+)|TRANSFORMERS_(OFFLINE|CACHE)|"
    "TOKENIZERS_PARALLELISM|TORCH_HOME|TRITON_CACHE_DIR|NLTK_DATA|MPLBACKEND|MPLCONFIGDIR|NUMBA_[A-Z_]+|"
    "(HTTP|HTTPS|ALL|NO|FTP)_PROXY|(http|https|all|no|ftp)_proxy|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|"
    "DISPLAY|SDL_[A-Z_]+|MUJOCO_GL|PYOPENGL_PLATFORM|EGL_DEVICE_ID|MESA_[A-Z_]+|LIBGL_[A-Z_]+"
)
"""Names of variables that say where things are and how many threads compute. A child gets no others but those that the
config names: what a variable of any other name holds is not known."""
WITH_PASSWORD = re.compile(r"(?i)://[^/@\s]*@|^[^/@\s]*:[^/@\s]*@|[?&][\w-]*(key|token|secret|passw|auth)[\w-]*=")
"""In a value, such as that of a proxy with or without a scheme, which is then one that the config has to name."""
GUARD_TIMEOUT = 2.0
"""Seconds in which a guard ends a child, which takes milliseconds; code of the user may have stopped the guard."""
KILL_TIMEOUT = 5.0
"""Seconds the kernel may take to end a process that was killed."""


class ChildEnded(AsyncrlError):
    """The child was killed, exited or crashed; the message says which. vanished: a signal, perhaps from outside, ended
    the child."""

    def __init__(self, why: str, *, vanished: bool = False) -> None:
        super().__init__(why)
        self.vanished = vanished


class VanishedEarly(ConfigError):
    """A signal ended the child while it loaded the user's code."""


def _is_harmless(name: str, value: str) -> bool:
    return bool(HARMLESS.fullmatch(name)) and not OF_SECRETS.search(name) and not WITH_PASSWORD.search(value)


def environment_of_child(inherited: Mapping[str, str], named: Collection[str] = ()) -> dict[str, str]:
    """Returns the environment variables of a child: the harmless ones, and those that the config names."""
    return {
        name: value
        for name, value in inherited.items()
        if not name.startswith(CONFIGURES) and (name in named or _is_harmless(name, value))
    }


@dataclass(frozen=True, slots=True)
class ChildSettings:
    """How children of a pool are started. deadline: seconds in which one loads the user's code. tasks: owns the tasks
    that read answers. output: takes what children print. containment: None: nothing contains them. variables: names of
    environment variables that children get beside harmless ones."""

    deadline: float
    tasks: asyncio.TaskGroup
    output: ChildOutput
    containment: Surroundings | None = None
    variables: tuple[str, ...] = ()


class GuardedProcess(ABC):
    """A running child that answers messages. A subclass says what answers mean. contained: by bubblewrap. ended: it
    ends or has ended. finished: results so far."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self.contained = False
        self._calls = process.stdin
        self._answers_pipe = process.stdout
        self._unsent = bytearray()
        self.loaded = False
        self.ended = False
        self.finished = 0

    @classmethod
    async def launch(
        cls, server: str, code: Any, name: str, settings: ChildSettings, descriptors: Sequence[int] = ()
    ) -> Self:
        """Starts a child; raises ConfigError if it cannot load the user's code, VanishedEarly if a signal ended it, and
        DeadlineExceeded when that takes too long.

        server: module whose `serve_pipes` runs in the child. code: the first message, which says what it loads. name:
        what it loads, for errors. descriptors: open files that it inherits.
        """
        containment = settings.containment
        output = settings.output
        guard = (sys.executable, "-m", "asyncrl.children.guard_program", server)
        process = await asyncio.create_subprocess_exec(
            *([] if containment is None else containment.command()),
            *guard,
            stdin=PIPE,
            stdout=PIPE,
            stderr=output.end,
            env=environment_of_child(os.environ, settings.variables),
            start_new_session=True,
            pass_fds=descriptors,
        )
        child = cls(process)
        child.contained = containment is not None
        try:
            async with asyncio.timeout(settings.deadline):
                await child._load(code, name, output.file.path)
            child.loaded = True
        except TimeoutError:
            raise DeadlineExceeded(f"{name} could not be loaded within {settings.deadline:.0f} s") from None
        except (ChildEnded, ConfigError):
            if containment is not None:  # Where nothing can be contained, the code has no mistake.
                await asyncio.to_thread(try_containment, containment)
            raise
        finally:
            if not child.loaded:
                await child.kill()
        settings.tasks.create_task(child._read(), name=f"answers of child {process.pid}")
        return child

    @abstractmethod
    def greeted(self, message: Any) -> None:
        """Takes the first message of the child; raises WireError when it is none of this kind of child."""

    @abstractmethod
    def take(self, message: Any) -> None:
        """Takes an answer of the child; raises WireError for what is none."""

    @abstractmethod
    def finish(self, ended: ChildEnded) -> None:
        """Ends all calls: no answers follow."""

    async def send(self, message: Any) -> None:
        """Sends a message to the child; raises ChildEnded when there is no child any more."""
        try:
            self._calls.write(packed(message))
            await self._calls.drain()
        except (BrokenPipeError, ConnectionResetError):
            raise ChildEnded(f"its process {self.process.pid} was gone", vanished=True) from None

    def post(self, message: Any) -> None:
        """Sends a message, with others of this turn of the loop. It does not wait while the child reads nothing, so
        that whoever posts bounds what waits; where there is no child any more, `finish` says so."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_posted)
        self._unsent += packed(message)

    def _send_posted(self) -> None:
        posted = bytes(self._unsent)
        self._unsent.clear()
        if not self.ended:
            self._calls.write(posted)

    async def kill(self) -> None:
        """Ends the child and all processes that it started, at once."""
        self.ended = True
        if not self._calls.is_closing():
            self._calls.transport.abort()
        try:
            async with asyncio.timeout(GUARD_TIMEOUT):
                await self.process.wait()
        except TimeoutError:
            self._kill_now()
            async with asyncio.timeout(KILL_TIMEOUT):
                await self.process.wait()

    def _kill_now(self) -> None:
        """Kills the guard, or bubblewrap with its child, which waits for bubblewrap for ever if that dies early."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def _status(self) -> int:
        """Waits for the end of the child; returns its status, -N where signal N ended it."""
        status = await self.process.wait()
        return exit_status(status) if self.contained else status

    async def _load(self, code: Any, name: str, printed: Path) -> None:
        await self.send(code)
        try:
            message = await receive(self._answers_pipe)
        except asyncio.IncompleteReadError:
            status = await self._status()
            why = f"{name}: the process {_ended(status)} while it loaded them; see {printed}"
            raise (VanishedEarly if status < 0 else ConfigError)(why) from None
        match message:
            case {"mistake": str(mistake)}:
                raise ConfigError(mistake)
            case _:
                self.greeted(message)

    async def _read(self) -> None:
        why = ""
        try:
            async for message in received(self._answers_pipe):
                self.take(message)
        except WireError as error:
            why = f"it said what is no answer: {error}"
            await self.kill()
        status = await self._status()
        self.ended = True
        self.finish(ChildEnded(why or f"its process {_ended(status)}", vanished=not why and status < 0))


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    memory = ", as the kernel does where memory runs out" if -status == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-status).name}{memory}"


# Holds one child process at a time, and starts a new one when it is needed.


Child = TypeVar("Child", bound=GuardedProcess)


class ChildSlot(Generic[Child]):
    """Calls `spawn` when it needs a child. owner: the worker, for errors. running: the child, which may have ended."""

    def __init__(self, owner: str, spawn: Callable[[], Awaitable[Child]]) -> None:
        self.running: Child | None = None
        self._owner = owner
        self._spawn = spawn
        self._finished_before = 0
        self._spawning = asyncio.Lock()
        self._stopped = False

    @property
    def finished(self) -> int:
        """Results of all its children."""
        return self._finished_before + (self.running.finished if self.running is not None else 0)

    async def child(self) -> Child:
        """Returns the child; raises ConfigError or DeadlineExceeded if it cannot load, ChildEnded after `stop`."""
        async with self._spawning:
            self._check_not_stopped()
            if self.running is None or self.running.ended:
                self._finished_before = self.finished
                self.running = None
                try:
                    self.running = await self._spawn()
                except (VanishedEarly, ChildEnded):  # A signal, perhaps from outside, may end the first try.
                    self._check_not_stopped()
                    self.running = await self._spawn()
                if self._stopped:  # While the child started.
                    await self.running.kill()
                    self._check_not_stopped()
            return self.running

    def _check_not_stopped(self) -> None:
        if self._stopped:
            raise ChildEnded(f"{self._owner} was stopped")

    async def stop(self) -> None:
        """Kills the child, also one that still starts once it has started; no new one follows."""
        self._stopped = True
        if self.running is not None:
            await self.running.kill()

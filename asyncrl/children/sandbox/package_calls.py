"""Has packages read a model's text in a sandbox for programs, whose interpreter is that of this process and stays warm.

call (any thread) ── line of JSON ──> sandbox: interpreter with the packages (inside/package_server.py)
                  <── line of JSON ──      └─ it is replaced when a text hangs it or ends it
"""

import asyncio
import atexit
import json
import os
import socket
import sys
import threading
from collections.abc import Coroutine, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.children.sandbox.pool import START_TIMEOUT, Kind
from asyncrl.children.sandbox.program_requests import Limits, SandboxError
from asyncrl.children.sandbox.single_sandbox import (
    END_TIMEOUT,
    EndedAtStart,
    RunningCase,
    Sandbox,
    SandboxCase,
    SandboxEnded,
    compiled_harness,
)

T = TypeVar("T")
PACKAGE = Path(__file__).parents[2]
FOR_EVER = 10**8
LIMITS = Limits(seconds=FOR_EVER, cpu_seconds=FOR_EVER, memory_bytes=2 * 2**30, processes=64)
"""Limits of the interpreter, of which one answer has its own seconds. A large power has 500 MiB."""
LARGEST_ANSWER = 4096
DISK = 2**24
"""Bytes of each folder that packages may write."""
STARTS = 2
OPEN: list["PackageSandbox"] = []
"""The sandboxes of this process."""


class Unjudged(Exception):
    """A package could not read a text; the message says why."""


class PackageSandbox:
    """Holds at most one sandbox. module: has `READERS` by name, functions of what a row has that return functions of a
    text. packages: that it uses, imported with it. Its methods may be called from any thread."""

    def __init__(self, module: str, packages: Sequence[str], kind: Kind) -> None:
        self._source = json.dumps({"module": module, "packages": list(packages), "paths": _paths()})
        self._contained = kind == "bubblewrap"
        self._lock = threading.Lock()
        self._open: tuple[Sandbox, RunningCase, socket.socket] | None = None
        self._warm: Sandbox | None = None

    def warm_up(self) -> None:
        """Starts the sandbox; raises SandboxError where none works."""
        with self._lock:
            self._link()

    def read(self, name: str, wanted: str, text: str, seconds: float) -> float | str | None:
        """Returns what reader `name` makes of a text, a number or None, or why what the row has cannot be read. Raises
        Unjudged where the text cannot, or takes longer than `seconds`, and SandboxError."""
        with self._lock:
            link = self._link()
            line = b""
            link.settimeout(seconds)
            try:
                link.sendall(json.dumps([name, wanted, text]).encode() + b"\n")
                with link.makefile("rb") as answers:
                    line = answers.readline(LARGEST_ANSWER)
            except TimeoutError:
                raise Unjudged(f"no answer within {seconds:g} s") from None
            except OSError:
                pass  # As an answer that does not end.
            finally:
                if not line.endswith(b"\n"):
                    self._end_reading()
        return _answer(line)

    def close(self) -> None:
        """Ends the sandbox; a later call starts another one."""
        with self._lock:
            self._end_reading()
            if self._warm is not None:
                _on_loop(self._warm.kill())
                self._warm = None

    @property
    def process(self) -> int:
        """Returns the number of its process; 0 for none."""
        sandbox = self._open[0] if self._open is not None else self._warm
        return sandbox.pid if sandbox is not None else 0

    def _link(self) -> socket.socket:
        if self._open is None:
            self._open = _on_loop(self._start())
        return self._open[2]

    def _end_reading(self) -> None:
        """Ends the process that reads, whose sandbox keeps its packages for the next one where nothing else is left."""
        if self._open is not None:
            sandbox, case, link = self._open
            self._open = None
            link.close()
            self._warm = _on_loop(self._ended(sandbox, case))

    async def _ended(self, sandbox: Sandbox, case: RunningCase) -> Sandbox | None:
        case.end()
        try:
            with case:
                report = await sandbox.receive_report(END_TIMEOUT)
            if not report.left and not sandbox.has_ended:
                return sandbox
        except SandboxEnded:
            pass
        await sandbox.kill()
        return None

    async def _start(self) -> tuple[Sandbox, RunningCase, socket.socket]:
        python, harness = await asyncio.to_thread(_interpreter)
        printed = ""
        for _ in range(STARTS):
            ours, theirs = socket.socketpair()
            case: RunningCase | None = None
            sandbox = self._warm
            self._warm = None
            try:
                with theirs:
                    sandbox = sandbox or await Sandbox.start(
                        python, harness, DISK, START_TIMEOUT, contained=self._contained, folders=_folders()
                    )
                    case = sandbox.begin(SandboxCase("package_server", self._source), LIMITS, theirs)
                if (printed := await asyncio.to_thread(_first_line, ours)) == "ready":
                    return sandbox, case, ours
            except (EndedAtStart, SandboxEnded) as ended:
                printed = str(ended)
            ours.close()
            if case is not None:
                case.close()
            if sandbox is not None:
                await sandbox.kill()
        raise SandboxError(f"the sandbox in which packages read answers could not start: {printed}")


def _answer(line: bytes) -> float | str | None:
    """Returns what a line of the sandbox says. Raises Unjudged for all but a value: an answer may write it."""
    if not line.endswith(b"\n"):
        raise Unjudged("the sandbox that read it ended, perhaps where memory ran out")
    try:
        match json.loads(line):
            case ["value", None]:
                return None
            case ["value", bool() | int() | float() as value] if abs(value) <= sys.float_info.max:
                return float(value)
            case ["row", str(why)]:
                return why
            case ["error", str(why)]:
                raise Unjudged(why)
    except (ValueError, RecursionError):
        pass
    raise Unjudged(f"the sandbox said what is no answer: {line!r:.100}")


def _on_loop(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, _loop()).result()


def _first_line(link: socket.socket) -> str:
    """Returns what a sandbox says once it has imported its packages: "ready", or why it cannot."""
    link.settimeout(START_TIMEOUT)
    try:
        with link.makefile("rb") as answers:
            return str(json.loads(answers.readline() or '"it ended while it imported them"'))
    except TimeoutError:
        return f"they were not imported within {START_TIMEOUT:g} s; is this machine overloaded?"


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Returns an event loop on a thread that lasts as long as this process, since sandboxes end with their thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="sandbox for packages", daemon=True).start()
    return loop


@cache
def _interpreter() -> tuple[str, bytes]:
    """Returns the interpreter of this process, and the code of the sandbox as it compiles it."""
    python = os.path.realpath(sys.executable)
    return python, compiled_harness(python)


def _paths() -> list[str]:
    """Returns the folders from which the sandbox imports beside Python's: those of packages, and that of asyncrl."""
    known = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    return [*known, str(PACKAGE.parent)]


def _folders() -> tuple[str, ...]:
    """Returns the folders that the sandbox sees beside /usr: never the current one, nor the whole of a checkout."""
    linked = [str(each.resolve()) for each in PACKAGE.iterdir() if each.is_symlink()]
    seen = [sys.base_prefix, *_paths()[:-1], str(PACKAGE), *linked]
    return tuple(path for path in dict.fromkeys(seen) if os.path.isdir(path) and not path.startswith("/usr/"))


@cache
def package_sandbox(module: str, packages: tuple[str, ...], kind: Kind) -> PackageSandbox:
    """Returns the sandbox of this process for these packages, which ends with it."""
    OPEN.append(PackageSandbox(module, packages, kind))
    atexit.register(OPEN[-1].close)
    return OPEN[-1]

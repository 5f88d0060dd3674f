"""Keeps what reward functions print in files of bounded size: the newest output in logs/WORKER.printed.

children ──stdout, stderr──> pipe ──> ChildOutput ──┐
                                                    ├──> PrintedFile ──> WORKER.printed ──full──> WORKER.printed.old
threads ──sys.stdout, sys.stderr──> ThreadOutput ───┘
"""

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

LARGEST = 4 * 2**20
"""Bytes of the file with the newest output; the one before has as many. Who prints more looks for the newest lines."""
BLOCK = 2**16
"""Bytes that are read from the pipe at a time: all that a pipe holds."""
SHOWN = 4000
"""Characters that functions of this process print on its own output too; a run prints its steps between them."""


class PrintedFile:
    """Appends to a file, which is renamed when it is full. Any thread may write; an error of the disk loses output."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    def write(self, data: bytes) -> None:
        with self._lock, suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                size = file.tell()
                file.write(data[-LARGEST:])
            if size + len(data) >= LARGEST:
                self._begin_another()

    def _begin_another(self) -> None:
        old = self.path.with_name(self.path.name + ".old")
        removed = "; what was printed before that was removed" if old.exists() else ""
        self.path.replace(old)
        self.path.write_text(f"asyncrl: what was printed before is in {old}{removed}\n")


class ChildOutput:
    """A pipe that children write to; the event loop copies it to a file. end: the end of children, -1 when closed."""

    def __init__(self, file: PrintedFile) -> None:
        self.file = file
        self.end = -1
        self._reading = -1

    def open(self) -> None:
        reading, writing = os.pipe()
        self._reading = reading
        self.end = writing
        os.set_blocking(self._reading, False)
        asyncio.get_running_loop().add_reader(self._reading, self._copy)

    def close(self) -> None:
        """Copies what is left and closes both ends."""
        if self.end >= 0:
            asyncio.get_running_loop().remove_reader(self._reading)
            self._copy()
            os.close(self._reading)
            os.close(self.end)
            self.end = -1

    def _copy(self) -> None:
        """Copies one block: a child that prints without end waits for the other work of this loop."""
        with suppress(BlockingIOError):
            self.file.write(os.read(self._reading, BLOCK))


_printing: ContextVar[PrintedFile | None] = ContextVar("_printing", default=None)


class ThreadOutput:
    """Stands for `sys.stdout` or `sys.stderr`: writes what reward threads print to their file, the beginning to the
    stream too. Everything else goes to the stream. What a function writes past both, to descriptor 1 or 2, goes where
    this process prints, and into no file of ours."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._left = SHOWN

    def write(self, text: str) -> int:
        file = _printing.get()
        if file is None:
            return self._stream.write(text)
        file.write(text.encode(errors="replace"))
        if self._left > 0:
            self._stream.write(text[: self._left])
            self._left -= len(text)
            if self._left <= 0:
                self._stream.write(f"\nasyncrl: all else that reward functions print is in {file.path}\n")
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def printing_to(file: PrintedFile) -> Iterator[None]:
    """Sends what this thread prints to the file, where `ThreadOutput` stands for the output of the process."""
    token = _printing.set(file)
    try:
        yield
    finally:
        _printing.reset(token)


class ThreadOutputs:
    """Puts `ThreadOutput` in the place of the output of this process, and takes it away again."""

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}

    def open(self) -> None:
        for name in ("stdout", "stderr"):
            stream = self._before[name] = getattr(sys, name)
            setattr(sys, name, ThreadOutput(stream))

    def close(self) -> None:
        """Leaves a stream that something else has replaced meanwhile."""
        for name, stream in self._before.items():
            if isinstance(getattr(sys, name), ThreadOutput):
                setattr(sys, name, stream)
        self._before.clear()

"""Describes what a sandbox takes and answers: programs with test cases, limits, and one result for each case."""

from dataclasses import dataclass
from typing import Literal

from asyncrl.errors import AsyncrlError

Outcome = Literal[
    "passed",
    "failed",
    "error",
    "timeout",
    "memory",
    "output",
    "disk",
    "processes",
    "forbidden",
    "killed",
    "forged",
]
"""End of one test case. failed: a wrong answer. error: the program or the test raised. timeout, memory, output, disk,
processes: a limit was exceeded. forbidden: a system call that no program needs. killed: another signal ended it, or its
sandbox died. forged: the program wrote into the channel of its answers what no call returns."""


class SandboxError(AsyncrlError):
    """The sandbox cannot work here; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class TestCase:
    """One test of a program. Either `code`, which calls functions of the program by their names and asserts; the
    program never sees it. Or the text of `stdin` and the wanted text of `stdout`, compared outside of the sandbox;
    without `stdout` the program passes by ending with status 0. objects: what functions of the program give may be
    objects of its classes, which answer what they like; comparing one fails all the same."""

    __test__ = False  # It is no test of ours.

    name: str
    code: str = ""
    stdin: str = ""
    stdout: str | None = None
    objects: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """A program to test. command: runs it, with `{file}` for the file of its source; empty for Python. file: name of
    that file. Test cases with code are for Python only."""

    source: str
    tests: tuple[TestCase, ...]
    command: tuple[str, ...] = ()
    file: str = "program.py"

    def __post_init__(self) -> None:
        if self.command and (coded := [test.name for test in self.tests if test.code]):
            raise ValueError(f"tests with code are for Python, not for the command {self.command[0]}: {coded[0]}")
        if "/" in self.file:
            raise ValueError(f"the file of a program is a name without folders, not {self.file}")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one test case. seconds: wall-clock time. cpu_seconds: of each process. memory_bytes: address space of
    each process, and resident memory of all of them. output_bytes: of stdout, and of stderr. processes: with threads.
    disk_bytes: of each of the two folders in memory that a program may write, and of each file."""

    seconds: float = 10.0
    cpu_seconds: int = 10
    memory_bytes: int = 256 * 2**20
    output_bytes: int = 2**20
    processes: int = 16
    disk_bytes: int = 16 * 2**20


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The result of one test case. exit: status of the program's process, -N if signal N ended it, None if nobody
    saw it end. memory_bytes: largest resident memory of one of its processes. detail: why it did not pass."""

    name: str
    outcome: Outcome
    stdout: str = ""
    stderr: str = ""
    exit: int | None = None
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"

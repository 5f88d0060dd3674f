"""Runs programs in sandboxes that were started ahead, and decides how each case ended. A sandbox is used for one
program, and for one case where the case left anything behind; a new one starts in the background.

starter tasks ──> ready sandboxes (bounded) ──> one program: case after case ──> killed
                  examiners (never see a program) ──> one test at a time ──> used again
"""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Literal, Self

from asyncrl.children.sandbox.bubblewrap import python_for_programs, try_sandbox
from asyncrl.children.sandbox.program_requests import CaseResult, Limits, Outcome, Program, SandboxError, TestCase
from asyncrl.children.sandbox.single_sandbox import (
    EndedAtStart,
    Report,
    Sandbox,
    SandboxCase,
    SandboxEnded,
    compiled_harness,
)
from asyncrl.concurrency import gather, running_beside

# Decides how a test case ended, from what the first process of its sandbox reports and what the program printed.


OF_SIGNAL: dict[int, Outcome] = {signal.SIGXCPU: "timeout", signal.SIGXFSZ: "disk", signal.SIGSYS: "forbidden"}
LIMITS: dict[str, Outcome] = {
    "timeout": "timeout",
    "memory": "memory",
    "output": "output",
    "disk": "disk",
    "processes": "processes",
}
NOTED = ("memory", "disk", "processes")
"""Limits of which an error tells, which the process of the program notes itself; of the others it has no word."""
EXPLAINED: dict[Outcome, str] = {
    "timeout": "it ran longer than {0.seconds:g} s, or computed longer than {0.cpu_seconds} s",
    "memory": "it needed more than {0.memory_bytes} bytes of memory",
    "output": "it printed more than {0.output_bytes} bytes",
    "disk": "it wrote more than {0.disk_bytes} bytes or ten thousand files",
    "processes": "it started more than {0.processes} processes and threads",
    "forbidden": "it made a system call that no program needs",
}
Outputs = tuple[bytes, bytes]


def script_result(test: TestCase, report: Report, outputs: Outputs, limits: Limits) -> CaseResult:
    """Returns the result of a case that reads stdin and prints."""
    outcome, detail = _limit(report, outputs, limits)
    if outcome is None and report.status != 0:
        outcome = "error"
        detail = detail or f"it ended with status {os.waitstatus_to_exitcode(report.status)}"
    if outcome is None and test.stdout is not None and not same_text(outputs[0].decode(errors="replace"), test.stdout):
        outcome = "failed"
        detail = "it printed something else"
    return _result(test, outcome or "passed", detail, report, outputs, limits)


def exam_result(test: TestCase, exam: Report, report: Report, outputs: Outputs, limits: Limits) -> CaseResult:
    """Returns the result of a case with code. exam: report of the examiner, which alone decides that a case passed."""
    outcome, _, detail = exam.note.partition("\n")
    limited, why = _limit(report, outputs, limits)
    if limited is not None:
        return _result(test, limited, why, report, outputs, limits)
    if exam.status != 0 or exam.why != "-":
        late, why = _limit(exam, (b"", b""), limits)
        return _result(test, late or "error", f"the test: {why or 'it ended early'}", report, outputs, limits)
    match outcome:
        case "passed" if os.WIFEXITED(report.status) and os.WEXITSTATUS(report.status):
            return _result(test, "error", why or "the program ended with an error", report, outputs, limits)
        case "passed" | "failed" | "error" | "forged":
            return _result(test, outcome, detail, report, outputs, limits)
        case _:
            return _result(test, "error", why or detail, report, outputs, limits)


def unreported_result(test: TestCase, ended: SandboxEnded, outputs: Outputs, limits: Limits) -> CaseResult:
    """Returns the result of a case whose sandbox ended."""
    stdout, stderr = (text[: limits.output_bytes].decode(errors="replace") for text in outputs)
    return CaseResult(test.name, ended.outcome, stdout, stderr, detail=f"its sandbox: {ended}")


def same_text(printed: str, wanted: str) -> bool:
    """Compares texts without spaces at the ends of lines and empty lines at the end."""
    return _lines(printed) == _lines(wanted)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _limit(report: Report, outputs: Outputs, limits: Limits) -> tuple[Outcome | None, str]:
    """Returns the limit or the signal that ended the program, and the text of its error."""
    kind, _, error = report.note.partition("\n")
    outcome = LIMITS.get(report.why)
    if outcome is None and any(len(output) > limits.output_bytes for output in outputs):
        outcome = "output"
    if outcome is None and report.why == "-" and os.WIFSIGNALED(report.status):
        number = os.WTERMSIG(report.status)
        outcome = OF_SIGNAL.get(number, "killed")
        error = f"it was ended by {signal.Signals(number).name}"
    if outcome is None and report.status != 0 and kind in NOTED:
        outcome = LIMITS[kind]
    if outcome in EXPLAINED:
        return outcome, EXPLAINED[outcome].format(limits)
    return outcome, error


def _result(
    test: TestCase, outcome: Outcome, detail: str, report: Report, outputs: Outputs, limits: Limits
) -> CaseResult:
    stdout, stderr = (text[: limits.output_bytes].decode(errors="replace") for text in outputs)
    status = None if report.why != "-" else os.waitstatus_to_exitcode(report.status)
    used = report.seconds, report.cpu_seconds, report.memory_bytes
    return CaseResult(test.name, outcome, stdout, stderr, status, *used, _printable(detail))


def _printable(text: str) -> str:
    """Writes what a terminal would obey as Python does: names of classes and texts of errors are the program's."""
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)


Kind = Literal["bubblewrap", "none"]
STARTERS = 2
"""Sandboxes that start at one time; each waits for the kernel half of its time."""
START_TIMEOUT = 60.0
"""Seconds for a sandbox that takes 20 milliseconds on an idle machine."""
STARTS = 3
"""Times that a sandbox is started which ends before it is ready: a signal from outside may end the first of them."""
EXAMINER_MEMORY = 2**30
"""Bytes for a test, whose data may be larger than what a program may need."""


class SandboxPool:
    """Use it as `async with SandboxPool() as pool`. size: programs that run at one time, of which as many sandboxes are
    started ahead; default: the number of cores. kind: "none" runs programs without containment. limits: of each case,
    unless a call has others; the size of the writable folders is always this one. python: interpreter below /usr."""

    def __init__(
        self, size: int = 0, *, kind: Kind = "bubblewrap", limits: Limits | None = None, python: str = ""
    ) -> None:
        self.limits = limits or Limits()
        self._size = size or len(os.sched_getaffinity(0))
        self._contained = kind == "bubblewrap"
        self._python = python
        self._harness = b""
        self._slots = asyncio.Semaphore(self._size)
        self._ready: asyncio.Queue[Sandbox] = asyncio.Queue(self._size)
        self._examiners: list[Sandbox] = []
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Starts the first sandboxes; raises SandboxError where they cannot work."""
        self._python = self._python or python_for_programs()
        if self._contained:
            await asyncio.to_thread(try_sandbox)
        self._harness = await asyncio.to_thread(compiled_harness, self._python)
        self._open.push_async_callback(self._kill_all)
        starters = {f"start sandboxes {number}": self._keep_ready() for number in range(min(STARTERS, self._size))}
        await self._open.enter_async_context(running_beside(starters))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Kills all sandboxes."""
        return await self._open.__aexit__(kind, error, traceback)

    async def run(self, program: Program, limits: Limits | None = None) -> AsyncGenerator[CaseResult, None]:
        """Yields the result of each test case as it comes. Leave early inside `contextlib.aclosing`, which kills the
        program at once."""
        limits = limits or self.limits
        used: Sandbox | None = None
        try:
            async with self._slots:
                for test in program.tests:
                    used = used or await self._sandbox()
                    result, is_clean = await self._case(used, program, test, limits)
                    if not is_clean:
                        await used.kill()
                        used = None
                    yield result
        finally:
            if used is not None:
                await used.kill()

    async def run_all(self, program: Program, limits: Limits | None = None) -> list[CaseResult]:
        """Returns the results of all test cases."""
        return [result async for result in self.run(program, limits)]

    async def _case(
        self, sandbox: Sandbox, program: Program, test: TestCase, limits: Limits
    ) -> tuple[CaseResult, bool]:
        """Runs one case; returns its result, and whether the sandbox may run another case of the same program."""
        if test.code:
            return await self._examined(sandbox, program, test, limits)
        kind: Literal["script", "command"] = "command" if program.command else "script"
        outputs = (b"", b"")
        try:
            described = SandboxCase(kind, program.source, test.stdin, program.command, program.file)
            with sandbox.begin(described, limits) as case:
                try:
                    report = await case.report()
                finally:
                    outputs = case.outputs()
            return script_result(test, report, outputs, limits), report.is_clean
        except SandboxEnded as ended:
            return unreported_result(test, ended, outputs, limits), False

    async def _examined(
        self, sandbox: Sandbox, program: Program, test: TestCase, limits: Limits
    ) -> tuple[CaseResult, bool]:
        """Runs the code of a test in an examiner, which calls the program in its sandbox."""
        examiner = await self._examiner()
        is_usable = False
        outputs = (b"", b"")
        try:
            theirs, its = socket.socketpair()
            with theirs, its, sandbox.begin(SandboxCase("program_server", program.source), limits, its) as case:
                larger = replace(limits, memory_bytes=max(limits.memory_bytes, EXAMINER_MEMORY))
                with examiner.begin(SandboxCase("examiner", test.code, objects=test.objects), larger, theirs) as exam:
                    its.close()
                    theirs.close()
                    exam_report = await exam.report()
                    is_usable = exam_report.is_clean
                    case.end()
                    report = await case.report()
                    outputs = case.outputs()
            return exam_result(test, exam_report, report, outputs, limits), report.is_clean
        except SandboxEnded as ended:
            return unreported_result(test, ended, outputs, limits), False
        finally:
            if is_usable:
                self._examiners.append(examiner)
            else:
                await examiner.kill()

    async def _sandbox(self) -> Sandbox:
        """Returns a sandbox that waits for a program; one that was ended from outside meanwhile is left out."""
        while (sandbox := await self._ready.get()).has_ended:
            await sandbox.kill()
        return sandbox

    async def _examiner(self) -> Sandbox:
        while self._examiners:
            if not (examiner := self._examiners.pop()).has_ended:
                return examiner
            await examiner.kill()
        return await self._start()

    async def _start(self) -> Sandbox:
        """Starts a sandbox; raises SandboxError when STARTS of them end before that, or one takes too long."""
        printed = ""
        for _ in range(STARTS):
            try:
                return await Sandbox.start(
                    self._python, self._harness, self.limits.disk_bytes, START_TIMEOUT, contained=self._contained
                )
            except EndedAtStart as ended:
                printed = str(ended)
        raise SandboxError(f"{STARTS} sandboxes in a row ended before they were ready; the last one printed {printed}")

    async def _keep_ready(self) -> None:
        """Starts sandboxes until cancelled; one waits here for room among those that are ready."""
        while True:
            sandbox: Sandbox | None = await self._start()
            assert sandbox is not None
            try:
                await self._ready.put(sandbox)
                sandbox = None
            finally:
                if sandbox is not None:
                    await sandbox.kill()

    async def _kill_all(self) -> None:
        idle = [*self._examiners, *(self._ready.get_nowait() for _ in range(self._ready.qsize()))]
        self._examiners.clear()
        await gather(*(sandbox.kill() for sandbox in idle))

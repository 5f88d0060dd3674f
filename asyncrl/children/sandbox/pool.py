"""Runs programs in sandboxes that were started ahead. Each sandbox is used for one program, and for one case where the
case left anything behind; a new one starts in the background.

starter tasks ──> ready sandboxes (bounded) ──> one program: case after case ──> killed
                  examiners (never see a program) ──> one test at a time ──> used again
"""

import asyncio
import os
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Literal, Self

from asyncrl.children.sandbox.bubblewrap import python_for_programs, try_sandbox
from asyncrl.children.sandbox.case_outcome import exam_result, script_result, unreported_result
from asyncrl.children.sandbox.harness import compiled_harness
from asyncrl.children.sandbox.program_requests import CaseResult, Limits, Program, SandboxError, TestCase
from asyncrl.children.sandbox.single_sandbox import EndedAtStart, Sandbox, SandboxCase, SandboxEnded
from asyncrl.concurrency import gather, running_beside

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

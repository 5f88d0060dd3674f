"""Checks and tests programs in a pool of sandboxes that all code of this process shares.

check(source) ──> sources that wait ──> one sandbox parses all of them: does it compile, what does the linter find
                                             └─ one that takes long: alone in a sandbox, beside the others
run(program) ──> one sandbox each: its tests, until they have taken their seconds

The pool opens with the first program and ends with the process: whatever ends a process of rewards or environments ends
its sandboxes too. The same source, or program with the same tests, is run once, and its result remembered.
"""

import asyncio
import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from contextlib import aclosing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from asyncrl.children.containment import UNCONTAINED
from asyncrl.children.sandbox import CaseResult, Limits, Program, SandboxError, SandboxPool, TestCase
from asyncrl.children.sandbox.bubblewrap import UNCONFINED, try_sandbox
from asyncrl.children.sandbox.pool import Kind
from asyncrl.config.problems import Problem

# Runs work once for each key, however many ask for it at a time, and remembers the newest results.


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
MOST = 4096
"""Results that are remembered: those of some steps, in which a policy says the same again and again."""


class SharedResults(Generic[K, V]):
    """Work goes on when those that wait for it are cancelled, so it has to end by itself. is_lasting: whether a result
    is remembered."""

    def __init__(self, is_lasting: Callable[[V], bool] = lambda result: True) -> None:
        self._is_lasting = is_lasting
        self._known: OrderedDict[K, V] = OrderedDict()
        self._running: dict[K, asyncio.Task[V]] = {}

    async def of(self, key: K, work: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """Returns the result of the key: the remembered one, that of running work, or that of new work."""
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        if (task := self._running.get(key)) is None:
            task = self._running[key] = asyncio.create_task(work())
            task.add_done_callback(partial(self._finish, key))
        return await asyncio.shield(task)

    def _finish(self, key: K, task: "asyncio.Task[V]") -> None:
        del self._running[key]
        if task.cancelled() or task.exception() is not None or not self._is_lasting(result := task.result()):
            return
        self._known[key] = result
        if len(self._known) > MOST:
            self._known.popitem(last=False)


T = TypeVar("T")
CHECKER = Path(__file__).parent / "source_checker.py"
MOST_CHECKED = 64
"""Sources that one sandbox parses; the others wait for it."""
CHECK_LIMITS = Limits(seconds=60, cpu_seconds=5, output_bytes=4 * 2**20)
"""Limits of parsing one source alone, or several, each of which has a share of its own: a tenth of a second of CPU
time. The time of the clock is there for what sleeps; a slow machine makes no source wrong."""
PASSING = frozenset({"timeout", "killed"})
"""Outcomes that another run, on an idle machine, may not have; they are not remembered."""
MOST_SECONDS = 3
"""Times that the tests of a program may take their `seconds`: the last of them may begin when nearly all are used, and
the time before a signal counts for nothing."""
MOST_REMEMBERED = 8192
"""Characters of output, over all tests of a program, up to which its results are remembered."""


@dataclass(frozen=True, slots=True)
class SourceCheck:
    """Says whether a source compiles. error: why not, else "". findings: of the linter."""

    error: str
    findings: tuple[str, ...]

    @property
    def compiles(self) -> bool:
        return not self.error


def _is_lasting(results: tuple[CaseResult, ...]) -> bool:
    printed = sum(len(result.stdout) + len(result.stderr) for result in results)
    return printed <= MOST_REMEMBERED and PASSING.isdisjoint(result.outcome for result in results)


class CodeRunner:
    """Runs programs in one pool. kind: "none" runs them without containment."""

    def __init__(self, kind: Kind = "bubblewrap") -> None:
        self._kind: Kind = kind
        self._checks = SharedResults[bytes, SourceCheck]()
        self._runs = SharedResults[bytes, tuple[CaseResult, ...]](_is_lasting)
        self._waiting: list[tuple[str, asyncio.Future[SourceCheck | None]]] = []
        self._slow = asyncio.Semaphore()
        self._checking: asyncio.Task[None] | None = None
        self._pool: asyncio.Future[SandboxPool] | None = None
        self._holder: asyncio.Task[None] | None = None

    async def check(self, source: str) -> SourceCheck:
        """Compiles a source and lints it, without running it; raises SandboxError where no sandbox works."""
        return await self._checks.of(_digest(source), lambda: self._check(source))

    async def run(self, program: Program, seconds: float) -> tuple[CaseResult, ...]:
        """Returns the results of a program's tests: fewer than it has tests, once they have taken `seconds`, which each
        of them may take. Raises SandboxError where no sandbox works."""
        work = partial(_run, program, seconds)
        return await self._runs.of(_digest(program, seconds), lambda: self._in_pool(work))

    async def close(self) -> None:
        """Ends all programs and the pool; a later call opens another one."""
        for task in (self._checking, self._holder):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})

    async def _check(self, source: str) -> SourceCheck:
        answer: asyncio.Future[SourceCheck | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((source, answer))
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check_waiting(), name="check sources")
        checking = self._checking
        await _first(answer, checking)
        if not answer.done():
            _raise_end(checking)
        if (check := answer.result()) is None:
            async with self._slow:
                (check,) = await self._in_pool(partial(_checked, [source]))
        return check or SourceCheck("Python cannot compile it", ())

    async def _check_waiting(self) -> None:
        """Checks all sources that wait, and those that come meanwhile. Whoever waits for one that takes long has it
        checked alone, one such at a time, while the others go on."""
        try:
            while waiting := self._waiting[:MOST_CHECKED]:
                checks = await self._in_pool(partial(_checked, [source for source, _ in waiting]))
                for (_, answer), check in zip(waiting, checks, strict=True):
                    answer.set_result(check)
                del self._waiting[: len(checks)]
        finally:
            self._waiting.clear()

    async def _in_pool(self, work: Callable[[SandboxPool], Coroutine[Any, Any, T]]) -> T:
        """Does work with the pool, and opens one where there is none; raises the error of a pool that ends."""
        if self._holder is None or self._pool is None or self._holder.done():
            self._pool = asyncio.get_running_loop().create_future()
            self._holder = asyncio.create_task(self._hold(self._pool), name="sandboxes of programs")
        pool = self._pool
        holder = self._holder
        await _first(pool, holder)
        if not pool.done():
            _raise_end(holder)
        running = asyncio.create_task(work(pool.result()))
        try:
            await _first(running, holder)
            return running.result() if running.done() else _raise_end(holder)
        finally:
            running.cancel()
            await asyncio.wait({running})

    async def _hold(self, opened: "asyncio.Future[SandboxPool]") -> None:
        """Keeps a pool open until cancelled: the task that opens a pool has to close it."""
        async with SandboxPool(kind=self._kind) as pool:
            opened.set_result(pool)
            await asyncio.get_running_loop().create_future()


async def _checked(sources: list[str], pool: SandboxPool) -> list[SourceCheck | None]:
    """Returns the checks of sources; None for those of several that take long or end the checker. A single source that
    does it does not compile."""
    test = TestCase("sources", stdin=json.dumps(sources))
    program = Program(CHECKER.read_text(), (test,))
    (result,) = await pool.run_all(program, CHECK_LIMITS)
    if result.outcome == "killed":  # Perhaps from outside; a source that does it does it again.
        (result,) = await pool.run_all(program, CHECK_LIMITS)
    lines = [json.loads(line) for line in result.stdout.split("\n")[:-1]]
    checks = [SourceCheck(line["error"], tuple(line["findings"])) if line else None for line in lines]
    ended = SourceCheck(f"Python cannot compile it: {result.detail or result.outcome}", ())
    return checks + [ended if len(sources) == 1 else None] * (len(sources) - len(checks))


async def _run(program: Program, seconds: float, pool: SandboxPool) -> tuple[CaseResult, ...]:
    """Runs the tests of a program; once more, if a signal, perhaps from outside, soon ended one of them. All of it
    takes at most MOST_SECONDS times `seconds`, besides waiting for sandboxes."""
    clock = asyncio.get_running_loop().time
    began = clock()
    found = await _run_once(program, seconds, pool)
    was_killed = any(result.outcome == "killed" for result in found)
    return await _run_once(program, seconds, pool) if was_killed and clock() - began < seconds else found


async def _run_once(program: Program, seconds: float, pool: SandboxPool) -> tuple[CaseResult, ...]:
    """Runs tests until they have taken their seconds."""
    found: list[CaseResult] = []
    limits = Limits(seconds=seconds, cpu_seconds=math.ceil(seconds))
    async with aclosing(pool.run(program, limits)) as results:
        async for result in results:
            found.append(result)
            if result.outcome == "timeout" or sum(each.seconds for each in found) >= seconds:
                break
    return tuple(found)


async def _first(work: asyncio.Future[Any], owner: asyncio.Future[Any]) -> None:
    """Waits for work, and no longer than its owner lasts."""
    await asyncio.wait({work, owner}, return_when=asyncio.FIRST_COMPLETED)


def _digest(*parts: Any) -> bytes:
    """Returns a short key for a source, or a program with what bounds it."""
    plain = [asdict(part) if isinstance(part, Program) else part for part in parts]
    return hashlib.blake2b(json.dumps(plain).encode(), digest_size=16).digest()


def _raise_end(ended: asyncio.Task[None]) -> NoReturn:
    """Raises why a task ended that others wait for."""
    if not ended.cancelled() and (error := ended.exception()) is not None:
        raise error
    raise SandboxError("the sandboxes were ended while programs waited for them")


def sandbox_problem(key: str, use: str, kind: Kind, does: str = "runs programs") -> Problem | None:
    """Returns why `use`, the value of a config key, cannot do what it does in sandboxes on this machine. kind:
    `children.sandbox`."""
    try:
        if kind == "bubblewrap":
            try_sandbox()
    except SandboxError as error:
        why = str(error).replace(UNCONFINED, UNCONTAINED)
        return Problem(key, "", f"{use} {does} in sandboxes: {why}")
    return None


_runners: dict[tuple[asyncio.AbstractEventLoop, Kind], CodeRunner] = {}


def shared_runner(kind: Kind = "bubblewrap") -> CodeRunner:
    """Returns the runner of the running event loop; a process of rewards or environments has one loop."""
    key = asyncio.get_running_loop(), kind
    if key not in _runners:
        _runners[key] = CodeRunner(kind)
    return _runners[key]

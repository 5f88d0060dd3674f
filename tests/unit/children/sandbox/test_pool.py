"""Results of programs, one sandbox a program, nothing left running, and no program without bubblewrap."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import aclosing
from pathlib import Path

import pytest

from asyncrl.children.sandbox import Limits, Program, SandboxError, SandboxPool, TestCase
from asyncrl.children.sandbox.single_sandbox import Sandbox
from tests.unit.children.sandbox.sandbox_processes import kill_all, sandboxes

ECHO = "import sys\nprint(sys.stdin.read().upper())"
SLEEPS = "import time\ntime.sleep(99)"


def prints(name: str, stdin: str, stdout: str | None) -> TestCase:
    return TestCase(name, stdin=stdin, stdout=stdout)


async def outcomes(pool: SandboxPool, source: str, *codes: str) -> list[str]:
    tests = tuple(TestCase(code, code) for code in codes)
    return [result.outcome for result in await pool.run_all(Program(source, tests))]


async def test_results_come_one_by_one_with_output_status_and_use(pool: SandboxPool) -> None:
    program = Program(ECHO, (prints("same", "a\n", "A"), prints("other", "b\n", "C"), prints("any", "c", None)))
    names = []
    async with aclosing(pool.run(program)) as results:
        async for result in results:
            names.append((result.name, result.outcome, result.stdout, result.exit))
            assert result.seconds > 0
            assert result.memory_bytes > 2**20
    assert names == [("same", "passed", "A\n\n", 0), ("other", "failed", "B\n\n", 0), ("any", "passed", "C\n", 0)]


async def test_an_error_has_its_traceback_and_status(pool: SandboxPool) -> None:
    (raised, ended) = await pool.run_all(Program("x = 1\nint('y')", (TestCase("a"), TestCase("b"))))
    assert (raised.outcome, raised.exit) == (ended.outcome, ended.exit) == ("error", 1)
    assert "line 2, in <module>\nValueError" in raised.stderr
    assert "first_process" not in raised.stderr
    (status,) = await pool.run_all(Program("raise SystemExit(7)", (TestCase("a"),)))
    assert (status.exit, status.detail) == (7, "it ended with status 7")


async def test_programs_end_as_python_ends(pool: SandboxPool) -> None:
    source = (
        "import atexit, threading, time\natexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\nprint('first'); exit()"
    )
    (result,) = await pool.run_all(Program(source, (prints("a", "", "first\nthread\nlast"),)))
    assert result.passed, result


async def test_every_plain_value_and_error_goes_through(pool: SandboxPool) -> None:
    source = (
        "import collections\ndef same(x): return x\ndef add(x): x.append(1)\n"
        "class Mine(ValueError): pass\ndef fail(): raise Mine('why')\n"
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "def count(): yield from range(3)\ndef pair(): return collections.namedtuple('P', 'x y')(1, 2)\nLIMIT = 7"
    )
    texts = "None|True|10**99|-3|1.5|float('inf')|'ä\\ud800'|b'x'|[1,[2]]|(1,)|{1:(2,)}|{3}|frozenset({4})|2j"
    codes = [f"assert same({value}) == {value} and type(same({value})) is type({value})" for value in texts.split("|")]
    codes += [
        "import math\nassert math.isnan(same(math.nan))",
        "x = [0]\nadd(x)\nassert x == [0, 1]",
        "try: fail()\nexcept ValueError as e: assert (type(e).__name__, str(e)) == ('Mine', 'why')\nelse: assert False",
        "s = Stack()\ns.push(2)\nassert s.items == [2]",
        "assert list(count()) == [0, 1, 2]",
        "c = count()\nassert next(c) == 0",
        "assert pair() == (1, 2) and LIMIT == 7",
        "def check(candidate):\n    assert candidate('a') == 'a'\ncheck(same)",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(same(1), 1)\n"
        "unittest.main(argv=['x'])",
    ]
    assert await outcomes(pool, source, *codes) == ["passed"] * len(codes)


async def test_a_test_that_calls_nothing_fails_a_program_that_cannot_run(pool: SandboxPool) -> None:
    (result,) = await pool.run_all(Program("nothing", (TestCase("a", "assert 1"),)))
    assert (result.outcome, "NameError" in result.detail) == ("error", True)


async def test_a_failed_test_names_its_line(pool: SandboxPool) -> None:
    test = TestCase("a", "x = 1\nassert double(x) == 3, 'so'")
    (result,) = await pool.run_all(Program("def double(x): return 2 * x", (test,)))
    assert (result.outcome, result.detail) == ("failed", "AssertionError: so in line 2: assert double(x) == 3, 'so'")
    assert await outcomes(pool, "x = 1", "assert nothing(2)", "double = int", "assert x == 1 and y") == [
        "error",
        "passed",
        "error",
    ]


async def test_any_command_runs(pool: SandboxPool) -> None:
    program = Program(
        "read x; echo $((x * 2))", (prints("a", "4", "8"), prints("b", "5", "8")), ("sh", "{file}"), "p.sh"
    )
    assert [result.outcome for result in await pool.run_all(program)] == ["passed", "failed"]
    (missing,) = await pool.run_all(Program("", (TestCase("a"),), ("no-such-command",)))
    assert missing.outcome == "error"
    with pytest.raises(ValueError, match="for Python, not for the command sh: a"):
        Program("", (TestCase("a", "assert 1"),), ("sh",))


async def test_what_one_case_leaves_no_other_case_sees(pool: SandboxPool) -> None:
    source = (
        "import os, sys\nprint(os.listdir('/tmp'), len([p for p in os.listdir('/proc') if p.isdigit()]))\n"
        "open('/tmp/left', 'w').close()\nsys.stdout.flush()\nif os.fork() == 0: os.setsid(); os.read(os.pipe()[0], 1)"
    )
    assert [result.stdout for result in await pool.run_all(Program(source, (TestCase("a"), TestCase("b"))))] == [
        "[] 2\n"
    ] * 2


async def test_a_program_that_left_nothing_keeps_its_sandbox(pool: SandboxPool) -> None:
    started = "import os\nprint(open('/proc/1/stat').read().split()[21], os.readlink('/proc/self/ns/pid'))"
    same = [result.stdout for result in await pool.run_all(Program(started, (TestCase("a"), TestCase("b"))))]
    (other,) = await pool.run_all(Program(started, (TestCase("a"),)))
    assert same[0] == same[1] != other.stdout


async def test_programs_beyond_the_size_wait_and_leaving_early_kills(bubblewrap_works: None) -> None:
    async with SandboxPool(1) as pool:
        slow = pool.run(Program(f"print(1)\n{SLEEPS}", (TestCase("a"),)))
        first = asyncio.ensure_future(anext(slow))
        second = asyncio.ensure_future(pool.run_all(Program("", (TestCase("b"),))))
        done, _ = await asyncio.wait([first, second], timeout=1)
        assert not done
        first.cancel()
        assert (await second)[0].passed


async def test_cancellation_kills_and_nothing_is_left(bubblewrap_works: None) -> None:
    before = sandboxes()
    async with SandboxPool(2) as pool:
        running = asyncio.ensure_future(pool.run_all(Program(SLEEPS, (TestCase("a"),))))
        assert (await pool.run_all(Program("", (TestCase("b"),))))[0].passed
        assert sandboxes() - before
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert sandboxes() == before


async def test_sandboxes_that_were_killed_while_they_waited_are_replaced(pool: SandboxPool) -> None:
    program = Program("def f(): return 1", (TestCase("a", "assert f() == 1"), TestCase("b")))
    assert [result.outcome for result in await pool.run_all(program)] == ["passed", "passed"]
    kill_all(sandboxes())
    assert [result.outcome for result in await pool.run_all(program)] == ["passed", "passed"]


def kill_inside(outer: int) -> None:
    """Ends what a sandbox runs, which bubblewrap, stopped, does not notice."""
    os.kill(outer, signal.SIGSTOP)
    for child in Path(f"/proc/{outer}/task/{outer}/children").read_text().split():
        end = os.pidfd_open(int(child))
        os.kill(int(child), signal.SIGKILL)
        assert select.select([end], [], [], 20)[0]
        os.close(end)


async def test_a_sandbox_that_ends_before_it_has_the_case_is_reported(
    pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await pool._sandbox()
    kill_inside(sandbox._process.pid)

    async def killed() -> Sandbox:
        return sandbox

    monkeypatch.setattr(pool, "_sandbox", killed)
    (result,) = await pool.run_all(Program("", (TestCase("a"),)))
    assert (result.outcome, result.detail) == ("killed", "its sandbox: it was gone: Broken pipe")


async def test_no_case_of_a_program_runs_in_a_sandbox_that_ended_without_a_report(
    pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = pool._sandbox
    begin = await pool._sandbox()
    kill_inside(begin._process.pid)
    given: list[Sandbox] = []

    async def first_is_gone() -> Sandbox:
        given.append(await started() if given else begin)
        return given[-1]

    monkeypatch.setattr(pool, "_sandbox", first_is_gone)
    first, second = await pool.run_all(Program("print(1)", (prints("a", "", "1"), prints("b", "", "1"))))
    assert (first.outcome, second.outcome, len(given)) == ("killed", "passed", 2)
    assert begin.has_ended


async def test_a_sandbox_whose_end_is_cancelled_ends_all_the_same(pool: SandboxPool) -> None:
    sandbox = await pool._sandbox()
    kill_inside(sandbox._process.pid)
    ending = asyncio.create_task(sandbox.kill())
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert sandbox.has_ended


def python_that(folder: Path, happens: str) -> str:
    """Makes an interpreter in which something happens before a sandbox is ready."""
    made = folder / "python"
    made.write_text(f'#!/bin/sh\n[ $# -gt 4 ] && {happens} && echo "no luck" && exit 3\nexec {sys.executable} "$@"\n')
    made.chmod(0o755)
    return str(made)


async def test_a_sandbox_that_dies_while_it_starts_is_started_again(tmp_path: Path) -> None:
    dies_twice = f"{{ mkdir {tmp_path}/first || mkdir {tmp_path}/second; }} 2> /dev/null"
    async with SandboxPool(1, kind="none", python=python_that(tmp_path, dies_twice)) as pool:
        assert [result.outcome for result in await pool.run_all(Program("", (TestCase("a"),)))] == ["passed"]
    assert not {"first", "second"}.difference(os.listdir(tmp_path))


async def test_sandboxes_that_all_die_while_they_start_are_an_error_with_what_they_printed(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"3 sandboxes in a row .* the last one printed 'no luck'"):
        async with SandboxPool(1, kind="none", python=python_that(tmp_path, "true")) as pool:
            await pool.run_all(Program("", (TestCase("a"),)))


DIES = f"""
import asyncio, os, signal
from asyncrl.children.sandbox import *

async def main():
    async with SandboxPool(2) as pool:
        program = Program({SLEEPS!r}, (TestCase("a"),))
        running = asyncio.ensure_future(pool.run_all(program))
        await pool.run_all(Program("", (TestCase("b"),)))
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_sandboxes_die_with_the_process_of_the_pool(bubblewrap_works: None) -> None:
    before = sandboxes(1)
    done = subprocess.run([sys.executable, "-c", DIES], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    until = time.monotonic() + 20
    while (left := sandboxes(1) - before) and time.monotonic() < until:
        os.sched_yield()
    assert not left


async def test_without_bubblewrap_it_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
        async with SandboxPool(1):
            pass


async def test_none_runs_programs_without_containment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    async with SandboxPool(1, kind="none", limits=Limits(seconds=5)) as pool:
        tests = (prints("a", "x", "X"), TestCase("b", "assert f(1) == 1"))
        program = Program(f"{ECHO}\ndef f(x): return x", tests)
        assert [result.outcome for result in await pool.run_all(program)] == ["passed", "passed"]
        short = Limits(seconds=0.2)
        assert [result.outcome for result in await pool.run_all(Program(SLEEPS, (TestCase("a"),)), short)] == [
            "timeout"
        ]

"""Checks and runs of programs in one pool of real sandboxes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from asyncrl.children.code import code_runner
from asyncrl.children.code.code_runner import CodeRunner, SharedResults
from asyncrl.children.sandbox import Limits, Program, SandboxError, TestCase, pool
from tests.unit.children.sandbox.sandbox_processes import kill_all, sandboxes

PLUS_ONE = "def f(x): return x + 1"
TESTS = tuple(TestCase(str(x), code=f"assert f({x}) == {x + 1}") for x in range(3))
SLOW = Program("import time\ntime.sleep(60)", (TestCase("a"), TestCase("b")))


@pytest.fixture
async def runner(bubblewrap_works: None) -> AsyncIterator[CodeRunner]:
    made = CodeRunner()
    yield made
    await made.close()


async def test_sources_are_checked_side_by_side(runner: CodeRunner) -> None:
    sources = ["def f(x) return x", *(f"def f(x): return x + {n};" for n in range(100)), "x = "]
    checks = await asyncio.gather(*(runner.check(source) for source in sources))
    assert [check.compiles for check in checks] == [False, *[True] * 100, False]
    assert checks[0].error == "SyntaxError: expected ':' (line 1)"
    assert checks[1].findings == ("line 1: a semicolon ends the line",)


async def test_a_source_that_ends_the_checker_does_not_compile_and_its_neighbours_are_checked(
    runner: CodeRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ending = tmp_path / "checker.py"
    ending.write_text(
        "import json, os, sys\n"
        "for source in json.load(sys.stdin):\n"
        "    source == 'end' and os._exit(3)\n"
        "    print(json.dumps({'error': '', 'findings': []}), flush=True)\n"
    )
    monkeypatch.setattr("asyncrl.children.code.code_runner.CHECKER", ending)
    checks = await asyncio.gather(*(runner.check(source) for source in ("a", "end", "b")))
    assert [check.error for check in checks] == ["", "Python cannot compile it: it ended with status 3", ""]


def nested(depth: int) -> str:
    """A short source that Python compiles in a time that doubles with each two levels."""
    source = "x = 1\n"
    for _ in range(depth):
        source = "try:\n    pass\nfinally:\n" + "".join(f"    {line}\n" for line in source.splitlines())
    return source


async def test_sources_that_take_long_cost_themselves_only(runner: CodeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_runner, "CHECK_LIMITS", Limits(seconds=60, cpu_seconds=2, output_bytes=2**20))
    slow = [f"{nested(14)}y = {number}\n" for number in range(4)]
    quick = [f"x = {number}\n" for number in range(50)]
    endless = nested(30)
    ended: list[str] = []

    async def check(source: str) -> bool:
        compiles = (await runner.check(source)).compiles
        ended.append(source)
        return compiles

    sources = [slow[0], endless, *quick[:20], *slow[1:], *quick[20:]]
    found = dict(zip(sources, await asyncio.gather(*map(check, sources)), strict=True))
    assert [source for source in sources if not found[source]] == [endless]
    assert {*quick} <= {*ended[: ended.index(endless)]}, "a source that takes long held up others"


async def test_a_program_runs_all_its_tests(runner: CodeRunner) -> None:
    wrong = Program("def f(x): return 2", TESTS)
    assert [each.outcome for each in await runner.run(Program(PLUS_ONE, TESTS), 20)] == ["passed"] * 3
    assert [each.outcome for each in await runner.run(wrong, 20)] == ["failed", "passed", "failed"]


async def test_no_test_follows_one_that_took_all_the_time(runner: CodeRunner) -> None:
    assert [each.outcome for each in await runner.run(SLOW, 0.5)] == ["timeout"]


async def test_a_pool_that_cannot_start_is_an_error_of_each_program(
    runner: CodeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise SandboxError("there is none")

    monkeypatch.setattr(pool, "try_sandbox", broken)
    asked = (runner.check("a"), runner.check("b"), runner.run(Program(PLUS_ONE, TESTS), 20))
    assert [str(each) for each in await asyncio.gather(*asked, return_exceptions=True)] == ["there is none"] * 3
    monkeypatch.undo()
    assert (await runner.check(PLUS_ONE)).compiles


async def test_a_closed_runner_leaves_no_sandbox_and_ends_what_waits(runner: CodeRunner) -> None:
    before = sandboxes()
    waiting = asyncio.ensure_future(runner.run(SLOW, 50))
    await runner.check(PLUS_ONE)
    assert sandboxes() > before
    await runner.close()
    with pytest.raises(SandboxError, match="the sandboxes were ended while programs waited"):
        await waiting
    assert sandboxes() <= before


async def test_a_source_whose_checker_is_killed_from_outside_is_checked_again(runner: CodeRunner) -> None:
    before = sandboxes()
    await runner.check("x = 1")
    kill_all(sandboxes() - before)
    assert (await runner.check(PLUS_ONE)).error == ""


class Work:
    """Counts how often it was begun; ends when it is released."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.released = asyncio.Event()

    async def of(self, key: str) -> str:
        self.begun.append(key)
        await self.released.wait()
        if key == "fails":
            raise ValueError("it failed")
        return key.upper()


async def test_the_same_work_runs_once() -> None:
    work = Work()
    results = SharedResults[str, str]()
    work.released.set()
    assert await asyncio.gather(*(results.of(key, lambda key=key: work.of(key)) for key in "aab")) == ["A", "A", "B"]
    assert await results.of("a", lambda: work.of("a")) == "A"
    assert work.begun == ["a", "b"]


async def test_work_goes_on_without_the_one_who_asked_first() -> None:
    work = Work()
    results = SharedResults[str, str]()
    first, second = (asyncio.ensure_future(results.of("a", lambda: work.of("a"))) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    work.released.set()
    assert await second == "A"
    assert work.begun == ["a"]


async def test_errors_and_passing_results_are_not_remembered() -> None:
    work = Work()
    results = SharedResults[str, str](lambda result: result != "A")
    work.released.set()
    for _ in range(2):
        with pytest.raises(ValueError, match="it failed"):
            await results.of("fails", lambda: work.of("fails"))
        await results.of("a", lambda: work.of("a"))
    assert work.begun == ["fails", "a", "fails", "a"]


async def test_the_oldest_results_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_runner, "MOST", 2)
    work = Work()
    results = SharedResults[str, str]()
    work.released.set()
    for key in "abacab":
        await results.of(key, lambda key=key: work.of(key))
    assert work.begun == ["a", "b", "c", "b"]

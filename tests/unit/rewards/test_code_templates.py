"""Rewards for programs, run as a reward worker runs them: in a child, with sandboxes of its own."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.children.code import code_runner
from asyncrl.children.sandbox import SandboxError
from asyncrl.config.sources import load as load_experiment
from asyncrl.errors import ConfigError
from asyncrl.rewards.execution.child_pool import ChildPool
from asyncrl.rewards.functions import OVERLAPPING, FunctionSpec, function_problems, load, overlapping
from tests import golden
from tests.processes import descendants, gone
from tests.unit.children.running import running
from tests.unit.rewards.execution.pools import sample

TESTS = [f"assert f({x}) == {x + 1}" for x in range(4)]
COMPILES, PASSES, LINT = range(3)
SPECS = [FunctionSpec(use, use) for use in ("compiles", "passes_tests", "lint")]


@asynccontextmanager
async def scoring(folder: Path, **options: Any) -> AsyncIterator[ChildPool]:
    specs = [SPECS[0], FunctionSpec("passes_tests", "passes_tests", options=options), SPECS[2]]
    limits: dict[str, Any] = {"workers": 1, "deadline": 30.0, "start_deadline": 60.0, "printed": folder / "printed"}
    async with running(lambda tasks: ChildPool(specs, tasks, **limits)) as pool:
        yield pool


async def values(pool: ChildPool, text: str, **row: Any) -> list[float]:
    results = [await pool.run(number, [sample(text, **{"tests": TESTS, **row})]) for number in range(3)]
    assert [result.reason for (result,) in results] == [""] * 3
    return [result.value for (result,) in results]


async def test_programs_are_scored_by_compiling_by_their_tests_and_by_style(
    bubblewrap_works: None, tmp_path: Path
) -> None:
    async with scoring(tmp_path) as pool:
        assert await values(pool, "def f(x): return x + 1") == [1, 1, 1]
        assert await values(pool, "def f(x): return 1;") == [1, 0.25, 0.75]
        assert await values(pool, "def f(x) return x + 1") == [0, 0, 0]
        assert await values(pool, "") == [0, 0, 0]
        assert await values(pool, "", before="def f(x):\n    '''f'''\n") == [0, 0, 0]
        assert await values(pool, "<think>def f(x): return x + 1") == [0, 0, 0]
        draft = "<think>\n```python\ndef f(x): return 1\n```</think>\n"
        assert await values(pool, f"{draft}```python\ndef f(x): return x + 1\n```") == [1, 1, 1]
        assert await values(pool, "    return x + 1", before="def f(x):\n") == [1, 1, 1]
        assert await values(pool, "Here:\n```python\ndef f(x): return x + 1\n```\nDone.") == [1, 1, 1]
        doubles = [{"stdin": "2", "stdout": "4"}, {"stdin": "3", "stdout": "6"}]
        assert await values(pool, "print(int(input()) + 2)", tests=doubles) == [1, 0.5, 1]


async def test_a_program_that_never_ends_or_cheats_earns_nothing_and_costs_its_seconds_only(
    bubblewrap_works: None, tmp_path: Path
) -> None:
    async with scoring(tmp_path, seconds=0.5) as pool:
        endless = [sample("def f(x):\n    while True: pass", member, tests=TESTS) for member in range(6)]
        fine = sample("def f(x): return x + 1", 6, tests=TESTS)
        cheat = sample("class One:\n    __eq__ = lambda *_: True\ndef f(x): return One()", 7, tests=TESTS)
        results = await pool.run(PASSES, [*endless, fine, cheat])
        assert [(result.value, result.reason) for result in results] == [(0, "")] * 6 + [(1, ""), (0, "")]


async def test_a_row_without_tests_is_an_error(tmp_path: Path) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({}, "the row has no column tests with tests; found are prompt"),
        ({"tests": []}, "the row's tests are no list of tests, but []"),
        ({"tests": [1]}, "the row's tests[0] is no test: write a text"),
    ]
    async with scoring(tmp_path) as pool:
        for row, said in rows:
            ((result),) = await pool.run(PASSES, [sample("def f(x): return x", prompt="p", **row)])
            assert said in result.reason
            assert (result.value, result.traceback) == (None, "")


def guard_among(pids: set[int]) -> int:
    return min(pid for pid in pids if b"guard_program" in Path(f"/proc/{pid}/cmdline").read_bytes())


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_no_sandbox_outlives_the_child(bubblewrap_works: None, tmp_path: Path, how: str) -> None:
    async with scoring(tmp_path) as pool:
        before = descendants(os.getpid())
        await pool.run(PASSES, [sample("def f(x): return x + 1", tests=TESTS)])
        started = descendants(os.getpid()) - before
        assert len(started) > 3
        if how == "kill":
            os.kill(guard_among(started), signal.SIGKILL)
            await gone(started)
            ((result),) = await pool.run(PASSES, [sample("def f(x): return x + 1", tests=TESTS)])
            assert result.value == 1
    await gone(started)
    assert descendants(os.getpid()) <= before


def test_tests_overlap_as_far_as_there_are_cores_and_checks_freely() -> None:
    assert overlapping(load(SPECS[PASSES])) == len(os.sched_getaffinity(0))
    assert overlapping(load(SPECS[COMPILES])) == overlapping(load(SPECS[LINT])) == OVERLAPPING


def test_options_are_checked() -> None:
    with golden.raises(ConfigError, match="passes_tests.*0"):
        load(FunctionSpec("passes_tests", "t", options={"seconds": 0}))
    with golden.raises(ConfigError, match="0.*-1"):
        load(FunctionSpec("lint", "t", options={"penalty": -1}))
    with golden.raises(ConfigError, match="passes_tests.*mean seconds"):
        load(FunctionSpec("passes_tests", "t", options={"second": 1}))


def problems(tmp_path: Path, *lines: str) -> list[str]:
    file = tmp_path / "e.toml"
    file.write_text('[model]\nname = "warmed:reverse"\n[task]\nprompts = "p.jsonl"\n[reward]\n' + "\n".join(lines))
    return [str(problem) for problem in function_problems(load_experiment(str(file)).config)]


def test_the_deadline_leaves_time_for_the_tests(bubblewrap_works: None, tmp_path: Path) -> None:
    use = 'functions = [{ use = "passes_tests", options = { seconds = 6 } }]'
    (said,) = problems(tmp_path, use)
    assert "reward.deadline" in said
    golden.says(said, "3 times", "6 seconds")
    assert problems(tmp_path, use, "deadline = 19") == []


def test_without_a_sandbox_a_run_is_refused_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise SandboxError("bubblewrap is not installed")

    monkeypatch.setattr(code_runner, "try_sandbox", broken)
    use = 'functions = ["compiles", "lint"]'
    (said,) = problems(tmp_path, use)
    golden.says(said, "reward.functions")
    assert problems(tmp_path, use, "[children]", 'sandbox = "none"') == []
    assert problems(tmp_path, 'functions = ["exact_match"]') == []
    joined = ("[fleet]", 'wire = "tcp"', 'listen = "tcp://127.0.0.1:7000"', "joined = { reward = 1 }")
    assert problems(tmp_path, use, *joined) == [], "the hosts that join are asked"


def test_the_sandbox_is_one_key_of_all_children(tmp_path: Path) -> None:
    (said,) = problems(tmp_path, 'functions = [{ use = "lint", options = { sandbox = "none" } }]')
    golden.says(said, "[children]")


async def test_without_containment_programs_are_scored_too(tmp_path: Path) -> None:
    reward = load(FunctionSpec("passes_tests", "t", options={"sandbox": "none"}))
    assert await reward(sample("def f(x): return x + 1", tests=TESTS)) == 1
    await code_runner.shared_runner("none").close()


@pytest.mark.parametrize("template", ["compiles", "passes_tests", "lint"])
def test_a_choice_of_programs_that_there_is_not_is_refused(template: str) -> None:
    with golden.raises(ConfigError, match="'frist'.*mean first"):
        load(FunctionSpec(template, template, options={"choose": "frist"}))

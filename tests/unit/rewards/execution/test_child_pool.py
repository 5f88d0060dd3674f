"""The pool with real children: they hang, crash, print, spawn and die."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from asyncrl.children.printed_output import BLOCK, LARGEST
from asyncrl.errors import ConfigError, DeadlineExceeded
from asyncrl.rewards.sample import FunctionResult
from tests import golden
from tests.processes import alive, gone
from tests.unit.rewards.execution.pools import MakePool, pool_of_file, pools, sample

FUNCTIONS = r"""
import asyncio, os, re, subprocess, sys, threading

def length(sample):
    return len(sample.text)

def noisy(sample):
    print("to stdout")
    os.write(1, b"\x00\x00\x00\x09 straight to the descriptor")
    subprocess.run(["echo", "from a child"])
    return float(sys.stdin.read() == "")

def floods(sample):
    for _ in range(3000):
        print("x" * 1000)
    print("the end of member", sample.member)
    return 1.0

def variables(sample):
    return {"fleet": "ASYNCRL_TELEMETRY__SINKS" in os.environ, "user": "KEY_OF_THE_JUDGE" in os.environ}

def raises(sample):
    raise KeyError("nothing here")

def hangs(sample):
    if sample.text == "hang":
        threading.Event().wait()
    return 1.0

def backtracks(sample):
    return float(re.fullmatch(r"(a+)+b", "a" * 40) is not None)

def crashes_at_times(sample):
    if sample.text == "crash":
        os._exit(7)
    return 1.0

def logs(sample):
    with open(sample.row["log"], "a") as file:
        file.write(sample.text + " ")
    return crashes_at_times(sample)

def dawdles(sample):
    threading.Event().wait(0.6)
    return 1.0

def leaves(sample):
    process = subprocess.Popen(["sleep", "600"])
    apart = subprocess.Popen(["sleep", "600"], start_new_session=True)
    orphan = subprocess.run("sleep 600 >&- 2>&- & echo $!", shell=True, capture_output=True).stdout.decode().strip()
    if not (forked := os.fork()):
        threading.Event().wait()
    with open(sample.row["pids"], "w") as file:
        file.write(f"{os.getpid()} {process.pid} {apart.pid} {orphan} {forked}\n")
    if sample.text == "crash":
        os._exit(7)
    threading.Event().wait()

def pid(sample):
    return os.getpid()

meeting = 0

async def meets(sample):
    global meeting
    meeting += 1
    while meeting < 8:
        await asyncio.sleep(0.001)
    return 1.0

async def waits(sample):
    if sample.text == "hang":
        await asyncio.Event().wait()
    return 1.0

async def blocks(sample):
    if sample.text == "hang":
        threading.Event().wait()
    await asyncio.sleep(0.3)
    return 1.0
"""


@pytest.fixture
def pool(tmp_path: Path) -> MakePool:
    return pools(FUNCTIONS, tmp_path)


async def test_what_user_code_prints_or_reads_does_not_touch_the_messages(pool: MakePool, tmp_path: Path) -> None:
    async with pool("noisy", "length") as running:
        assert await running.run(0, [sample()]) == [FunctionResult(1.0)]
        assert await running.run(1, [sample("four")]) == [FunctionResult(4.0)]
    printed = (tmp_path / "reward0.printed").read_bytes()
    assert all(each in printed for each in (b"to stdout", b"straight to the descriptor", b"from a child"))


async def test_output_of_children_is_bounded_and_its_newest_part_is_kept(pool: MakePool, tmp_path: Path) -> None:
    async with pool("floods", workers=2) as running:
        scored = await running.run(0, [sample(member=member) for member in range(10)])
        assert scored == [FunctionResult(1.0)] * 10
    newest = tmp_path / "reward0.printed"
    older = tmp_path / "reward0.printed.old"
    assert older.stat().st_size + newest.stat().st_size <= 2 * (LARGEST + BLOCK)
    assert b"the end of member" in newest.read_bytes()
    cut = f"asyncrl: what was printed before is in {older}; what was printed before that was removed\n"
    assert newest.read_text().startswith(cut)


async def test_a_child_has_no_variables_that_configure_the_fleet(
    pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCRL_TELEMETRY__SINKS", "[]")
    monkeypatch.setenv("KEY_OF_THE_JUDGE", "of the user")
    async with pool("variables", variables=("KEY_OF_THE_JUDGE", "ASYNCRL_TELEMETRY__SINKS")) as running:
        assert await running.run(0, [sample()]) == [FunctionResult({"fleet": 0.0, "user": 1.0})]


async def test_an_exception_is_reported_with_its_traceback_and_costs_no_child(pool: MakePool) -> None:
    async with pool("raises", "pid") as running:
        before = await running.run(1, [sample()])
        (result,) = await running.run(0, [sample()])
        golden.says(result.reason, "'nothing here'")
        assert 'raise KeyError("nothing here")' in result.traceback
        assert await running.run(1, [sample()]) == before


async def test_a_hang_that_holds_the_interpreter_is_killed_too(pool: MakePool) -> None:
    async with pool("backtracks", deadline=0.5) as running:
        (result,) = await running.run(0, [sample()])
        assert result.reason.startswith("it hung")


async def test_many_samples_go_over_in_one_message_and_are_judged_one_by_one(pool: MakePool) -> None:
    async with pool("length", workers=2) as running:
        texts = ["a" * length for length in range(1, 8)]
        assert await running.run(0, [sample(text) for text in texts]) == [FunctionResult(float(n)) for n in range(1, 8)]


async def test_of_many_samples_the_one_that_hangs_is_blamed_and_the_rest_is_judged(pool: MakePool) -> None:
    async with pool("hangs", deadline=1.0) as running:
        results = await running.run(0, [sample(text) for text in ("fine", "hang", "fine", "hang", "fine")])
    hung = FunctionResult(reason="it hung: no answer within 1 s")
    assert results == [FunctionResult(1.0), hung, FunctionResult(1.0), hung, FunctionResult(1.0)]


async def test_each_of_many_samples_has_the_whole_deadline(pool: MakePool) -> None:
    async with pool("dawdles", deadline=2.0) as running:
        assert await running.run(0, [sample() for _ in range(5)]) == [FunctionResult(1.0)] * 5


async def test_of_many_samples_the_one_that_crashes_is_blamed_and_the_rest_is_judged(pool: MakePool) -> None:
    async with pool("crashes_at_times") as running:
        results = await running.run(0, [sample(text) for text in ("fine", "crash", "fine")])
    assert results == [
        FunctionResult(1.0),
        FunctionResult(reason="its process ended with status 7"),
        FunctionResult(1.0),
    ]


async def test_where_the_first_failure_counts_no_sample_is_tried_after_it(pool: MakePool, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with pool("logs", first_failure_only=True) as running:
        results = await running.run(0, [sample(text, log=str(log)) for text in ("fine", "crash", "crash", "fine")])
    assert results == [
        FunctionResult(1.0),
        FunctionResult(reason="its process ended with status 7"),
        *[FunctionResult(reason="it could not be called: a sample before it failed")] * 2,
    ]
    assert log.read_text() == "fine crash "


async def test_a_call_whose_samples_fail_ends_before_the_next_one_begins(pool: MakePool, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with pool("logs") as running, asyncio.TaskGroup() as tasks:
        for call in ("first", "second"):
            tasks.create_task(running.run(0, [sample(text, log=str(log)) for text in (call, "crash", call)]))
    assert log.read_text() == "first crash first second crash second "


async def test_calls_that_run_when_the_pool_is_stopped_end_and_start_no_process(pool: MakePool, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    async with asyncio.timeout(60), pool("leaves") as running, asyncio.TaskGroup() as tasks:
        hung = tasks.create_task(running.run(0, [sample("hang", pids=str(pids)) for _ in range(2)]))
        while not (pids.exists() and pids.read_text().endswith("\n")):
            await asyncio.to_thread(os.sched_yield)
        await running.stop()
    assert [result.value for result in hung.result()] == [None, None]


@pytest.mark.parametrize(("text", "said"), [("hang", "it hung"), ("crash", "status 7")])
async def test_what_a_function_started_ends_with_its_process(
    pool: MakePool, tmp_path: Path, text: str, said: str
) -> None:
    async with pool("leaves", deadline=1.0) as running:
        (result,) = await running.run(0, [sample(text, pids=str(tmp_path / "pids"))])
        golden.says(result.reason, said)
        assert not [pid for pid in map(int, (tmp_path / "pids").read_text().split()) if alive(pid)]


async def test_children_compute_side_by_side(pool: MakePool) -> None:
    async with pool("pid", "hangs", workers=2, deadline=60) as running, asyncio.TaskGroup() as tasks:
        hung = tasks.create_task(running.run(1, [sample("hang")]))
        pids = {(await running.run(0, [sample()]))[0].value for _ in range(3)}
        assert len(pids) == 1
        assert hung.cancel()


async def test_coroutine_functions_overlap_in_one_child(pool: MakePool) -> None:
    async with pool("meets") as running, asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(running.run(0, [sample()])) for _ in range(8)]
    assert [call.result() for call in calls] == [[FunctionResult(1.0)]] * 8


async def test_a_coroutine_that_hangs_is_ended_without_its_child(pool: MakePool) -> None:
    async with pool("waits", "meets", deadline=0.5) as running:
        (result,) = await running.run(0, [sample("hang")])
        line = FUNCTIONS.splitlines().index("async def waits(sample):") + 3
        golden.says(result.reason, "0.5 s")
        assert (result.reason.partition("functions.py, ")[2], result.traceback) == (f"line {line}", "")
        assert await running.run(0, [sample()]) == [FunctionResult(1.0)]


async def test_calls_beside_a_coroutine_that_blocks_are_made_again(pool: MakePool) -> None:
    async with pool("blocks", deadline=1.0) as running, asyncio.TaskGroup() as tasks:
        beside = tasks.create_task(running.run(0, [sample()]))
        blocking = tasks.create_task(running.run(0, [sample("hang")]))
    assert blocking.result()[0].reason.startswith("it hung")
    assert beside.result() == [FunctionResult(1.0)]


async def test_the_call_of_a_cancelled_caller_is_not_blamed_on_the_next(pool: MakePool) -> None:
    async with pool("hangs", "length", deadline=1.0) as running:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await running.run(0, [sample("hang")])
        assert await running.run(1, [sample("four")]) == [FunctionResult(4.0)]


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ("def g(sample): ...", ConfigError, "has no f; there are g"),
        ("f = 3", ConfigError, "f is not a function"),
        ("import no_such_module_here", ConfigError, "mine.py.*line 1"),
        ("import threading\nthreading.Event().wait()", DeadlineExceeded, "mine.py:f could not be loaded within 2 s"),
    ],
)
async def test_what_cannot_be_loaded_is_an_error_at_the_start(
    tmp_path: Path, source: str, error: type[Exception], said: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.TaskGroup() as tasks:
            await pool_of_file(file, tasks, start=2.0 if error is DeadlineExceeded else 60.0).start()
    assert raised.group_contains(error, match=said)


PARENT = """
import asyncio, sys
from pathlib import Path
from asyncrl.rewards import Sample
from asyncrl.rewards.functions import FunctionSpec
from asyncrl.rewards.execution.child_pool import ChildPool

async def main():
    async with asyncio.TaskGroup() as tasks:
        options = {"workers": 1, "deadline": 60, "start_deadline": 60, "printed": Path(sys.argv[2] + ".printed")}
        pool = ChildPool([FunctionSpec(sys.argv[1] + ":leaves", "f")], tasks, **options)
        await pool.start()
        await pool.run(0, [Sample("p", "x", {"pids": sys.argv[2]}, 0, 0, "stop", 1)])

asyncio.run(main())
"""


async def test_what_a_function_started_ends_with_a_reward_worker_that_was_killed(
    pool: MakePool, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(tmp_path / "functions.py"), str(pids)
    )
    try:
        async with asyncio.timeout(60):
            while not (pids.exists() and pids.read_text().endswith("\n")):
                await asyncio.to_thread(os.sched_yield)
        started = [int(pid) for pid in pids.read_text().split()]
        assert all(alive(pid) for pid in started)
    finally:
        parent.kill()
        await parent.wait()
    await gone(started)

"""Children of the pool that a signal ends: by the function's own doing, or from outside."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from asyncrl.children.guarded_process import ChildEnded
from asyncrl.errors import ConfigError
from asyncrl.rewards.execution.child_pool import Answer
from asyncrl.rewards.sample import FunctionResult
from tests.unit.rewards.execution.pools import MakePool, pool_of_file, pools, sample

FUNCTIONS = """
import asyncio, os, signal, threading

def pid(sample):
    return os.getpid()

def kills_itself(sample):
    if sample.text == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0

async def kills_itself_later(sample):
    await asyncio.sleep(0.01)
    return kills_itself(sample)

def ranks_or_dies(samples):
    return [kills_itself(sample) for sample in samples]

def killed_once(sample):
    whom = {"runner": os.getpid(), "guard": os.getppid()}.get(sample.text)
    with open(sample.row["tries"], "a") as file:
        file.write(f"{sample.member} ")
    with open(sample.row["tries"]) as file:
        if whom and file.read().split().count(str(sample.member)) == 1:
            os.kill(whom, signal.SIGKILL)
            threading.Event().wait()
    return 1.0

async def killed_once_later(sample):
    await asyncio.sleep(0.01)
    return killed_once(sample)
"""


@pytest.fixture
def pool(tmp_path: Path) -> MakePool:
    return pools(FUNCTIONS, tmp_path)


@pytest.mark.parametrize(("name", "whom"), [("killed_once", "runner"), ("killed_once_later", "guard")])
async def test_a_sample_whose_process_is_killed_from_outside_is_judged_by_the_next_one(
    pool: MakePool, tmp_path: Path, whom: str, name: str
) -> None:
    tries = tmp_path / "tries"
    async with pool(name) as running:
        texts = ("fine", whom, "fine", whom)
        samples = [sample(text, member, tries=str(tries)) for member, text in enumerate(texts)]
        assert await running.run(0, samples) == [FunctionResult(1.0)] * 4
    assert tries.read_text().split().count("1") >= 2


async def test_children_that_end_at_a_sample_are_progress(pool: MakePool) -> None:
    """A worker whose children all end is slow and does not hang."""
    async with pool("kills_itself") as running:
        await running.run(0, [sample("kill")])
        assert running.finished == 2


@pytest.mark.parametrize("name", ["kills_itself", "kills_itself_later"])
async def test_a_function_that_kills_its_own_process_is_blamed_and_the_rest_is_judged(
    pool: MakePool, name: str
) -> None:
    async with pool(name) as running:
        results = await running.run(0, [sample(text) for text in ("fine", "kill", "fine")])
    assert results[::2] == [FunctionResult(1.0)] * 2
    assert results[1] == FunctionResult(
        reason="its process was ended by SIGKILL, as the kernel does where memory runs out; "
        "so was another one at the same sample"
    )


async def test_a_group_that_kills_its_process_twice_is_blamed_whole(pool: MakePool) -> None:
    async with pool("ranks_or_dies", group=True) as running:
        killed = await running.run(0, [sample("fine"), sample("kill")])
        assert len(killed) == 2
        assert all("another one at the same sample" in result.reason for result in killed)
        assert [result.failed_together for result in killed] == [2, 2]
        assert await running.run(0, [sample("fine")]) == [FunctionResult(1.0)]


async def test_a_process_that_is_killed_between_two_calls_is_nobody_s_fault(pool: MakePool) -> None:
    async with pool("pid") as running:
        (before,) = await running.run(0, [sample()])
        assert isinstance(before.value, float)
        os.kill(int(before.value), signal.SIGKILL)
        (after,) = await running.run(0, [sample()])
        assert after.reason == ""
        assert after.value != before.value


async def test_a_process_that_is_killed_while_it_loads_is_started_once_more(tmp_path: Path) -> None:
    file = tmp_path / "killed.py"
    tries = tmp_path / "tries"
    file.write_text(
        f"import os, signal\nwith open({str(tries)!r}, 'a') as tries:\n    tries.write('x')\n"
        f"if len(open({str(tries)!r}).read()) in (1, 3, 4):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def f(sample):\n    return 1.0\n"
    )
    async with asyncio.TaskGroup() as tasks:
        pool = pool_of_file(file, tasks)
        await pool.start()
        await pool.stop()
        again = pool_of_file(file, tasks)
        with pytest.raises(ConfigError, match=r"the process was ended by SIGKILL.* while it loaded them; see"):
            await again.start()
    assert tries.read_text() == "xxxx"


async def test_a_child_that_ends_right_after_its_last_answer_has_answered() -> None:
    answer = Answer(2)
    waiting = asyncio.ensure_future(answer.whole(20))
    await asyncio.sleep(0)
    answer.take([FunctionResult(1.0), FunctionResult(2.0)])
    answer.take((), ChildEnded("its process ended with status 7"))
    assert await waiting == [FunctionResult(1.0), FunctionResult(2.0)]

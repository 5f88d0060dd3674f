import asyncio
import sys
import threading
from pathlib import Path

import pytest

from asyncrl.children.printed_output import LARGEST, SHOWN
from asyncrl.rewards.execution import thread_pool
from asyncrl.rewards.execution.thread_pool import THREADS, InProcessPool, named
from asyncrl.rewards.sample import Sample
from tests import golden


def length(sample: Sample) -> float:
    return 1.0


async def test_functions_of_one_name_have_terms_of_their_own(tmp_path: Path) -> None:
    pool = InProcessPool(named([lambda sample: 0.0, length, lambda sample: 1.0, length]), 1.0, tmp_path / "printed")
    assert [spec.name for spec in pool.specs] == ["lambda", "length", "lambda_2", "length_2"]


async def test_calls_that_are_given_up_while_they_wait_are_queued_no_longer(tmp_path: Path) -> None:
    over = threading.Event()

    def waits(sample: Sample) -> float:
        over.wait(20)
        return 1.0

    pool = InProcessPool(named([waits]), 20.0, tmp_path / "printed")
    samples = [Sample("p", "t", {}, group=0, member=member, finish="stop", tokens=1) for member in range(THREADS + 3)]
    async with asyncio.timeout(60):
        call = asyncio.ensure_future(pool.run(0, samples))
        for _ in iter(lambda: pool.queued == 3, True):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
    over.set()
    assert pool.queued == 0


async def test_calls_that_hang_are_bounded_and_go_on_once_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    begun = list[str]()

    def waits(sample: Sample) -> float:
        begun.append(sample.text)
        over.wait(60)
        return 1.0

    monkeypatch.setattr(thread_pool, "MOST_HUNG", 3)
    pool = InProcessPool(named([waits]), 0.01, tmp_path / "printed")
    samples = [Sample("p", "t", {}, group=0, member=member, finish="stop", tokens=1) for member in range(3)]
    assert all("its thread goes on" in result.reason for result in await pool.run(0, samples))
    for result in await pool.run(0, samples):
        golden.says(result.reason, "3 earlier")
    assert len(begun) == 3
    over.set()
    for thread in pool._hung:
        await asyncio.to_thread(thread.join, 60)
    monkeypatch.setattr(pool, "_deadline", 60.0)
    assert [result.value for result in await pool.run(0, samples)] == [1.0] * 3


async def test_output_of_functions_of_this_process_is_bounded_and_begins_on_its_own_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def talks(sample: Sample) -> float:
        sys.stdout.write("first words\n")
        for _ in range(12_000):
            sys.stdout.write("x" * 1000 + "\n")
        sys.stderr.write("last words\n")
        return 1.0

    before = (sys.stdout, sys.stderr)
    printed = tmp_path / "reward0.printed"
    pool = InProcessPool(named([talks]), 20.0, printed)
    await pool.start()
    sys.stdout.write("of the run\n")
    assert [result.value for result in await pool.run(0, [Sample("p", "t", {}, 0, 0, "stop", 1)])] == [1.0]
    sys.stdout.write("of the run too\n")
    await pool.stop()
    assert (sys.stdout, sys.stderr) == before
    shown = capsys.readouterr()
    assert len(shown.out) < SHOWN + 500
    assert f"all else that reward functions print is in {printed}" in shown.out
    assert shown.out.startswith("of the run\nfirst words\n")
    assert shown.out.endswith("of the run too\n")
    assert shown.err == "last words\n"
    kept = [printed, printed.with_name("reward0.printed.old")]
    assert sum(file.stat().st_size for file in kept) <= 2 * LARGEST + 2000
    assert printed.read_text().endswith("last words\n")

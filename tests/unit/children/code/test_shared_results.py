"""Work that is done once for all who ask."""

import asyncio

import pytest

from asyncrl.children.code import code_runner
from asyncrl.children.code.code_runner import SharedResults


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

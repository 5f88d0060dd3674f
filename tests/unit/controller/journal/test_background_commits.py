"""A checkpoint that is written while steps go on is of the step that it was copied after; its errors are not lost."""

import asyncio
import errno
from typing import Any

import pytest

from asyncrl.config.schema import TrainingConfig
from asyncrl.controller.checkpointing import BackgroundCommits
from asyncrl.controller.journal.audit import Audit
from asyncrl.controller.journal.checkpoints import plan_resume, resume, versions
from asyncrl.controller.journal.journal import Journal
from asyncrl.controller.journal.run_storage import MemoryStore
from asyncrl.protocols.messages import Checkpointed


class Scene:
    """A run over a store. The trainer copies its state, and writes it once `written` is set."""

    def __init__(self, run: Any, background: bool = True) -> None:
        self.store = MemoryStore()
        self.history = run(0)
        self.journal = Journal(self.store)
        self.copied: list[int] = []
        self.committed: list[int] = []
        self.written = asyncio.Event()
        self.error: Exception | None = None
        settings = TrainingConfig(background_checkpoints=background)
        self.commits = BackgroundCommits(self.journal, settings, committed=self._committed)

    async def _committed(self, version: int) -> None:
        self.committed.append(version)

    async def begin(self) -> None:
        ledger = self.journal.ledger
        version = ledger.version
        chain = ledger.chain.hex()

        async def copy(directory: str) -> Checkpointed:
            self.copied.append(version)
            return Checkpointed(0, "", {})

        async def write(directory: str) -> Checkpointed:
            await self.written.wait()
            if self.error is not None:
                raise self.error
            return Checkpointed(version, chain, {})

        await self.commits.begin(version, copy, write)

    async def with_the_first(self) -> "Scene":
        """Commits the first checkpoint, and trains a step."""
        self.written.set()
        await self.begin()
        self.written.clear()
        self.train()
        return self

    def train(self) -> None:
        target = self.history.version + 1
        while self.history.version < target:
            self.journal.append(self.history.step())


async def waits(scene: Scene) -> bool:
    """Returns whether `begin` waits until the files are written; it has returned in the end."""
    begun = asyncio.ensure_future(scene.begin())
    for _ in range(50):
        await asyncio.sleep(0)
    found = not begun.done()
    scene.written.set()
    await begun
    return found


async def test_records_after_the_copy_lie_behind_the_checkpoint(run: Any) -> None:
    scene = await Scene(run).with_the_first()
    async with scene.commits:
        await scene.begin()
        assert (scene.copied, scene.committed, versions(scene.store)) == ([0, 1], [0], [0])
        scene.train()
        scene.train()
        scene.written.set()
    assert (scene.committed, versions(scene.store)) == ([0, 1], [0, 1])
    assert Audit(scene.store).ok
    for found in (scene.store.after_death(), scene.store.after_power_cut()):
        plan = plan_resume(found)
        assert plan is not None
        assert (plan.version, plan.ledger.version) == (1, 1)
        assert resume(found, plan).ledger.version == 1
        assert Audit(found).ok


async def test_the_first_checkpoint_is_waited_for_and_later_ones_are_not(run: Any) -> None:
    scene = Scene(run)
    async with scene.commits:
        assert await waits(scene)
        scene.written.clear()
        scene.train()
        assert not await waits(scene)


async def test_without_background_a_run_waits_for_the_files(run: Any) -> None:
    scene = await Scene(run, background=False).with_the_first()
    async with scene.commits:
        assert await waits(scene)
        assert versions(scene.store) == [0, 1]


async def test_the_next_checkpoint_waits_for_the_one_before(run: Any) -> None:
    scene = await Scene(run).with_the_first()
    async with scene.commits:
        await scene.begin()
        scene.train()
        second = asyncio.ensure_future(scene.begin())
        for _ in range(50):
            await asyncio.sleep(0)
        assert scene.copied == [0, 1]
        scene.written.set()
        await second
        assert (scene.copied, scene.committed[:2]) == ([0, 1, 2], [0, 1])
    assert versions(scene.store) == [1, 2]


async def fails(scene: Scene) -> None:
    """Runs until an error, which comes while a checkpoint is written."""
    async with scene.commits:
        await scene.begin()
        asyncio.get_running_loop().call_soon(scene.written.set)
        raise ValueError("the run failed")


async def test_an_error_of_the_files_ends_the_run_at_its_next_look(run: Any) -> None:
    scene = await Scene(run).with_the_first()
    scene.error = OSError(errno.ENOSPC, "No space left on device")

    async def go_on() -> None:
        async with scene.commits:
            await scene.begin()
            scene.written.set()
            async with asyncio.timeout(60):
                while True:
                    await asyncio.sleep(0)
                    scene.commits.check()

    with pytest.raises(OSError, match="No space"):
        await go_on()
    assert scene.store.folders() == ["0"], "what was unfinished is removed"


async def test_an_error_of_the_copy_is_that_of_the_caller(run: Any) -> None:
    scene = await Scene(run).with_the_first()

    async def fail(directory: str) -> Checkpointed:
        raise OSError(errno.EIO, "Input/output error")

    async with scene.commits:
        with pytest.raises(OSError, match="Input/output"):
            await scene.commits.begin(1, fail, fail)
        scene.written.set()
        await scene.begin()
    assert versions(scene.store) == [0, 1]


async def test_a_run_that_fails_keeps_the_checkpoint_that_was_copied(run: Any) -> None:
    scene = await Scene(run).with_the_first()
    with pytest.raises(ValueError, match="the run"):
        await fails(scene)
    assert versions(scene.store) == [0, 1]


async def test_of_two_errors_that_of_the_run_is_raised(run: Any) -> None:
    scene = await Scene(run).with_the_first()
    scene.error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(ValueError, match="the run") as raised:
        await fails(scene)
    assert raised.value.__notes__ == ["besides, a checkpoint was not committed: [Errno 28] No space left on device"]


async def test_a_cancelled_run_gives_its_checkpoint_up(run: Any) -> None:
    scene = await Scene(run).with_the_first()
    begun = asyncio.Event()

    async def body() -> None:
        async with scene.commits:
            await scene.begin()
            begun.set()
            await asyncio.Event().wait()

    task = asyncio.ensure_future(body())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert versions(scene.store) == [0]


async def test_a_run_that_is_cancelled_while_it_waits_writes_nothing_afterwards(run: Any) -> None:
    """The next controller of this process may resume as soon as the scope has ended."""
    scene = await Scene(run).with_the_first()
    waiting = asyncio.Event()

    async def body() -> None:
        async with scene.commits:
            await scene.begin()
            waiting.set()
            raise ValueError("the run failed")

    task = asyncio.ensure_future(body())
    await waiting.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    size = scene.store.size
    scene.written.set()
    for _ in range(50):
        await asyncio.sleep(0)
    assert (scene.store.size, versions(scene.store)) == (size, [0])


async def test_a_begin_that_was_cancelled_while_an_earlier_commit_is_written_may_be_repeated(run: Any) -> None:
    scene = await Scene(run).with_the_first()
    async with scene.commits:
        await scene.begin()
        assert scene.commits.is_running
        scene.train()
        late = asyncio.ensure_future(scene.begin())
        await asyncio.sleep(0)
        late.cancel()
        await asyncio.wait([late])
        assert late.cancelled()
        assert scene.commits.is_running, "the earlier one goes on"
        assert scene.copied == [0, 1]
        scene.written.set()
        await scene.begin()
        await scene.commits.finish()
        assert not scene.commits.is_running
    assert versions(scene.store)[-1] == 2

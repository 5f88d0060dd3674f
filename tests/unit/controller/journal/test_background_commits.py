"""A checkpoint that is written while steps go on is of the step that it was copied after; its errors are not lost."""

import asyncio
import errno
from collections.abc import Awaitable, Callable

import pytest

from asyncrl.config.schema import TrainingConfig
from asyncrl.controller.checkpointing import BackgroundCommits
from asyncrl.controller.journal.audit import Audit
from asyncrl.controller.journal.checkpoints import resume, versions
from asyncrl.protocols.messages import Checkpointed
from tests.unit.controller.journal.saga import Saga, planned

NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


class Scene(Saga):
    """A run whose trainer copies its state, and writes it once `written` is set."""

    def __init__(self, background: bool = True) -> None:
        super().__init__()
        self.copied: list[int] = []
        self.committed: list[int] = []
        self.written = asyncio.Event()
        self.error: Exception | None = None
        settings = TrainingConfig(background_checkpoints=background)
        self.commits = BackgroundCommits(self.journal, settings, committed=self._committed)

    async def _committed(self, version: int) -> None:
        self.committed.append(version)

    async def begin(self) -> None:
        answer = self.answer({})

        async def copy(directory: str) -> Checkpointed:
            self.copied.append(answer.version)
            return Checkpointed(0, "", {})

        async def write(directory: str) -> Checkpointed:
            await self.written.wait()
            if self.error is not None:
                raise self.error
            return answer

        await self.commits.begin(answer.version, copy, write)

    async def with_the_first(self) -> "Scene":
        """Commits the first checkpoint, and trains a step."""
        self.written.set()
        await self.begin()
        self.written.clear()
        self.train()
        return self


async def turns() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def waits(scene: Scene) -> bool:
    """Returns whether `begin` waits until the files are written; it has returned in the end."""
    begun = asyncio.ensure_future(scene.begin())
    await turns()
    found = not begun.done()
    scene.written.set()
    await begun
    return found


async def test_records_after_the_copy_lie_behind_the_checkpoint() -> None:
    scene = await Scene().with_the_first()
    async with scene.commits:
        await scene.begin()
        assert (scene.copied, scene.committed, versions(scene.store)) == ([0, 1], [0], [0])
        scene.train(2)
        scene.written.set()
    assert (scene.committed, versions(scene.store)) == ([0, 1], [0, 1])
    assert Audit(scene.store).ok
    for found in (scene.store.after_death(), scene.store.after_power_cut()):
        plan = planned(found)
        assert (plan.version, plan.ledger.version) == (1, 1)
        assert resume(found, plan).ledger.version == 1
        assert Audit(found).ok


async def test_the_first_checkpoint_is_waited_for_and_later_ones_only_without_background() -> None:
    scene = Scene()
    async with scene.commits:
        assert await waits(scene)
        scene.written.clear()
        scene.train()
        assert not await waits(scene)
    scene = await Scene(background=False).with_the_first()
    async with scene.commits:
        assert await waits(scene)
        assert versions(scene.store) == [0, 1]


async def test_the_next_checkpoint_waits_for_the_one_before() -> None:
    scene = await Scene().with_the_first()
    async with scene.commits:
        await scene.begin()
        scene.train()
        second = asyncio.ensure_future(scene.begin())
        await turns()
        assert scene.copied == [0, 1]
        scene.written.set()
        await second
        assert (scene.copied, scene.committed[:2]) == ([0, 1, 2], [0, 1])
    assert versions(scene.store) == [1, 2]


async def failing_run(scene: Scene, then: Callable[[], None]) -> None:
    """Runs until an error, which comes while a checkpoint is written. then: called at that moment."""
    async with scene.commits:
        await scene.begin()
        then()
        raise ValueError("the run failed")


async def test_an_error_of_the_files_ends_the_run_at_its_next_look() -> None:
    scene = await Scene().with_the_first()
    scene.error = NO_SPACE

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


async def test_an_error_of_the_copy_is_that_of_the_caller() -> None:
    scene = await Scene().with_the_first()

    async def fail(directory: str) -> Checkpointed:
        raise OSError(errno.EIO, "Input/output error")

    async with scene.commits:
        with pytest.raises(OSError, match="Input/output"):
            await scene.commits.begin(1, fail, fail)
        scene.written.set()
        await scene.begin()
    assert versions(scene.store) == [0, 1]


@pytest.mark.parametrize("error", [None, NO_SPACE])
async def test_a_run_that_fails_keeps_the_checkpoint_that_was_copied_and_its_own_error(error: OSError | None) -> None:
    scene = await Scene().with_the_first()
    scene.error = error
    loop = asyncio.get_running_loop()
    with pytest.raises(ValueError, match="the run") as raised:
        await failing_run(scene, lambda: loop.call_soon(scene.written.set) and None)
    assert versions(scene.store) == ([0] if error else [0, 1])
    noted = [f"besides, a checkpoint was not committed: {error}"] if error else []
    assert getattr(raised.value, "__notes__", []) == noted


async def cancelled(body: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Cancels what runs once it has set the event."""
    begun = asyncio.Event()
    task = asyncio.ensure_future(body(begun))
    await begun.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_run_gives_its_checkpoint_up() -> None:
    scene = await Scene().with_the_first()

    async def body(begun: asyncio.Event) -> None:
        async with scene.commits:
            await scene.begin()
            begun.set()
            await asyncio.Event().wait()

    await cancelled(body)
    assert versions(scene.store) == [0]


async def test_a_run_that_is_cancelled_while_it_waits_writes_nothing_afterwards() -> None:
    """The next controller of this process may resume as soon as the scope has ended."""
    scene = await Scene().with_the_first()
    await cancelled(lambda waiting: failing_run(scene, waiting.set))
    size = scene.store.size
    scene.written.set()
    await turns()
    assert (scene.store.size, versions(scene.store)) == (size, [0])


async def test_a_begin_that_was_cancelled_while_an_earlier_commit_is_written_may_be_repeated() -> None:
    scene = await Scene().with_the_first()
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

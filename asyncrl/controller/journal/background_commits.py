"""Commits checkpoints while the run goes on.

    between two iterations   rows are saved and the trainer's state is copied ──> begin returns
    meanwhile                files, manifest, rename: the commit (checkpoints.py)
    the next begin, or end   waits for it, and raises its error

A checkpoint is of the journal as it was between the iterations; records that follow lie behind it. The first one of a
run is waited for: without it nothing that is drawn could be taken up again.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Self

from asyncrl.config.schema import TrainingConfig
from asyncrl.controller.journal.checkpoints import Spared, commit, nothing_spared, versions
from asyncrl.controller.journal.journal import Journal
from asyncrl.protocols.messages import Checkpointed

CopyState = Callable[[str], Awaitable[Checkpointed]]
"""Saves rows into a directory, and lets the trainers copy their state. Returns the files that it has written."""
WriteCopies = Callable[[str], Awaitable[Checkpointed]]
"""Lets the trainers write what they copied into a directory. Returns its files."""


class BackgroundCommits:
    """Commits one checkpoint at a time. At the end of its scope it waits for the running commit, whose state was copied
    already, also where the run fails; only where the run is cancelled it gives the commit up."""

    def __init__(
        self,
        journal: Journal,
        settings: TrainingConfig,
        kept: Spared = nothing_spared,
        committed: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """Takes from the settings how many checkpoints stay, and whether `begin` waits for the end of the commit. kept:
        as in `commit`. committed: takes the version of each checkpoint."""
        self._journal = journal
        self._settings = settings
        self._kept = kept
        self._committed = committed
        self._running: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self._running is not None and not self._running.done()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if (running := self._running) is None:
            return
        if isinstance(error, asyncio.CancelledError):
            running.cancel()
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as cancelled:
            error = cancelled
            running.cancel()
            await asyncio.wait({running})  # Nobody else may write to the journal or the checkpoints meanwhile.
            raise
        finally:
            if error is not None and not running.cancelled() and (own := running.exception()) is not None:
                error.add_note(f"besides, a checkpoint was not committed: {own}")
        if error is None:
            running.result()

    async def begin(self, version: int, copy: CopyState, write: WriteCopies) -> None:
        """Commits the checkpoint of the journal's version, while no iteration runs, and returns once its state is
        copied. Raises what `copy` raises, and errors of the commit before it."""
        await self.finish()
        has_one = bool(versions(self._journal.store))
        copied = asyncio.Event()
        work = self._commit(version, copy, write, copied)
        self._running = asyncio.create_task(work, name=f"checkpoint {version}")
        waiting = asyncio.create_task(copied.wait(), name="copies of a checkpoint")
        try:
            await asyncio.wait({self._running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if not (self._settings.background_checkpoints and has_one) or self._running.done():
            await self.finish()

    def check(self) -> None:
        """Raises the error of a commit that has ended with one."""
        if self._running is not None and self._running.done():
            self._running.result()

    async def finish(self) -> None:
        """Waits until no commit runs. Raises what it raised: OSError, RemoteError, JournalError, FleetFailed."""
        if (running := self._running) is not None:
            await asyncio.wait({running})  # A cancelled wait leaves it to the end of the scope.
            self._running = None
            running.result()

    async def _commit(self, version: int, copy: CopyState, write: WriteCopies, copied: asyncio.Event) -> None:
        async def copy_and_write(directory: str) -> Checkpointed:
            saved = await copy(directory)
            copied.set()
            return Checkpointed.merge([await write(directory), saved])

        await commit(self._journal, copy_and_write, self._settings.keep_checkpoints, self._kept)
        if self._committed is not None:
            await self._committed(version)

"""Copies a run to a store after each checkpoint, beside the run."""

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from asyncrl.concurrency import running_beside
from asyncrl.controller.journal.remote_copy.objects import Objects
from asyncrl.controller.journal.remote_copy.run_copy import (
    STAGED,
    Head,
    Snapshot,
    remove_unnamed,
    upload,
    write_mark,
)
from asyncrl.errors import FleetFailed

LAST_UPLOAD = 300.0
"""Seconds without a block that was sent, or a part that was found there, after which the end of a run no longer waits
for its last copy. All tries of one request take less."""


class Uploads:
    """One upload runs, and one snapshot waits; a later checkpoint takes the place of the one that waits.

    head, tag: what the store holds. say: takes what a person should read. copied: version of the newest copy, -1: none.
    """

    def __init__(
        self, objects: Objects, run_dir: Path, head: Head | None, tag: str, say: Callable[[str], None]
    ) -> None:
        self.copied = -1 if head is None else head.version
        self._objects = objects
        self._run_dir = run_dir
        self._known: Head | None = None  # what the store has, where nothing else may lie there
        self._tag = tag
        self._say = say
        self._writer = secrets.token_hex(8)
        self._made = 0
        self._moved = 0  # parts, of all uploads
        self._has_ended = False
        self._waiting: Snapshot | None = None
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._changed = asyncio.Event()
        shutil.rmtree(run_dir / STAGED, ignore_errors=True)  # A start that was killed left it.
        write_mark(run_dir, [self._writer] if head is None else [head.writer, self._writer])

    async def committed(self, version: int) -> None:
        """Takes a snapshot of a checkpoint that was just committed."""
        try:
            snapshot = await asyncio.to_thread(Snapshot.take, self._run_dir, version)
        except OSError as error:
            self._say(f"no copy of step {version} is made: {error}")
            return
        if self._waiting is not None and self._waiting.version != version:
            late = self._waiting
            self._say(f"{self._objects.address} is slow: step {late.version} is not copied, step {version} will be")
            await asyncio.to_thread(late.release)
        self._waiting = snapshot
        self._is_idle.clear()
        self._changed.set()

    async def run(self) -> None:
        """Uploads until cancelled. Raises OtherWriter."""
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                while (snapshot := self._waiting) is not None:
                    self._waiting = None
                    await self._upload(snapshot)
                self._is_idle.set()
        finally:
            self._has_ended = True

    def _note_part(self) -> None:
        self._moved += 1
        if self._has_ended:  # Nobody waits for the threads, and the process would.
            raise OSError("the run has ended")

    async def _upload(self, snapshot: Snapshot) -> None:
        before = self._known
        self._known = None
        work = (self._objects, snapshot, before, self._tag, self._writer, self._note_part)
        try:
            head, self._tag = await asyncio.to_thread(upload, *work)
        except OSError as error:
            after = f"the copy is of step {self.copied}" if self.copied >= 0 else "there is no copy yet"
            self._say(f"{self._objects.address} did not take step {snapshot.version}: {error}; {after}")
        else:
            self.copied = snapshot.version
            self._made += 1
            await self._remove_unnamed(before, head)
        finally:
            if self._waiting is None or self._waiting.version != snapshot.version:
                await asyncio.to_thread(snapshot.release)

    async def _remove_unnamed(self, before: Head | None, head: Head) -> None:
        try:
            lost = await asyncio.to_thread(remove_unnamed, self._objects, before, head)
        except OSError as error:
            self._say(f"{self._objects.address} keeps parts that no copy names any more: {error}")
            return
        if lost:
            self._say(f"{self._objects.address} has lost {lost} parts of step {head.version}; the next copy sends them")
        else:
            self._known = head

    async def finish(self, version: int) -> None:
        """Copies the end of the run, with all that it wrote, for as long as bytes move. Raises FleetFailed when
        none did for LAST_UPLOAD, or the store refuses the copy."""
        before = self._made
        if await self._becomes_idle():
            before = self._made
            await self.committed(version)
            await self._becomes_idle()
        if self._made == before:
            raise FleetFailed(
                f"{self._objects.address} did not take the end of the run, step {version}, which is in "
                f"{self._run_dir}: the same command copies it"
            )

    async def _becomes_idle(self) -> bool:
        """Returns whether nothing is to be copied any more; False once nothing has moved for LAST_UPLOAD."""
        while not self._is_idle.is_set():
            moved = self._moved, self._objects.blocks
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_UPLOAD):
                    await self._is_idle.wait()
            if moved == (self._moved, self._objects.blocks):
                break
        return self._is_idle.is_set()


@asynccontextmanager
async def uploading(uploads: Uploads) -> AsyncIterator[None]:
    async with running_beside({"copies of the run": uploads.run()}):
        yield

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

LAST_UPLOAD = 600.0
"""Seconds that the end of a run waits for its last copy."""


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
        self._head = head
        self._tag = tag
        self._say = say
        self._writer = secrets.token_hex(8)
        self._made = 0
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
        while True:
            await self._changed.wait()
            self._changed.clear()
            while (snapshot := self._waiting) is not None:
                self._waiting = None
                await self._upload(snapshot)
            self._is_idle.set()

    async def _upload(self, snapshot: Snapshot) -> None:
        before, work = self._head, (self._objects, snapshot, self._head, self._tag, self._writer)
        try:
            head, self._tag = await asyncio.to_thread(upload, *work)
        except OSError as error:
            after = f"the copy is of step {self.copied}" if self.copied >= 0 else "there is no copy yet"
            self._say(f"{self._objects.address} did not take step {snapshot.version}: {error}; {after}")
        else:
            self._head = head
            self.copied = snapshot.version
            self._made += 1
            await self._remove_unnamed(before, head)
        finally:
            if self._waiting is None or self._waiting.version != snapshot.version:
                await asyncio.to_thread(snapshot.release)

    async def _remove_unnamed(self, before: Head | None, head: Head) -> None:
        try:
            if before is not None:
                await asyncio.to_thread(remove_unnamed, self._objects, before, head)
        except OSError as error:
            self._say(f"{self._objects.address} keeps parts that no copy names any more: {error}")

    async def finish(self, version: int) -> None:
        """Copies the end of the run, with all that it wrote. Raises FleetFailed when that takes too long or fails."""
        before = self._made
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_UPLOAD):
                await self._is_idle.wait()
                before = self._made
                await self.committed(version)
                await self._is_idle.wait()
        if self._made == before:
            raise FleetFailed(
                f"{self._objects.address} did not take the end of the run, step {version}, which is in "
                f"{self._run_dir}: the same command copies it"
            )


@asynccontextmanager
async def uploading(uploads: Uploads) -> AsyncIterator[None]:
    async with running_beside({"copies of the run": uploads.run()}):
        yield

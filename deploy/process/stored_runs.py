"""Runs whose directory is an address in a store of objects: the folder here in which they work, and their copies."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.secret_places import default_cache
from asyncrl.errors import ConfigError
from asyncrl.telemetry.run_directory import is_in_store

if TYPE_CHECKING:
    from asyncrl.controller.journal.run_copy import S3Objects
    from asyncrl.controller.journal.run_storage import FileStore

READ = frozenset(("samples", "evaluate", "export", "push", "report", "audit", "replay"))
"""Commands that read a run directory, and may be given such an address."""


def folder_of(address: str) -> Path:
    """Returns the run directory on this machine of a run in a store."""
    name = sha256(address.rstrip("/").encode()).hexdigest()[:16]
    return default_cache() / "stored_runs" / name


def stored_run(address: str, say: Callable[[str], None] = print) -> Path:
    """Returns the run directory here, after it holds the run that the store has. Raises ConfigError for a wrong
    address, a missing extra, and a store that cannot be read."""
    from asyncrl.controller.journal.run_copy import brought

    objects = _objects(address)
    folder = folder_of(address)
    was_there = folder.exists()
    try:
        found = brought(objects, folder)
    except OSError as error:
        raise ConfigError(f"{address} cannot be read: {error}") from error
    if found is not None and not was_there:
        say(f"brought step {found.version} of {address} to {folder}")
    return folder


def read_here(name: str, arguments: list[str]) -> list[str]:
    """Returns the arguments of a command with the folders of runs in place of their addresses."""
    if name not in READ:
        return arguments
    return [str(_read_run(each)) if is_in_store(each) else each for each in arguments]


def _read_run(address: str) -> Path:
    folder = stored_run(address)
    if not folder.exists():
        raise ConfigError(f"{address} holds no run")
    return folder


def _objects(address: str) -> "S3Objects":
    from asyncrl.controller.journal.run_copy import S3Objects

    return S3Objects(address)


OnCommit = Callable[[int], Awaitable[None]]


@asynccontextmanager
async def copies_of(
    address: str, run_dir: Path, store: "FileStore", say: Callable[[str], None]
) -> AsyncIterator[OnCommit | None]:
    """Copies a run to its address after each checkpoint, and at the end of the block; "": there is none. store:
    the checkpoints of the run. Raises OtherWriter when another run writes there."""
    if not address:
        yield None
        return
    from asyncrl.controller.journal.checkpoints import versions
    from asyncrl.controller.journal.run_copy import Uploads, head_of, uploading

    objects = _objects(address)
    await asyncio.to_thread(objects.check)
    head, tag = await asyncio.to_thread(head_of, objects, run_dir)
    uploads = Uploads(objects, run_dir, head, tag, say)
    async with uploading(uploads):
        yield uploads.committed
        if made := versions(store):
            await uploads.finish(made[-1])
            say(f"step {made[-1]} is copied to {address}")

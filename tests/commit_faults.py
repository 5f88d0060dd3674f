"""Commits a checkpoint and calls a function after each of its steps, for tests that interrupt it there."""

from collections.abc import Callable
from typing import Any

from asyncrl.controller.journal.checkpoints import MANIFEST, Manifest, Spared, WriteFiles, commit, nothing_spared
from asyncrl.controller.journal.journal import Journal
from asyncrl.protocols.messages import Checkpointed

FAULT_POINTS = ("appended", "synced", "written", "described", "renamed", "hinted", "deleted")
"""The steps of a commit, in order."""


async def faulty_commit(
    journal: Journal, write: WriteFiles, keep: int, fault: Callable[[str], None], kept: Spared = nothing_spared
) -> Manifest:
    """Does what `commit` does, and calls `fault` with each step after it was done."""
    store: Any = journal.store
    originals = {name: getattr(store, name) for name in ("append", "sync", "put", "rename")}
    reached = [""]

    def reach(point: str) -> None:
        reached.append(point)
        fault(point)

    def after(name: str, points: Callable[..., str | None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            originals[name](*arguments)
            if (point := points(*arguments)) is not None:
                reach(point)

        return call

    async def written(directory: str) -> Checkpointed:
        made = await write(directory)
        reach("written")
        return made

    store.append = after("append", lambda data: {"": "appended", "renamed": "hinted"}.get(reached[-1]))
    store.sync = after("sync", lambda: "synced" if reached[-1] == "appended" else None)
    store.put = after("put", lambda folder, file, data: "described" if file == MANIFEST else None)
    store.rename = after("rename", lambda folder, name: "renamed")
    try:
        manifest = await commit(journal, written, keep, kept)
    finally:
        for name in originals:
            delattr(store, name)
    if reached[-1] == "hinted":
        fault("deleted")
    return manifest

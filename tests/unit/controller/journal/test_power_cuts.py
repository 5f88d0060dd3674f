"""A power cut loses what was not fsynced, names of files included: what a checkpoint syncs is all that it needs."""

import os
from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest

from asyncrl.controller.journal import run_storage
from asyncrl.controller.journal.checkpoints import commit, plan_resume
from asyncrl.controller.journal.run_storage import FileStore
from asyncrl.errors import JournalError
from asyncrl.protocols.messages import Checkpointed
from tests.power_cut_disk import Disk
from tests.unit.controller.journal.saga import Saga

Patch = pytest.MonkeyPatch


async def version_after_power_cut(tmp_path: Path, patch: Patch) -> int | None:
    """The version that a run goes on from when the power fails right after the commit of version 1."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    disk = Disk(patch)
    saga = Saga(2, FileStore(run_dir))

    async def write(directory: str) -> Checkpointed:
        model = Path(directory) / "model"
        model.mkdir()
        file = model / "weights"
        file.write_bytes(b"weights")
        for path in (file, model):  # As trainer_checkpoint does.
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        return saga.answer({"model/weights": sha256(b"weights").hexdigest()})

    await commit(saga.journal, write, 2)
    saga.train()
    await commit(saga.journal, write, 2)
    saga.store.close()
    with closing(FileStore(disk.after_power_cut(tmp_path / "after", run_dir.stat().st_ino))) as found:
        try:
            plan = plan_resume(found)
        except JournalError:
            return None
    return plan.version if plan else None


async def test_a_committed_checkpoint_outlives_a_power_cut(tmp_path: Path, monkeypatch: Patch) -> None:
    assert await version_after_power_cut(tmp_path, monkeypatch) == 1


def put(store: FileStore, folder: str, file: str, data: bytes) -> None:
    (store.checkpoints / folder / file).write_bytes(data)


def only_syncs(patch: Patch, wanted: Callable[[Path], bool]) -> None:
    whole = run_storage._sync_directory
    patch.setattr(run_storage, "_sync_directory", lambda path: whole(path) if wanted(path) else None)


def not_synced(*names: str) -> Callable[[Patch], None]:
    """Leaves out folders with these names, or with a version's."""
    return lambda patch: only_syncs(
        patch, lambda path: path.name not in names and not ("1" in names and path.name.startswith("tmp-"))
    )


MUTANTS: dict[str, Callable[[Patch], None]] = {
    "the journal is not synced": lambda patch: patch.setattr(FileStore, "sync", lambda store: None),
    "the manifest is not synced": lambda patch: patch.setattr(FileStore, "put", put),
    "the folder is not synced before its rename": not_synced("0", "1"),
    "the rename is not synced": not_synced("checkpoints"),
    "the run directory is not synced": not_synced("run"),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
async def test_each_fsync_of_the_store_is_needed(
    mutant: Callable[[Patch], None], tmp_path: Path, monkeypatch: Patch
) -> None:
    mutant(monkeypatch)
    assert await version_after_power_cut(tmp_path, monkeypatch) != 1

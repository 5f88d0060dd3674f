"""A power cut loses what was not fsynced, names of files included: what a checkpoint syncs is all that it needs."""

import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from asyncrl.controller.journal import run_storage
from asyncrl.controller.journal.checkpoints import commit, plan_resume
from asyncrl.controller.journal.journal import Journal
from asyncrl.controller.journal.run_storage import FileStore
from asyncrl.errors import JournalError
from asyncrl.protocols.messages import Checkpointed
from tests.power_cut_disk import Disk

Patch = pytest.MonkeyPatch


async def version_after_power_cut(run: Any, tmp_path: Path, patch: Patch) -> int | None:
    """The version that a run goes on from when the power fails right after the commit of version 1."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    disk = Disk(patch)
    store = FileStore(run_dir)
    journal = Journal(store)
    history = run(2)

    async def write(directory: str) -> Checkpointed:
        model = Path(directory) / "model"
        model.mkdir()
        file = model / "weights"
        data = b"weights"
        file.write_bytes(data)
        for path in (file, model):  # As trainer_checkpoint does.
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        ledger = journal.ledger
        return Checkpointed(ledger.version, ledger.chain.hex(), {"model/weights": sha256(data).hexdigest()})

    await commit(journal, write, 2)
    while history.version < 1:
        journal.append(history.step())
    await commit(journal, write, 2)
    store.close()
    found = FileStore(disk.after_power_cut(tmp_path / "after", run_dir.stat().st_ino))
    try:
        plan = plan_resume(found)
    except JournalError:
        return None
    finally:
        found.close()
    return plan.version if plan else None


async def test_a_committed_checkpoint_outlives_a_power_cut(run: Any, tmp_path: Path, monkeypatch: Patch) -> None:
    assert await version_after_power_cut(run, tmp_path, monkeypatch) == 1


def the_journal_is_not_synced(patch: Patch) -> None:
    patch.setattr(FileStore, "sync", lambda store: None)


def the_manifest_is_not_synced(patch: Patch) -> None:
    def put(store: FileStore, folder: str, file: str, data: bytes) -> None:
        (store.checkpoints / folder / file).write_bytes(data)

    patch.setattr(FileStore, "put", put)


def the_folder_is_not_synced_before_its_rename(patch: Patch) -> None:
    only_syncs(patch, lambda path: not path.name.isdecimal() and not path.name.startswith("tmp-"))


def the_rename_is_not_synced(patch: Patch) -> None:
    only_syncs(patch, lambda path: path.name != "checkpoints")


def the_run_directory_is_not_synced(patch: Patch) -> None:
    only_syncs(patch, lambda path: path.name != "run")


def only_syncs(patch: Patch, wanted: Callable[[Path], bool]) -> None:
    whole = run_storage._sync_directory
    patch.setattr(run_storage, "_sync_directory", lambda path: whole(path) if wanted(path) else None)


MUTANTS = (
    the_journal_is_not_synced,
    the_manifest_is_not_synced,
    the_folder_is_not_synced_before_its_rename,
    the_rename_is_not_synced,
    the_run_directory_is_not_synced,
)


@pytest.mark.parametrize("mutant", MUTANTS)
async def test_each_fsync_of_the_store_is_needed(
    mutant: Callable[[Patch], None], run: Any, tmp_path: Path, monkeypatch: Patch
) -> None:
    mutant(monkeypatch)
    assert await version_after_power_cut(run, tmp_path, monkeypatch) != 1

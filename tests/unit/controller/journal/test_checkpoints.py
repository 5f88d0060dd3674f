"""A run killed at any point of a checkpoint goes on from a good one; damaged ones are passed over, aloud."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.controller.gate.group_state import IN_FLIGHT, OPEN, Stage
from asyncrl.controller.journal.audit import Audit
from asyncrl.controller.journal.checkpoints import commit, plan_resume, read_manifest, resume, versions
from asyncrl.controller.journal.journal import Scan
from asyncrl.controller.journal.ledger import AttemptStarted, CheckpointMade, Drawn, Generated, Scored, Trained
from asyncrl.controller.journal.run_storage import FileStore, MemoryStore, run_lock
from asyncrl.errors import ConfigError, JournalError, RemoteError
from asyncrl.protocols.messages import Checkpointed
from tests import golden
from tests.commit_faults import FAULT_POINTS
from tests.unit.controller.journal.saga import Saga, planned


class Killed(Exception):
    """The process ends here."""


@pytest.fixture
def saga() -> Saga:
    return Saga()


def killer(store: MemoryStore, point: str) -> Any:
    def fault(reached: str) -> None:
        if reached == point:
            store.freeze()
            raise Killed

    return fault


@pytest.mark.parametrize("power_cut", [False, True])
@pytest.mark.parametrize("point", FAULT_POINTS)
@pytest.mark.parametrize("first", [False, True])
async def test_killed_at_any_point_a_run_goes_on(saga: Saga, point: str, power_cut: bool, first: bool) -> None:
    if not first:
        await saga.with_checkpoints(2)
        saga.train()
    with pytest.raises(Killed):
        await saga.checkpoint(fault=killer(saga.store, point))
    found = saga.store.after_power_cut() if power_cut else saga.store.after_death()
    plan = plan_resume(found)
    committed = point in FAULT_POINTS[FAULT_POINTS.index("renamed") :]
    if first and not committed:
        assert plan is None
        return
    assert plan is not None
    assert plan.version == (0 if first else 3 if committed else 2)
    assert plan.said == ()
    journal = resume(found, plan)
    assert (journal.ledger.incarnation, journal.ledger.version) == (1, plan.version)
    assert not [name for name in found.folders() if name.startswith("tmp-")]
    assert Audit(found).ok


def writing(saga: Saga, ready: Any = (), error: Exception | None = None, chain: str = "", draws: bool = False) -> Any:
    """Returns what writes a checkpoint as the saga does, but for what is given."""

    async def write(directory: str) -> Checkpointed:
        if draws:
            saga.journal.append(saga.history.draw())
        made = await saga.write(directory)
        if error is not None:
            raise error
        return replace(made, ready=tuple(ready), chain=chain or made.chain)

    return write


@pytest.mark.parametrize("error", [OSError(28, "full"), RemoteError("SafetensorError", "full", "training", 0, "")])
async def test_what_a_full_disk_left_of_a_checkpoint_goes_at_once(saga: Saga, error: Exception) -> None:
    """It takes the room that everything else needs, and the one before is as good as it was."""
    await saga.checkpoint()
    saga.train()
    with pytest.raises(type(error)):
        await commit(saga.journal, writing(saga, error=error), 2)
    assert saga.store.folders() == ["0"]
    assert planned(saga.store.after_death()).version == 0


async def test_what_was_recorded_after_a_checkpoint_is_void(saga: Saga) -> None:
    await saga.with_checkpoints(1)
    flying = saga.journal.ledger.in_flight()
    drawn = saga.journal.ledger.next_group
    saga.train(2)
    plan = planned(saga.store.after_death())
    assert (plan.incarnation, plan.version, plan.ledger.next_group) == (1, 1, drawn)
    assert tuple((group.id, group.members(*IN_FLIGHT)) for group in plan.ledger.groups.values()) == flying


async def test_records_that_come_while_the_trainer_writes_lie_behind_the_checkpoint(saga: Saga) -> None:
    await saga.checkpoint()
    offset = saga.journal.offset
    saga.train()
    before = saga.journal.ledger.next_group
    await commit(saga.journal, writing(saga, draws=True), 2)
    plan = planned(saga.store.after_death())
    assert plan.ledger.next_group == before
    assert offset < plan.offset < saga.journal.offset


DAMAGES = ("digest", "file", "manifest", "json", "chain", "prefix")


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_checkpoint_is_passed_over_aloud(saga: Saga, damage: str) -> None:
    await saga.with_checkpoints(2)
    hurt(saga.store, "2", damage)
    plan = planned(saga.store)
    assert plan.version == 1
    (said,) = plan.said
    assert said.startswith("checkpoint 2 cannot be used: ")
    if damage != "json":  # Its sentence is Python's.
        golden.says(said)
    resume(saga.store, plan)
    assert versions(saga.store) == [1]
    assert "refused-2" in saga.store.folders()


def hurt(store: MemoryStore, folder: str, damage: str) -> None:
    if damage == "digest":
        store.put(folder, "model.bin", b"other weights")
    elif damage in ("file", "manifest"):
        del store._folders[folder]["model.bin" if damage == "file" else "manifest.json"]
    elif damage == "json":
        store.put(folder, "manifest.json", b"{")
    elif damage == "chain":
        change_manifest(store, folder, lambda fields: {**fields, "chain": "0" * 64})
    else:
        change_manifest(store, folder, lambda fields: {**fields, "crc": fields["crc"] ^ 1})


def change_manifest(store: MemoryStore, folder: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    store.put(folder, "manifest.json", json.dumps(change(json.load(store.open(folder, "manifest.json")))).encode())


async def test_a_checkpoint_of_an_older_version_is_taken_up(saga: Saga) -> None:
    """Its manifest says epoch, and lists no saved rows."""
    await saga.with_checkpoints(1)
    plan = plan_resume(saga.store)
    change_manifest(
        saga.store,
        "1",
        lambda fields: {"epoch" if name == "incarnation" else name: fields[name] for name in fields if name != "ready"},
    )
    assert plan_resume(saga.store) == plan
    assert planned(saga.store).ready == ()


async def test_a_manifest_lists_the_samples_whose_rows_were_saved_and_a_resume_restores_these(saga: Saga) -> None:
    await saga.checkpoint()
    ledger = saga.journal.ledger
    for group in range(3):
        saga.journal.append(Drawn(group, 0, 2))
        saga.journal.append(Generated(group, 0, ((0, 0, 0, 3), (1, 0, 0, 3))))
    for key in ((0, 0), (1, 0), (1, 1)):
        saga.journal.append(Scored(*key, 1.0))
    saga.journal.append(Drawn(3, 0, 2))
    saga.journal.append(AttemptStarted(3, 1, (1,), "a worker died"))
    saga.store.remove("0")
    ready = [(group.id, m) for group in ledger.groups.values() for m in group.members(Stage.READY)]
    others = [(group.id, m) for group in ledger.groups.values() for m in group.members(*OPEN)]
    rows = ((*key, 0) for key in (*ready, *others))
    manifest = await commit(saga.journal, writing(saga, rows), 2)
    assert read_manifest(saga.store, manifest.version) == manifest
    assert {(group, m) for group, members in manifest.ready for m in members} == {*ready, *others}
    plan = planned(saga.store.after_death())
    assert [(group, m) for group, members in plan.ready for m in members] == sorted(ready)
    assert plan.restorable(whole_groups=True).waiting == ((1, (0, 1)),)
    assert plan.restorable(whole_groups=False).waiting == plan.ready
    assert plan.restorable(whole_groups=True).answered == ((3, 0, 0), (3, 1, 1)), "episodes, by attempt"
    journal = resume(saga.store, plan, plan.ready)
    assert {(g.id, m) for g in journal.ledger.groups.values() for m in g.members(Stage.READY)} == set(ready)
    assert Audit(saga.store).ok


async def test_no_sample_of_a_later_version_than_the_checkpoint_is_restored(saga: Saga) -> None:
    await saga.checkpoint()
    saga.journal.append(Drawn(drawn := saga.journal.ledger.next_group, 0, 2))
    saga.journal.append(Generated(drawn, 0, ((0, 0, 0, 3), (1, 0, 1, 3))))
    for member in (0, 1):
        saga.journal.append(Scored(drawn, member, 1.0))
    saga.store.remove("0")
    await commit(saga.journal, writing(saga, ((drawn, 0, 0), (drawn, 1, 0))), 2)
    assert planned(saga.store.after_death()).ready == ((drawn, (0,)),), "version 1 belongs to a future that is lost"


async def test_a_run_without_any_good_checkpoint_says_why(saga: Saga) -> None:
    await saga.with_checkpoints(1)
    for folder in ("0", "1"):
        hurt(saga.store, folder, "digest")
    with golden.raises(JournalError):
        plan_resume(saga.store)


@pytest.mark.parametrize("at_its_last_byte", [False, True])
async def test_a_checkpoint_of_a_history_that_became_void_is_never_used(saga: Saga, at_its_last_byte: bool) -> None:
    """Also where the resume begins at its last byte: the controller died before it wrote down that it was made."""
    await saga.with_checkpoints(1)
    saga.train()
    if at_its_last_byte:
        with pytest.raises(Killed):
            await saga.checkpoint(fault=killer(saga.store, "renamed"))
    else:
        await saga.checkpoint()
    store = saga.store.after_death()
    kept = dict(store._folders["2"])
    offset = store.size
    hurt(store, "2", "digest")
    journal = resume(store, planned(store))
    if at_its_last_byte:
        with pytest.raises(JournalError, match="had become void"):
            journal.resume(2, offset)
    store._folders["2"] = kept
    found = planned(store)
    assert found.version == 1
    assert "taken up again from an earlier point" in found.said[0]


async def test_the_oldest_go_and_the_newest_stay(saga: Saga) -> None:
    await saga.with_checkpoints(4)
    assert versions(saga.store) == [3, 4]
    await saga.checkpoint(keep=1)
    hints = [f.record for f in Scan(saga.store) if isinstance(f.record, CheckpointMade)]
    assert [hint.version for hint in hints] == [0, 1, 2, 3, 4], "a version is written once"


async def test_resumed_twice_from_one_checkpoint_the_incarnation_rises(saga: Saga) -> None:
    await saga.with_checkpoints(1)
    store = saga.store
    for incarnation in (1, 2, 3):
        plan = planned(store)
        assert (plan.incarnation, plan.version) == (incarnation, 1)
        resume(store, plan)
    assert Audit(store).ledger.incarnation == 3
    assert Audit(store).ok


async def test_a_trainer_at_another_state_is_refused(saga: Saga) -> None:
    await saga.checkpoint()
    saga.train()
    with pytest.raises(JournalError, match="chain 0000"):
        await commit(saga.journal, writing(saga, chain="0" * 64), 2)
    assert versions(saga.store) == [0]


async def test_on_disk_a_run_is_found_again(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    saga = await Saga(4, store).with_checkpoints(2)
    saga.train()
    trained = [f.record for f in Scan(store) if isinstance(f.record, Trained)]
    store.append(b"\0\0\1\0torn")
    store.close()
    again = FileStore(tmp_path)
    plan = planned(again)
    assert (plan.version, plan.directory) == (2, str(tmp_path / "checkpoints" / "2"))
    journal = resume(again, plan)
    assert journal.torn == 8
    assert len(trained) == 3
    assert (Audit(again).ok, Audit(again).ledger.version) == (True, 2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "2"]
    again.close()


def test_one_process_works_in_a_run_directory(tmp_path: Path) -> None:
    with run_lock(tmp_path), pytest.raises(ConfigError, match=r"is in use by process \d+"), run_lock(tmp_path):
        pass
    with run_lock(tmp_path):
        pass


async def test_a_spared_checkpoint_outlives_the_rotation(saga: Saga) -> None:
    for _ in range(5):
        await commit(saga.journal, saga.write, 1, lambda made: {1})
        saga.train()
    assert versions(saga.store) == [1, 4]
    assert planned(saga.store.after_death()).version == 4, "a resume goes on from the newest one"

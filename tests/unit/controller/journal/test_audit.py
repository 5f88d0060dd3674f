"""Each witness fails by itself when what it saw is corrupted."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.controller.journal.audit import Audit, audit
from asyncrl.controller.journal.checkpoints import commit
from asyncrl.controller.journal.journal import Journal, Scan, encode
from asyncrl.controller.journal.ledger import AttemptStarted, Drawn, InFlight, Record, Trained
from asyncrl.controller.journal.run_storage import FileStore, MemoryStore
from asyncrl.errors import ConfigError

WAYS, LISTS, CHAINS = range(3)
Change = Callable[[list[Record]], list[Record]]


async def recorded(run: Any, trainer: Any, store: Any) -> Journal:
    """A run with a checkpoint after each of three iterations, resumed at the end."""
    journal = Journal(store)
    history = run(2)
    writer = trainer(store, lambda: journal.ledger)
    await commit(journal, writer.write, 9)
    while history.version < 3:
        journal.append(history.step())
        if isinstance(history.records[-1], Trained):
            await commit(journal, writer.write, 9)
    for record in (history.step() for _ in range(10)):
        journal.append(record)
    return journal


async def audited(run: Any, trainer: Any, change: Change) -> Audit:
    """The audit of a run whose records were changed afterwards; checkpoints, made of other bytes, are taken away."""
    store = MemoryStore()
    forged = MemoryStore()
    await recorded(run, trainer, store)
    for record in change([framed.record for framed in Scan(store)]):
        forged.append(encode(record))
    return Audit(forged)


def failing(report: Audit) -> list[int]:
    return [index for index, witness in enumerate(report.witnesses) if witness.failures]


def first_of(records: list[Record], kind: type[Record], skip: int = 0) -> int:
    return [index for index, record in enumerate(records) if isinstance(record, kind)][skip]


async def test_an_honest_run_holds(run: Any, trainer: Any) -> None:
    store = MemoryStore()
    journal = await recorded(run, trainer, store)
    journal.resume(1, journal.offset)
    report = Audit(store)
    assert report.ok
    ledger = report.ledger
    assert (ledger.version, ledger.incarnation) == (3, 1)
    assert ledger.drawn == ledger.trained + sum(ledger.dropped.values()) + ledger.samples_in_flight
    assert all(witness.checked > 3 for witness in report.witnesses)
    assert str(report).count(": holds (") == 3


def skip_an_id(records: list[Record]) -> list[Record]:
    index = first_of(records, Drawn, 2)
    drawn = records[index]
    assert isinstance(drawn, Drawn)
    return [*records[:index], replace(drawn, group=drawn.group + 1), *records[index + 1 :]]


def train_twice(records: list[Record]) -> list[Record]:
    first = first_of(records, Trained)
    second = first_of(records, Trained, 1)
    one = records[first]
    two = records[second]
    assert isinstance(one, Trained)
    assert isinstance(two, Trained)
    return [*records[:second], replace(two, cuts=one.cuts), *records[second + 1 :]]


def repeat_an_attempt(records: list[Record]) -> list[Record]:
    index = first_of(records, AttemptStarted)
    return [*records[: index + 1], *records[index:]]


def forget_one_in_flight(records: list[Record]) -> list[Record]:
    index = first_of(records, InFlight, 2)
    listed = records[index]
    assert isinstance(listed, InFlight)
    return [*records[:index], InFlight(listed.groups[1:]), *records[index + 1 :]]


def lie_in_the_chain(records: list[Record]) -> list[Record]:
    index = first_of(records, Trained, 1)
    trained = records[index]
    assert isinstance(trained, Trained)
    return [*records[:index], replace(trained, chain="ab" * 32), *records[index + 1 :]]


@pytest.mark.parametrize(
    ("change", "witness", "message"),
    [
        (skip_an_id, WAYS, r"byte \d+: group 3 was drawn; the next one is 2"),
        (train_twice, WAYS, r"trained or dropped before"),
        (repeat_an_attempt, WAYS, r"attempts rise"),
        (forget_one_in_flight, LISTS, r"and lacks \[\(\d+, \(.*\)\)\]"),
        (lie_in_the_chain, CHAINS, r"version 2: the trainer's chain is abababab"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_each_witness_sees_its_corruption(
    run: Any, trainer: Any, change: Change, witness: int, message: str
) -> None:
    report = await audited(run, trainer, change)
    assert not report.ok
    assert failing(report) == [witness]
    assert str(report).count(": FAILS, ") == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(report.witnesses[witness].failures[0])


async def test_a_manifest_that_lies_about_the_trainer_is_seen(run: Any, trainer: Any) -> None:
    store = MemoryStore()
    await recorded(run, trainer, store)
    fields = json.load(store.open("2", "manifest.json"))
    store.put("2", "manifest.json", json.dumps(fields | {"chain": "cd" * 32}).encode())
    report = Audit(store)
    assert failing(report) == [CHAINS]
    assert report.witnesses[CHAINS].failures[0].startswith("checkpoint 2: the trainer's chain is cdcdcdcd")


async def test_a_journal_changed_under_its_checkpoints_is_seen(run: Any, trainer: Any) -> None:
    store = MemoryStore()
    await recorded(run, trainer, store)
    fields = json.load(store.open("1", "manifest.json"))
    store.put("1", "manifest.json", json.dumps(fields | {"crc": 0}).encode())
    assert failing(Audit(store)) == [WAYS]


async def test_damage_inside_fails_and_a_torn_tail_is_a_note(run: Any, trainer: Any) -> None:
    store = MemoryStore()
    journal = await recorded(run, trainer, store)
    report = Audit(store.after_power_cut(journal.offset - 3))
    assert report.ok
    assert "unfinished record" in report.notes[0]
    store._journal[journal.offset // 2] ^= 1
    report = Audit(store)
    assert any("is damaged, and valid records follow" in failure for failure in report.witnesses[WAYS].failures)


async def test_a_run_directory_is_audited_and_left_alone(run: Any, trainer: Any, tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    await recorded(run, trainer, store)
    store.close()
    before = (tmp_path / "journal").read_bytes()
    assert audit(tmp_path).ok
    assert (tmp_path / "journal").read_bytes() == before
    with pytest.raises(ConfigError, match="holds no journal"):
        audit(tmp_path / "elsewhere")

"""Each witness fails by itself when what it saw is corrupted."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.controller.journal.audit import Audit, audit
from asyncrl.controller.journal.journal import Scan, encode
from asyncrl.controller.journal.ledger import AttemptStarted, Drawn, InFlight, Record, Trained
from asyncrl.controller.journal.run_storage import FileStore, MemoryStore
from asyncrl.errors import ConfigError
from tests.unit.controller.journal.saga import Saga

WAYS, LISTS, CHAINS = range(3)
Change = Callable[[list[Any], Any], list[Record]]


async def recorded(store: Any = None) -> Saga:
    """A run with a checkpoint after each of three iterations, and some records behind the last one."""
    saga = await Saga(2, store).with_checkpoints(3, keep=9)
    saga.go(10)
    return saga


def failing(report: Audit) -> list[int]:
    return [index for index, witness in enumerate(report.witnesses) if witness.failures]


async def test_an_honest_run_holds() -> None:
    journal = (await recorded()).journal
    journal.resume(1, journal.offset)
    report = Audit(journal.store)
    assert report.ok
    ledger = report.ledger
    assert (ledger.version, ledger.incarnation) == (3, 1)
    assert ledger.drawn == ledger.trained + sum(ledger.dropped.values()) + ledger.samples_in_flight
    assert all(witness.checked > 3 for witness in report.witnesses)
    assert str(report).count(": holds (") == 3


def first(records: list[Any], kind: type[Record], skip: int = 0) -> int:
    return [index for index, record in enumerate(records) if isinstance(record, kind)][skip]


CORRUPTIONS: dict[str, tuple[type[Record], int, Callable[[Any, list[Any]], list[Record]], int, str]] = {
    "skip an id": (
        Drawn,
        2,
        lambda drawn, _: [replace(drawn, group=drawn.group + 1)],
        WAYS,
        r"byte \d+: group 3 was drawn; the next one is 2",
    ),
    "train twice": (
        Trained,
        1,
        lambda trained, records: [replace(trained, cuts=records[first(records, Trained)].cuts)],
        WAYS,
        "trained or dropped before",
    ),
    "repeat an attempt": (AttemptStarted, 0, lambda started, _: [started, started], WAYS, "attempts rise"),
    "forget one in flight": (
        InFlight,
        2,
        lambda listed, _: [InFlight(listed.groups[1:])],
        LISTS,
        r"and lacks \[\(\d+, \(.*\)\)\]",
    ),
    "lie in the chain": (
        Trained,
        1,
        lambda trained, _: [replace(trained, chain="ab" * 32)],
        CHAINS,
        "version 2: the trainer's chain is abababab",
    ),
}
"""The record of which kind, by number, is changed to what; the witness that sees it, and what it says."""


@pytest.mark.parametrize(("kind", "skip", "change", "witness", "message"), CORRUPTIONS.values(), ids=CORRUPTIONS)
async def test_each_witness_sees_its_corruption(
    kind: type[Record], skip: int, change: Any, witness: int, message: str
) -> None:
    """Checkpoints, made of other bytes, are taken away."""
    records = [framed.record for framed in Scan((await recorded()).store)]
    index = first(records, kind, skip)
    forged = MemoryStore()
    for record in (*records[:index], *change(records[index], records), *records[index + 1 :]):
        forged.append(encode(record))
    report = Audit(forged)
    assert not report.ok
    assert failing(report) == [witness]
    assert str(report).count(": FAILS, ") == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(report.witnesses[witness].failures[0])


@pytest.mark.parametrize(
    ("version", "change", "witness", "says"),
    [
        ("2", {"chain": "cd" * 32}, CHAINS, "checkpoint 2: the trainer's chain is cdcdcdcd"),
        ("1", {"crc": 0}, WAYS, "the journal no longer begins with what checkpoint 1 was made after"),
    ],
)
async def test_a_manifest_that_lies_or_a_journal_changed_under_it_is_seen(
    version: str, change: dict[str, Any], witness: int, says: str
) -> None:
    store = (await recorded()).store
    fields = json.load(store.open(version, "manifest.json"))
    store.put(version, "manifest.json", json.dumps(fields | change).encode())
    report = Audit(store)
    assert failing(report) == [witness]
    assert report.witnesses[witness].failures[0].startswith(says)


async def test_damage_inside_fails_and_a_torn_tail_is_a_note() -> None:
    saga = await recorded()
    report = Audit(saga.store.after_power_cut(saga.journal.offset - 3))
    assert report.ok
    assert "unfinished record" in report.notes[0]
    saga.store._journal[saga.journal.offset // 2] ^= 1
    report = Audit(saga.store)
    assert any("is damaged, and valid records follow" in failure for failure in report.witnesses[WAYS].failures)


async def test_a_run_directory_is_audited_and_left_alone(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    await recorded(store)
    store.close()
    before = (tmp_path / "journal").read_bytes()
    assert audit(tmp_path).ok
    assert (tmp_path / "journal").read_bytes() == before
    with pytest.raises(ConfigError, match="holds no journal"):
        audit(tmp_path / "elsewhere")

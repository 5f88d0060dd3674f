"""A damaged record with valid ones behind it is refused, and a torn tail is cut: every byte of a journal in turn."""

import asyncio
import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.controller.journal.audit import Audit
from asyncrl.controller.journal.checkpoints import commit, plan_resume, resume
from asyncrl.controller.journal.journal import Journal, encode
from asyncrl.controller.journal.ledger import Drawn, Generated, Record
from asyncrl.controller.journal.run_storage import FileStore, MemoryStore
from asyncrl.errors import JournalError
from asyncrl.protocols.messages import Checkpointed
from tests import golden
from tests.instruction_count import counting
from tests.unit.controller.journal.saga import Run, Saga, planned


def stored(records: list[Record]) -> tuple[MemoryStore, list[int]]:
    """A store with these records, and where each begins."""
    store = MemoryStore()
    starts = []
    for record in records:
        starts.append(store.size)
        store.append(encode(record))
    return store, starts


def of_bytes(data: bytes) -> MemoryStore:
    store = MemoryStore()
    store.append(data)
    return store


@pytest.mark.parametrize("change", [0x01, 0x80, 0xFF])
def test_a_flip_of_any_byte_is_refused_unless_only_the_last_record_has_it(change: int) -> None:
    records = Run(4).go(12).records
    whole, starts = stored(records)
    before = bytes(whole.contents())
    for place in range(len(before)):
        number = max(index for index, start in enumerate(starts) if start <= place)
        damaged = of_bytes(before[:place] + bytes([before[place] ^ change]) + before[place + 1 :])
        content = bytes(damaged.contents())
        if number == len(records) - 1:
            assert Journal(damaged).offset == damaged.size == starts[-1]
            continue
        for opened in (Journal, plan_resume):
            with pytest.raises(JournalError) as refused:
                opened(damaged)
            assert f"record {number + 1} of the journal, at byte {starts[number]}, is damaged" in str(refused.value)
            assert f"from byte {starts[number + 1]} on" in str(refused.value)
        assert bytes(damaged.contents()) == content, "the file is kept"


@settings(max_examples=100)
@given(seed=st.integers(0, 10**9), where=st.floats(0, 1), junk=st.binary(min_size=1, max_size=300))
def test_bytes_written_over_a_journal_are_refused_where_records_follow(seed: int, where: float, junk: bytes) -> None:
    records = Run(seed).go(30).records
    store, starts = stored(records)
    before = bytes(store.contents())
    place = int(where * len(before))
    after = (before[:place] + junk + before[place + len(junk) :])[: max(len(before), place + len(junk))]
    changed = [at for at in range(len(before)) if after[at] != before[at]]
    first, last = (changed[0], changed[-1]) if changed else (len(before), len(before))
    damaged = of_bytes(after)
    if last < starts[-1]:
        with pytest.raises(JournalError, match="is damaged, and valid records follow"):
            Journal(damaged)
        assert bytes(damaged.contents()) == after
    else:
        whole = max([0, *(end for end in (*starts, len(before)) if end <= first)])
        assert Journal(damaged).offset == damaged.size == whole


@pytest.mark.parametrize("tail", [bytes(1), bytes(8), bytes(4096)])
def test_zeros_at_the_end_are_a_torn_tail(tail: bytes) -> None:
    """A file system may have made the file longer before it wrote the bytes."""
    store, _ = stored(Run(4).go(12).records)
    size = store.size
    store.append(tail)
    assert Audit(store).ok
    assert Journal(store).torn == len(tail)
    assert store.size == size


async def damaged_run(folder: Path, *, before_last: bool) -> FileStore:
    """A run with checkpoints 0, 1 and 2, damaged before or behind the newest one."""
    saga = Saga(2, FileStore(folder))
    await saga.with_checkpoints(2, keep=9)
    newest = saga.journal.offset
    saga.go(5)
    content = bytearray((folder / "journal").read_bytes())
    content[newest - 300 if before_last else newest + 10] ^= 0x10
    (folder / "journal").write_bytes(content)
    return saga.store


@pytest.mark.parametrize(("before_last", "reached"), [(True, 1), (False, 2)])
async def test_what_the_error_advises_leads_back_into_the_run(tmp_path: Path, before_last: bool, reached: int) -> None:
    store = await damaged_run(tmp_path, before_last=before_last)
    content = (tmp_path / "journal").read_bytes()
    with golden.raises(JournalError, match=f"step {reached}") as refused:
        plan_resume(store)
    assert (tmp_path / "journal").read_bytes() == content
    assert str(refused.value) in str(Audit(store))
    command = str(refused.value).split("`")[1]
    assert await (await asyncio.create_subprocess_shell(command)).wait() == 0
    assert (tmp_path / "journal.damaged").read_bytes() == content
    plan = planned(store)
    assert plan.version == reached
    assert resume(store, plan).ledger.incarnation == 1
    assert Audit(store).ok
    store.close()


async def test_no_shortening_is_advised_that_leads_to_no_checkpoint(tmp_path: Path) -> None:
    store = await damaged_run(tmp_path, before_last=True)
    for gone in ("01", "2"):
        for version in gone:
            store.remove(version)
        with golden.raises(JournalError) as refused:
            plan_resume(store)
        assert "truncate" not in str(refused.value)
    store.close()


# ---- what reading and writing cost ---------------------------------------------------------------------------


class CountingStore(MemoryStore):
    """Counts how often the journal is read."""

    def __init__(self) -> None:
        super().__init__()
        self.readings = 0

    def contents(self) -> memoryview:
        self.readings += 1
        return super().contents()


async def test_a_resume_and_an_audit_read_the_journal_once() -> None:
    saga = Saga(2, store := CountingStore())
    await saga.with_checkpoints(3, keep=9)
    store.readings = 0
    resume(store, planned(store))
    assert store.readings == 1
    assert Audit(store).ok
    assert store.readings == 2


def test_the_audit_takes_as_many_operations_a_record_with_many_samples_in_flight() -> None:
    few, many = (operations_of_an_audit(groups) for groups in (10, 1000))
    assert many < 1.2 * few


def operations_of_an_audit(groups: int) -> float:
    """Instructions of Python for each of the last 500 records of a journal with this many groups of 4 in flight."""
    records: list[Record] = [Drawn(group, 0, 4) for group in range(groups)]
    records += [Generated(group % groups, 0, ((group // groups, 0, 0, 5),)) for group in range(min(500, 4 * groups))]
    made = []
    for some in (records, records[:groups]):
        store, _ = stored(some)
        with counting() as count:
            Audit(store)
        made.append(count.instructions)
    return (made[0] - made[1]) / (len(records) - groups)


async def test_the_loop_turns_while_a_commit_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    made = list[str]()
    stopped = list[str]()

    def until_the_loop_turned(module: Any, name: str) -> None:
        whole = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            turned = threading.Event()
            loop.call_soon_threadsafe(turned.set)
            made.append(name)
            if not stopped and not turned.wait(20.0):
                stopped.append(name)
            return whole(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    saga = Saga(2, FileStore(tmp_path))
    for module, name in ((os, "fsync"), (os, "fdatasync"), (shutil, "rmtree")):
        until_the_loop_turned(module, name)

    async def write(directory: str) -> Checkpointed:
        return saga.answer({})

    for _ in range(3):
        await commit(saga.journal, write, 1)
        saga.train()
    saga.store.close()
    assert {"fsync", "fdatasync", "rmtree"} <= set(made)
    assert stopped == []


async def test_a_cancelled_caller_waits_for_the_end_of_its_write(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    began = threading.Event()
    may_end = threading.Event()
    ended = threading.Event()

    def work() -> None:
        began.set()
        may_end.wait(10.0)
        ended.set()

    caller = asyncio.create_task(store.run(work))
    await asyncio.to_thread(began.wait, 10.0)
    caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()
    store.close()


def test_what_a_full_disk_took_of_a_record_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)
    whole = os.write
    left = [3]
    store.append(b"before")

    def write(descriptor: int, data: Any) -> int:
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(descriptor, bytes(data)[: left.pop()])

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space left"):
        store.append(b"a record")
    assert (tmp_path / "journal").read_bytes() == b"before"
    store.close()

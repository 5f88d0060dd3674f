"""Copies of runs in a store in memory: what a machine that dies, another writer, and damage leave behind."""

import asyncio
import shutil
import threading
from collections.abc import Awaitable, Callable
from hashlib import sha256
from pathlib import Path

import pytest

from asyncrl.controller.journal import run_copy
from asyncrl.controller.journal.run_copy import (
    Head,
    MemoryObjects,
    OtherWriter,
    Snapshot,
    Uploads,
    brought,
    download,
    head_of,
    remove_unnamed,
    upload,
    uploading,
    write_mark,
    writers_of,
)
from asyncrl.controller.journal.run_storage import run_lock
from asyncrl.errors import ConfigError, FleetFailed, JournalError
from asyncrl.simulation import virtual_loop


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_copy, "PART_BYTES", 10)
    folder = tmp_path / "run"
    for name, text in (
        ("config.toml", "seed = 1"),
        ("run.id", "cafe"),
        ("journal", "0123456789" * 3),
        ("metrics.jsonl", "{}\n"),
        ("model/config.json", "{}"),
        ("join_keys/controller.key", "secret"),
        ("logs/x.out", "log"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    checkpoint(folder, 0)
    return folder


def checkpoint(run_dir: Path, version: int) -> None:
    folder = run_dir / "checkpoints" / str(version)
    folder.mkdir(parents=True)
    (folder / "trainer.pt").write_text(f"weights of version {version}")


def copied(objects: MemoryObjects, run_dir: Path, version: int, writer: str = "one") -> None:
    head, tag = head_of(objects, run_dir)
    write_mark(run_dir, [*writers_of(run_dir), writer])
    snapshot = Snapshot.take(run_dir, version)
    made, _ = upload(objects, snapshot, head, tag, writer)
    snapshot.release()
    if head is not None:
        remove_unnamed(objects, head, made)


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_what_was_copied_comes_back_without_keys_and_logs(run_dir: Path, tmp_path: Path) -> None:
    objects = MemoryObjects()
    copied(objects, run_dir, 0)
    assert brought(objects, tmp_path / "elsewhere") is not None
    there = contents(tmp_path / "elsewhere")
    here = contents(run_dir)
    assert there == {name: text for name, text in here.items() if not name.startswith(("join_keys", "logs"))} | {
        "copied.json": '{"writers": ["one"]}\n'
    }
    assert not any(b"secret" in data for data in objects.objects.values())
    assert not list(run_dir.glob("copying/*"))


def test_only_new_parts_are_sent_and_those_of_no_head_are_removed(run_dir: Path) -> None:
    objects = MemoryObjects()
    copied(objects, run_dir, 0)
    before = set(objects.objects)
    with (run_dir / "journal").open("a") as journal:
        journal.write("more")
    checkpoint(run_dir, 1)
    shutil.rmtree(run_dir / "checkpoints" / "0")
    copied(objects, run_dir, 1)
    assert objects.head is not None
    head = Head.decode(objects.head, objects.address)
    assert head.version == 1
    assert {name.removeprefix("objects/") for name in objects.objects if name != "head"} == head.parts
    assert len(set(objects.objects) - before) == 2, "the ends of the journal and of the weights"


def test_a_machine_that_dies_before_the_head_leaves_the_run_of_the_head_before(run_dir: Path, tmp_path: Path) -> None:
    objects = MemoryObjects()
    copied(objects, run_dir, 0)
    checkpoint(run_dir, 1)
    objects.failing = {"head"}
    with pytest.raises(OSError, match="did not take head"):
        copied(objects, run_dir, 1)
    head = brought(objects, tmp_path / "elsewhere")
    assert head is not None
    assert head.version == 0
    assert (tmp_path / "elsewhere/checkpoints/0/trainer.pt").read_text() == "weights of version 0"


def test_a_second_writer_is_refused_and_changes_nothing(run_dir: Path, tmp_path: Path) -> None:
    objects = MemoryObjects()
    copied(objects, run_dir, 0)
    other = tmp_path / "other"
    brought(objects, other)
    checkpoint(other, 1)
    copied(objects, other, 1, "two")
    checkpoint(run_dir, 1)
    with pytest.raises(OtherWriter, match="holds step 1 of a run that is not in"):
        copied(objects, run_dir, 1)
    with pytest.raises(OtherWriter, match="written by another run"):
        upload(objects, Snapshot.take(run_dir, 1), None, "an old tag", "one")
    assert objects.head is not None
    assert Head.decode(objects.head, objects.address).writer == "two"


def test_a_run_that_went_on_elsewhere_takes_the_place_of_the_one_here(run_dir: Path, tmp_path: Path) -> None:
    objects = MemoryObjects()
    copied(objects, run_dir, 0)
    brought(objects, other := tmp_path / "other")
    checkpoint(other, 1)
    copied(objects, other, 1, "two")
    brought(objects, run_dir)
    assert (run_dir / "checkpoints/1").exists()
    (aside,) = tmp_path.glob("run.before-*")
    assert (aside / "join_keys").exists()


def test_a_run_that_was_never_copied_there_is_not_moved(run_dir: Path, tmp_path: Path) -> None:
    objects = MemoryObjects()
    copied(objects, run_dir, 0)
    (run_dir / "copied.json").unlink()
    with pytest.raises(ConfigError, match="holds another run than"):
        brought(objects, run_dir)
    assert (run_dir / "config.toml").exists()
    assert brought(MemoryObjects(), tmp_path / "none") is None


@pytest.mark.parametrize(("damage", "why"), [(b"other", "is damaged"), (None, "is gone")])
def test_parts_that_are_damaged_or_gone_are_found_and_leave_no_folder(
    damage: bytes | None, why: str, run_dir: Path, tmp_path: Path
) -> None:
    objects = MemoryObjects()
    copied(objects, run_dir, 0)
    name = next(name for name, data in objects.objects.items() if data == b"seed = 1")
    objects.remove([name])
    if damage is not None:
        objects.objects[name] = damage
    with pytest.raises(JournalError, match=f"a part of config.toml {why}"):
        brought(objects, tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"[]",
        b"{}",
        b'{"format": 2, "version": 0, "writer": "x", "files": {}}',
        b'{"format": 1, "version": 0, "writer": "x", "files": {"a": 1}}',
        b'{"format": 1, "version": 0, "writer": "x", "files": {"../a": {"size": 0, "parts": []}}}',
        b'{"format": 1, "version": 0, "writer": "x", "files": {"/etc/a": {"size": 0, "parts": []}}}',
        b'{"format": 1, "version": 0, "writer": "x", "files": {"a\\u0000": {"size": 0, "parts": []}}}',
        b'{"format": 1, "version": 0, "writer": "x", "files": {"\\ud800": {"size": 0, "parts": []}}}',
        b'{"format": 1, "version": 1e999, "writer": "x", "files": {}}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_head_is_refused(head: bytes, tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="memory://run"):
        brought(MemoryObjects(head=head), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_head_with_a_wrong_size_is_refused(run_dir: Path, tmp_path: Path) -> None:
    objects = MemoryObjects()
    copied(objects, run_dir, 0)
    assert objects.head is not None
    objects.head = objects.head.replace(b'"size": 30', b'"size": 31')
    with pytest.raises(JournalError, match="journal has 30 bytes, and its head says 31"):
        download(objects, Head.decode(objects.head, objects.address), tmp_path / "elsewhere")


def played(objects: MemoryObjects, run_dir: Path, play: Callable[[Uploads], Awaitable[None]]) -> list[str]:
    said: list[str] = []

    async def main() -> None:
        head, tag = head_of(objects, run_dir)
        uploads = Uploads(objects, run_dir, head, tag, said.append)
        async with asyncio.timeout(60), uploading(uploads):
            await play(uploads)

    asyncio.run(main())
    return said


def test_a_checkpoint_is_copied_although_it_is_removed_meanwhile(run_dir: Path) -> None:
    objects = MemoryObjects()

    async def play(uploads: Uploads) -> None:
        await uploads.committed(0)
        shutil.rmtree(run_dir / "checkpoints" / "0")
        checkpoint(run_dir, 1)
        await uploads.finish(1)

    assert [line for line in played(objects, run_dir, play) if "slow" not in line] == []
    assert objects.head is not None
    assert Head.decode(objects.head, objects.address).version == 1


def test_a_store_that_fails_once_gets_the_next_checkpoint(run_dir: Path) -> None:
    objects = MemoryObjects(failing={"head"})

    async def play(uploads: Uploads) -> None:
        await uploads.committed(0)
        await uploads._is_idle.wait()
        assert uploads.copied == -1
        checkpoint(run_dir, 1)
        await uploads.finish(1)
        assert uploads.copied == 1

    assert played(objects, run_dir, play) == [
        "memory://run did not take step 0: memory://run did not take head; there is no copy yet"
    ]


def test_a_run_whose_last_copy_fails_says_so(run_dir: Path) -> None:
    async def play(uploads: Uploads) -> None:
        await uploads.finish(0)

    with pytest.raises(FleetFailed, match=r"did not take the end of the run, step 0, which is in .*: the same command"):
        played(MemoryObjects(failing={"head"}), run_dir, play)


def test_another_writer_ends_the_run(run_dir: Path, tmp_path: Path) -> None:
    objects = MemoryObjects()
    copied(objects, run_dir, 0)

    async def play(uploads: Uploads) -> None:
        brought(objects, other := tmp_path / "other")
        checkpoint(other, 1)
        copied(objects, other, 1, "two")
        checkpoint(run_dir, 1)
        await uploads.committed(1)
        await asyncio.Event().wait()

    with pytest.raises(OtherWriter):
        played(objects, run_dir, play)


def test_later_checkpoints_take_the_place_of_one_that_waits(run_dir: Path) -> None:
    for version in (1, 2):
        checkpoint(run_dir, version)
    objects = MemoryObjects()

    async def main() -> None:
        uploads = Uploads(objects, run_dir, None, "", said.append)
        for version in (0, 1, 2):
            await uploads.committed(version)
        async with asyncio.timeout(60), uploading(uploads):
            await uploads.finish(2)

    said: list[str] = []
    asyncio.run(main())
    assert said == [f"memory://run is slow: step {late} is not copied, step {late + 1} will be" for late in (0, 1)]
    assert not list(run_dir.glob("copying/*"))


class Undeletable(MemoryObjects):
    """Refuses to remove objects, as a bucket does for keys that may not delete."""

    def remove(self, names: list[str]) -> None:
        raise OSError("403")


def test_parts_that_cannot_be_removed_do_not_make_the_copy_fail(run_dir: Path) -> None:
    objects = Undeletable()

    async def play(uploads: Uploads) -> None:
        for version in (1, 2):
            checkpoint(run_dir, version)
            await uploads.finish(version)

    said = played(objects, run_dir, play)
    assert said == ["memory://run keeps parts that no copy names any more: 403"]
    assert objects.head is not None
    assert Head.decode(objects.head, objects.address).version == 2


def test_a_run_that_was_killed_before_its_first_copies_keeps_its_folder(run_dir: Path) -> None:
    objects = MemoryObjects()
    copied(objects, run_dir, 0)
    for _ in range(3):
        head, tag = head_of(objects, run_dir)
        asyncio.run(made(objects, run_dir, head, tag))
    assert brought(objects, run_dir) is not None
    assert (run_dir / "join_keys").exists(), "it was not moved aside"


async def made(objects: MemoryObjects, run_dir: Path, head: Head | None, tag: str) -> Uploads:
    return Uploads(objects, run_dir, head, tag, print)


def test_the_folder_of_a_run_that_goes_on_is_not_moved(run_dir: Path, tmp_path: Path) -> None:
    objects = MemoryObjects()
    copied(objects, run_dir, 0)
    brought(objects, other := tmp_path / "other")
    checkpoint(other, 1)
    copied(objects, other, 1, "two")
    with run_lock(run_dir), pytest.raises(ConfigError, match="is in use by process"):
        brought(objects, run_dir)
    assert (run_dir / "journal").exists()


class Crowded(MemoryObjects):
    """Answers no put and no get before so many are under way."""

    def __init__(self, at_once: int) -> None:
        super().__init__()
        self.barrier = threading.Barrier(at_once, timeout=60)
        self.most = self.now = 0
        self.lock = threading.Lock()

    def put(self, name: str, data: bytes) -> None:
        self.wait(name)
        super().put(name, data)

    def get(self, name: str) -> bytes:
        self.wait(name)
        return super().get(name)

    def wait(self, name: str) -> None:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        if name != "head":
            self.barrier.wait()
        with self.lock:
            self.now -= 1


def test_parts_go_up_and_come_back_at_once_and_no_more_than_memory_allows(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_copy, "WAYS", 4)
    numbers = "".join(f"{number:010}" for number in range(100))
    (run_dir / "checkpoints/0/trainer.pt").write_text(numbers)
    others = "config.toml", "run.id", "metrics.jsonl", "model/config.json", "journal"
    for name in others:
        (run_dir / name).write_bytes(b"")
    (run_dir / "config.toml").unlink()
    objects = Crowded(4)
    copied(objects, run_dir, 0)
    assert objects.most == 4
    objects.most = 0
    brought(objects, tmp_path / "elsewhere")
    assert objects.most == 4
    assert (tmp_path / "elsewhere/checkpoints/0/trainer.pt").read_text() == numbers


class Rounds(MemoryObjects):
    """Answers all requests under way at once, when no further one can come: counts these rounds, and requests."""

    def __init__(self, at_once: int) -> None:
        super().__init__()
        self.at_once = at_once
        self.expected = 0
        self.requests = 0
        self.rounds = 0
        self._changed = threading.Condition()
        self._waiting = 0

    def answer(self, parts: int) -> None:
        self.expected = parts
        self.requests = 0
        self.rounds = 0

    def put(self, name: str, data: bytes) -> None:
        self._round_trip(name)
        super().put(name, data)

    def get(self, name: str) -> bytes:
        self._round_trip(name)
        return super().get(name)

    def _round_trip(self, name: str) -> None:
        with self._changed:
            self.requests += 1
            self._waiting += 1
            mine = self.rounds
            if name == "head" or self._waiting == self.at_once or self.requests == self.expected:
                self.rounds += 1
                self._waiting = 0
                self._changed.notify_all()
            else:
                assert self._changed.wait_for(lambda: self.rounds > mine, timeout=60)


@pytest.mark.parametrize("count", [64, 320, 500])
def test_a_copy_takes_a_tenth_of_the_round_trips_of_one_part_after_the_other(
    run_dir: Path, tmp_path: Path, count: int
) -> None:
    for name in ("config.toml", "run.id", "metrics.jsonl", "model/config.json", "journal"):
        (run_dir / name).unlink()
    numbers = "".join(f"{number:010}" for number in range(count))
    (run_dir / "checkpoints/0/trainer.pt").write_text(numbers)
    objects = Rounds(run_copy.WAYS)
    objects.answer(count)
    head, _ = upload(objects, Snapshot.take(run_dir, 0), None, "", "one")
    assert objects.requests == count + 1, "the head"
    assert objects.rounds * 10 <= objects.requests or objects.rounds == 3
    objects.answer(count)
    download(objects, head, tmp_path / "elsewhere")
    assert objects.requests == count
    assert objects.rounds == -(-count // run_copy.WAYS)
    assert (tmp_path / "elsewhere/checkpoints/0/trainer.pt").read_text() == numbers


def test_a_download_that_was_cut_off_fetches_what_is_not_there(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "checkpoints/0/trainer.pt").write_text("".join(f"{number:010}" for number in range(100)))

    class Unplugged(MemoryObjects):
        left = 60

        def get(self, name: str) -> bytes:
            if self.left == 0:
                raise OSError("unplugged")
            self.left -= 1
            return super().get(name)

    objects = Unplugged()
    copied(objects, run_dir, 0)
    target = tmp_path / "elsewhere"
    with pytest.raises(OSError, match="unplugged"):
        brought(objects, target)
    assert not target.exists()
    head = head_of_store(objects)
    total = sum(len(copied.parts) for copied in head.files.values())
    objects.left = total
    brought(objects, target)
    assert objects.left == 60, "as many as came before are not fetched again"
    assert contents(target).keys() >= {"checkpoints/0/trainer.pt", "journal"}
    assert (target / "checkpoints/0/trainer.pt").read_bytes() == (run_dir / "checkpoints/0/trainer.pt").read_bytes()
    assert not list(tmp_path.glob("*.part"))


def test_what_was_fetched_of_another_head_is_no_file_of_this_one(run_dir: Path, tmp_path: Path) -> None:
    objects = MemoryObjects()
    copied(objects, run_dir, 0)
    lost = objects.objects.pop(next(name for name, data in objects.objects.items() if data == b"seed = 1"))
    target = tmp_path / "elsewhere"
    with pytest.raises(JournalError, match="is gone"):
        brought(objects, target)
    checkpoint(run_dir, 1)
    shutil.rmtree(run_dir / "checkpoints/0")
    objects.objects[f"objects/{sha256(lost).hexdigest()}"] = lost
    copied(objects, run_dir, 1)
    brought(objects, target)
    assert [path.name for path in (target / "checkpoints").iterdir()] == ["1"]
    assert not list(tmp_path.glob("*.part"))


def head_of_store(objects: MemoryObjects) -> Head:
    assert objects.head is not None
    return Head.decode(objects.head, objects.address)


class CutOff(MemoryObjects):
    """Takes so many puts, and then none until it is mended."""

    left = 5
    puts = 0

    def put(self, name: str, data: bytes) -> None:
        if self.left == 0:
            raise OSError("cut off")
        self.left -= 1
        self.puts += 1
        super().put(name, data)


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_an_upload_that_was_cut_off_sends_what_is_not_there(
    run_dir: Path, tmp_path: Path, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_copy, "WAYS", 2)
    objects = CutOff()
    objects.left = taken
    with pytest.raises(OSError, match="cut off"):
        upload(objects, Snapshot.take(run_dir, 0), None, "", "one")
    there = len(objects.objects)
    objects.puts = 0
    objects.left = 1000
    assert there == taken
    head, _ = upload(objects, Snapshot.take(run_dir, 0), None, "", "one")
    assert objects.puts == len(head.parts) - there + 1, "parts that lacked, and the head"
    download(objects, head, tmp_path / "elsewhere")


def test_parts_that_a_machine_left_without_a_head_are_removed_by_the_next_copy(run_dir: Path) -> None:
    objects = MemoryObjects()
    copied(objects, run_dir, 0)
    objects.objects["objects/left"] = b"by a machine that died"

    async def play(uploads: Uploads) -> None:
        await uploads.committed(0)
        await uploads._is_idle.wait()

    played(objects, run_dir, play)
    assert objects.head is not None
    head = Head.decode(objects.head, objects.address)
    assert objects.names() == {f"objects/{part}" for part in head.parts}


def test_a_cut_off_copy_of_a_checkpoint_that_is_gone_is_removed_by_the_next_one(run_dir: Path) -> None:
    objects = MemoryObjects(failing={"head"})

    async def play(uploads: Uploads) -> None:
        await uploads.committed(0)
        await uploads._is_idle.wait()
        assert objects.head is None
        shutil.rmtree(run_dir / "checkpoints/0")
        checkpoint(run_dir, 1)
        await uploads.finish(1)

    assert len(played(objects, run_dir, play)) == 1
    assert objects.head is not None
    head = Head.decode(objects.head, objects.address)
    assert objects.names() == {f"objects/{part}" for part in head.parts}


def test_parts_of_another_run_that_has_the_head_by_now_stay(run_dir: Path, tmp_path: Path) -> None:
    objects = MemoryObjects()
    first, tag = upload(objects, Snapshot.take(run_dir, 0), None, "", "one")
    second = Head(1, "two", first.files)
    objects.write_head(second.encode(), tag)
    objects.objects["objects/new"] = b"of the other run, before its next head"
    assert remove_unnamed(objects, None, first) == 0
    assert "objects/new" in objects.names()


def test_a_part_that_somebody_removed_is_sent_by_the_next_copy(run_dir: Path, tmp_path: Path) -> None:
    class Careless(MemoryObjects):
        def read_head(self) -> tuple[bytes, str] | None:
            for name in [name for name, data in self.objects.items() if data == b"seed = 1"][: int(self.loses)]:
                del self.objects[name]
            return super().read_head()

        def names(self) -> set[str]:
            self.read_head()
            return super().names()

        loses = False

    objects = Careless()

    async def play(uploads: Uploads) -> None:
        objects.loses = True
        await uploads.finish(0)
        objects.loses = False
        await uploads.finish(0)

    assert played(objects, run_dir, play) == [
        "memory://run has lost 1 parts of step 0; the next copy sends them",
    ]
    assert brought(objects, tmp_path / "elsewhere") is not None


@pytest.mark.parametrize(("every", "idle"), [(400.0, 299.0), (250.0, 1000.0), (299.0, 30_000.0)])
def test_the_end_of_a_run_waits_as_long_as_parts_move(run_dir: Path, every: float, idle: float) -> None:
    async def main() -> tuple[bool, float]:
        uploads = Uploads(MemoryObjects(), run_dir, None, "", print)
        uploads._is_idle.clear()
        loop = asyncio.get_running_loop()
        for number in range(1, int(idle / every) + 1):
            loop.call_later(every * number, uploads._note_part)
        loop.call_later(idle, uploads._is_idle.set)
        return await uploads._becomes_idle(), loop.time()

    assert virtual_loop.run(main()) == (True, idle)


@pytest.mark.parametrize("moves", [(), (10.0,), (10.0, 299.0, 580.0)])
def test_the_end_of_a_run_gives_up_once_no_part_moves(run_dir: Path, moves: tuple[float, ...]) -> None:
    async def main() -> bool:
        uploads = Uploads(MemoryObjects(), run_dir, None, "", print)
        uploads._is_idle.clear()
        for when in moves:
            asyncio.get_running_loop().call_later(when, uploads._note_part)
        return await uploads._becomes_idle()

    assert virtual_loop.run(main()) is False


def test_the_end_of_a_run_waits_while_a_part_is_under_way(run_dir: Path) -> None:
    async def main() -> tuple[bool, float]:
        objects = MemoryObjects()
        uploads = Uploads(objects, run_dir, None, "", print)
        uploads._is_idle.clear()
        loop = asyncio.get_running_loop()
        for number in range(1, 40):
            loop.call_later(200.0 * number, setattr, objects, "blocks", number)
        loop.call_later(8000.0, uploads._is_idle.set)
        return await uploads._becomes_idle(), loop.time()

    assert virtual_loop.run(main()) == (True, 8000.0)


def test_a_run_that_is_abandoned_does_not_wait_for_its_copy(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_copy, "WAYS", 1)
    (run_dir / "checkpoints/0/trainer.pt").write_text("".join(f"{number:010}" for number in range(1000)))
    began = threading.Event()
    goes_on = threading.Event()

    class Slow(MemoryObjects):
        def put(self, name: str, data: bytes) -> None:
            began.set()
            assert goes_on.wait(60)
            super().put(name, data)

    objects = Slow()

    async def main() -> None:
        uploads = Uploads(objects, run_dir, None, "", print)
        try:
            async with uploading(uploads):
                await uploads.committed(0)
                await asyncio.to_thread(began.wait, 60)
                raise KeyError("abandoned")
        finally:
            goes_on.set()

    with pytest.raises(KeyError):
        asyncio.run(main())
    assert len(objects.objects) < 10, "of a thousand parts"

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
from tests import golden
from tests.memory_objects import MemoryObjects

FILES = {
    "config.toml": "seed = 1",
    "run.id": "cafe",
    "journal": "0123456789" * 3,
    "metrics.jsonl": "{}\n",
    "model/config.json": "{}",
    "join_keys/controller.key": "secret",
    "logs/x.out": "log",
}
WEIGHTS = "checkpoints/0/trainer.pt"


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_copy, "PART_BYTES", 10)
    folder = tmp_path / "run"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    checkpoint(folder, 0)
    return folder


def checkpoint(run_dir: Path, version: int) -> None:
    folder = run_dir / "checkpoints" / str(version)
    folder.mkdir(parents=True)
    (folder / "trainer.pt").write_text(f"weights of version {version}")


def next_checkpoint(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints/0")
    checkpoint(run_dir, 1)


def numbered(run_dir: Path, parts: int) -> str:
    """Makes the weights so many parts long, each another one."""
    text = "".join(f"{number:010}" for number in range(parts))
    (run_dir / WEIGHTS).write_text(text)
    return text


def copied(objects: MemoryObjects, run_dir: Path, version: int, writer: str = "one") -> None:
    head, tag = head_of(objects, run_dir)
    write_mark(run_dir, [*writers_of(run_dir), writer])
    snapshot = Snapshot.take(run_dir, version)
    made, _ = upload(objects, snapshot, head, tag, writer)
    snapshot.release()
    if head is not None:
        remove_unnamed(objects, head, made)


@pytest.fixture
def objects(run_dir: Path) -> MemoryObjects:
    """A copy of version 0."""
    made = MemoryObjects()
    copied(made, run_dir, 0)
    return made


def goes_on_elsewhere(objects: MemoryObjects, folder: Path) -> None:
    """Another machine takes the run, and copies version 1."""
    brought(objects, folder)
    checkpoint(folder, 1)
    copied(objects, folder, 1, "two")


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def part_of(objects: MemoryObjects, data: bytes) -> str:
    return next(name for name, each in objects.objects.items() if each == data)


def test_what_was_copied_comes_back_without_keys_and_logs(
    objects: MemoryObjects, run_dir: Path, tmp_path: Path
) -> None:
    assert brought(objects, tmp_path / "elsewhere") is not None
    here = {name: text for name, text in contents(run_dir).items() if not name.startswith(("join_keys", "logs"))}
    assert contents(tmp_path / "elsewhere") == here | {"copied.json": '{"writers": ["one"]}\n'}
    assert not any(b"secret" in data for data in objects.objects.values())
    assert not list(run_dir.glob("copying/*"))


def test_only_new_parts_are_sent_and_those_of_no_head_are_removed(objects: MemoryObjects, run_dir: Path) -> None:
    before = set(objects.objects)
    with (run_dir / "journal").open("a") as journal:
        journal.write("more")
    next_checkpoint(run_dir)
    copied(objects, run_dir, 1)
    assert objects.newest.version == 1
    assert objects.names() == {f"objects/{part}" for part in objects.newest.parts}
    assert len(set(objects.objects) - before) == 2, "the ends of the journal and of the weights"


def test_a_machine_that_dies_before_the_head_leaves_the_run_of_the_head_before(
    objects: MemoryObjects, run_dir: Path, tmp_path: Path
) -> None:
    checkpoint(run_dir, 1)
    objects.failing = {"head"}
    with pytest.raises(OSError, match="did not take head"):
        copied(objects, run_dir, 1)
    head = brought(objects, tmp_path / "elsewhere")
    assert head is not None
    assert head.version == 0
    assert (tmp_path / "elsewhere" / WEIGHTS).read_text() == "weights of version 0"


def test_a_second_writer_is_refused_and_changes_nothing(objects: MemoryObjects, run_dir: Path, tmp_path: Path) -> None:
    goes_on_elsewhere(objects, tmp_path / "other")
    checkpoint(run_dir, 1)
    with golden.raises(OtherWriter):
        copied(objects, run_dir, 1)
    with pytest.raises(OtherWriter, match="another run"):
        upload(objects, Snapshot.take(run_dir, 1), None, "an old tag", "one")
    assert objects.newest.writer == "two"


def test_a_run_that_went_on_elsewhere_takes_the_place_of_the_one_here_unless_that_goes_on(
    objects: MemoryObjects, run_dir: Path, tmp_path: Path
) -> None:
    goes_on_elsewhere(objects, tmp_path / "other")
    with run_lock(run_dir), pytest.raises(ConfigError, match="is in use"):
        brought(objects, run_dir)
    assert (run_dir / "journal").exists()
    brought(objects, run_dir)
    assert (run_dir / "checkpoints/1").exists()
    (aside,) = tmp_path.glob("run.before-*")
    assert (aside / "join_keys").exists()


def test_a_run_that_was_never_copied_there_is_not_moved(objects: MemoryObjects, run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "copied.json").unlink()
    with golden.raises(ConfigError):
        brought(objects, run_dir)
    assert (run_dir / "config.toml").exists()
    assert brought(MemoryObjects(), tmp_path / "none") is None


@pytest.mark.parametrize("damage", [b"other", None])
def test_parts_that_are_damaged_or_gone_are_found_and_leave_no_folder(
    damage: bytes | None, objects: MemoryObjects, tmp_path: Path
) -> None:
    name = part_of(objects, b"seed = 1")
    objects.remove([name])
    if damage is not None:
        objects.objects[name] = damage
    with golden.raises(JournalError, match="config.toml"):
        brought(objects, tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


def head_with(files: bytes = b"{}", version: bytes = b"0", number: bytes = b"1") -> bytes:
    return b'{"format": %s, "version": %s, "writer": "x", "files": %s}' % (number, version, files)


NAMES = [b"../a", b"/etc/a", b"a\\u0000", b"\\ud800"]


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"[]",
        b"{}",
        head_with(number=b"2"),
        head_with(b'{"a": 1}'),
        *(head_with(b'{"%s": {"size": 0, "parts": []}}' % name) for name in NAMES),
        head_with(version=b"1e999"),
        b"[" * 100_000,
    ],
)
def test_what_is_no_head_is_refused(head: bytes, tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="memory://run"):
        brought(MemoryObjects(head=head), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_head_with_a_wrong_size_is_refused(objects: MemoryObjects, tmp_path: Path) -> None:
    assert objects.head is not None
    objects.head = objects.head.replace(b'"size": 30', b'"size": 31')
    with golden.raises(JournalError):
        download(objects, objects.newest, tmp_path / "elsewhere")


def played(objects: MemoryObjects, run_dir: Path, play: Callable[[Uploads], Awaitable[None]]) -> list[str]:
    """Uploads beside what is played; returns what was said."""
    said: list[str] = []

    async def main() -> None:
        uploads = Uploads(objects, run_dir, *head_of(objects, run_dir), said.append)
        async with asyncio.timeout(60), uploading(uploads):
            await play(uploads)

    asyncio.run(main())
    return said


def test_a_checkpoint_is_copied_although_it_is_removed_meanwhile(run_dir: Path) -> None:
    objects = MemoryObjects()

    async def play(uploads: Uploads) -> None:
        await uploads.committed(0)
        next_checkpoint(run_dir)
        await uploads.finish(1)

    assert [line for line in played(objects, run_dir, play) if "slow" not in line] == []
    assert objects.newest.version == 1


def test_a_store_that_fails_once_gets_the_next_checkpoint_and_keeps_nothing_of_the_one_that_is_gone(
    run_dir: Path,
) -> None:
    objects = MemoryObjects(failing={"head"})

    async def play(uploads: Uploads) -> None:
        await uploads.committed(0)
        await uploads._is_idle.wait()
        assert uploads.copied == -1
        next_checkpoint(run_dir)
        await uploads.finish(1)
        assert uploads.copied == 1

    (said,) = played(objects, run_dir, play)
    golden.says(said)
    assert objects.names() == {f"objects/{part}" for part in objects.newest.parts}


def test_a_run_whose_last_copy_fails_says_so(run_dir: Path) -> None:
    with golden.raises(FleetFailed):
        played(MemoryObjects(failing={"head"}), run_dir, lambda uploads: uploads.finish(0))


def test_another_writer_ends_the_run(objects: MemoryObjects, run_dir: Path, tmp_path: Path) -> None:
    async def play(uploads: Uploads) -> None:
        goes_on_elsewhere(objects, tmp_path / "other")
        checkpoint(run_dir, 1)
        await uploads.committed(1)
        await asyncio.Event().wait()

    with pytest.raises(OtherWriter):
        played(objects, run_dir, play)


def test_later_checkpoints_take_the_place_of_one_that_waits(run_dir: Path) -> None:
    for version in (1, 2):
        checkpoint(run_dir, version)
    said: list[str] = []

    async def main() -> None:
        uploads = Uploads(MemoryObjects(), run_dir, None, "", said.append)
        for version in (0, 1, 2):
            await uploads.committed(version)
        async with asyncio.timeout(60), uploading(uploads):
            await uploads.finish(2)

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

    (said,) = played(objects, run_dir, play)
    golden.says(said)
    assert objects.newest.version == 2


def test_a_run_that_was_killed_before_its_first_copies_keeps_its_folder(objects: MemoryObjects, run_dir: Path) -> None:
    async def start() -> None:
        Uploads(objects, run_dir, *head_of(objects, run_dir), print)

    (run_dir / "copying/0").mkdir(parents=True)
    for _ in range(3):
        asyncio.run(start())
    assert not (run_dir / "copying").exists()
    assert brought(objects, run_dir) is not None
    assert (run_dir / "join_keys").exists(), "it was not moved aside"


class Rounds(MemoryObjects):
    """Answers all requests under way at once, when no further one can come: counts these rounds, requests, and the most
    that were under way. parts: how many requests come, but for the head."""

    def __init__(self, at_once: int, parts: int) -> None:
        super().__init__()
        self.at_once = at_once
        self.parts = parts
        self.requests = self.rounds = self.most = self._waiting = 0
        self._changed = threading.Condition()

    def again(self) -> None:
        self.requests = self.rounds = self.most = 0

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
            self.most = max(self.most, self._waiting)
            mine = self.rounds
            if name == "head" or self._waiting == self.at_once or self.requests == self.parts:
                self.rounds += 1
                self._waiting = 0
                self._changed.notify_all()
            else:
                assert self._changed.wait_for(lambda: self.rounds > mine, timeout=60)


@pytest.mark.parametrize(("count", "ways"), [(64, 32), (500, 32), (100, 4)])
def test_parts_go_up_and_come_back_at_once_and_no_more_than_memory_allows(
    run_dir: Path, tmp_path: Path, count: int, ways: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_copy, "WAYS", ways)
    for name in ("config.toml", "run.id", "metrics.jsonl", "model/config.json", "journal"):
        (run_dir / name).unlink()
    numbers = numbered(run_dir, count)
    objects = Rounds(ways, count)
    head, _ = upload(objects, Snapshot.take(run_dir, 0), None, "", "one")
    rounds = -(-count // ways)
    assert (objects.requests, objects.rounds, objects.most) == (count + 1, rounds + 1, ways), "and the head"
    objects.again()
    download(objects, head, tmp_path / "elsewhere")
    assert (objects.requests, objects.rounds, objects.most) == (count, rounds, ways)
    assert (tmp_path / "elsewhere" / WEIGHTS).read_text() == numbers


class CutOff(MemoryObjects):
    """Takes so many puts or gets, and then none until it is mended."""

    left = 1000

    def put(self, name: str, data: bytes) -> None:
        self._count()
        super().put(name, data)

    def get(self, name: str) -> bytes:
        self._count()
        return super().get(name)

    def _count(self) -> None:
        if self.left == 0:
            raise OSError("cut off")
        self.left -= 1


def test_a_download_that_was_cut_off_fetches_what_is_not_there(run_dir: Path, tmp_path: Path) -> None:
    numbered(run_dir, 100)
    objects = CutOff()
    copied(objects, run_dir, 0)
    objects.left = 60
    target = tmp_path / "elsewhere"
    with pytest.raises(OSError, match="cut off"):
        brought(objects, target)
    assert not target.exists()
    objects.left = sum(len(copied.parts) for copied in objects.newest.files.values())
    brought(objects, target)
    assert objects.left == 60, "as many as came before are not fetched again"
    assert contents(target).keys() >= {WEIGHTS, "journal"}
    assert (target / WEIGHTS).read_bytes() == (run_dir / WEIGHTS).read_bytes()
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_an_upload_that_was_cut_off_sends_what_is_not_there(
    run_dir: Path, tmp_path: Path, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_copy, "WAYS", 2)
    objects = CutOff()
    objects.left = taken
    with pytest.raises(OSError, match="cut off"):
        upload(objects, Snapshot.take(run_dir, 0), None, "", "one")
    assert len(objects.objects) == taken
    objects.left = 1000
    head, _ = upload(objects, Snapshot.take(run_dir, 0), None, "", "one")
    assert 1000 - objects.left == len(head.parts) - taken + 1, "parts that lacked, and the head"
    download(objects, head, tmp_path / "elsewhere")


def test_what_was_fetched_of_another_head_is_no_file_of_this_one(
    objects: MemoryObjects, run_dir: Path, tmp_path: Path
) -> None:
    lost = objects.objects.pop(part_of(objects, b"seed = 1"))
    target = tmp_path / "elsewhere"
    with pytest.raises(JournalError, match="is gone"):
        brought(objects, target)
    next_checkpoint(run_dir)
    objects.objects[f"objects/{sha256(lost).hexdigest()}"] = lost
    copied(objects, run_dir, 1)
    brought(objects, target)
    assert [path.name for path in (target / "checkpoints").iterdir()] == ["1"]
    assert not list(tmp_path.glob("*.part"))


def test_parts_that_a_machine_left_without_a_head_are_removed_by_the_next_copy(
    objects: MemoryObjects, run_dir: Path
) -> None:
    objects.objects["objects/left"] = b"by a machine that died"

    async def play(uploads: Uploads) -> None:
        await uploads.committed(0)
        await uploads._is_idle.wait()

    played(objects, run_dir, play)
    assert objects.names() == {f"objects/{part}" for part in objects.newest.parts}


def test_parts_of_another_run_that_has_the_head_by_now_stay(run_dir: Path) -> None:
    objects = MemoryObjects()
    first, tag = upload(objects, Snapshot.take(run_dir, 0), None, "", "one")
    objects.write_head(Head(1, "two", first.files).encode(), tag)
    objects.objects["objects/new"] = b"of the other run, before its next head"
    assert remove_unnamed(objects, None, first) == 0
    assert "objects/new" in objects.names()


def test_a_part_that_somebody_removed_is_sent_by_the_next_copy(run_dir: Path, tmp_path: Path) -> None:
    class Careless(MemoryObjects):
        loses = True

        def names(self) -> set[str]:
            self.remove([name for name, data in self.objects.items() if self.loses and data == b"seed = 1"])
            return super().names()

    objects = Careless()

    async def play(uploads: Uploads) -> None:
        await uploads.finish(0)
        objects.loses = False
        await uploads.finish(0)

    (said,) = played(objects, run_dir, play)
    golden.says(said)
    assert brought(objects, tmp_path / "elsewhere") is not None


EVERY_200 = {200.0 * number: "block" for number in range(1, 40)}


@pytest.mark.parametrize(
    ("moves", "idle", "ends"),
    [
        ({}, 299.0, 299.0),
        ({250.0 * number: "part" for number in range(1, 5)}, 1000.0, 1000.0),
        ({299.0 * number: "part" for number in range(1, 101)}, 30_000.0, 30_000.0),
        (EVERY_200, 8000.0, 8000.0),  # A part is under way.
        ({}, None, 300.0),
        ({10.0: "part"}, None, 600.0),
        ({10.0: "part", 299.0: "part", 580.0: "part"}, None, 900.0),
    ],
)
def test_the_end_of_a_run_waits_as_long_as_parts_move_and_no_longer(
    run_dir: Path, moves: dict[float, str], idle: float | None, ends: float
) -> None:
    async def main() -> tuple[bool, float]:
        objects = MemoryObjects()
        uploads = Uploads(objects, run_dir, None, "", print)
        uploads._is_idle.clear()
        loop = asyncio.get_running_loop()
        for number, (when, what) in enumerate(moves.items(), 1):
            loop.call_later(when, *((uploads._note_part,) if what == "part" else (setattr, objects, "blocks", number)))
        if idle is not None:
            loop.call_later(idle, uploads._is_idle.set)
        return await uploads._becomes_idle(), loop.time()

    assert virtual_loop.run(main()) == (idle is not None, ends)


def test_a_run_that_is_abandoned_does_not_wait_for_its_copy(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_copy, "WAYS", 1)
    numbered(run_dir, 1000)
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

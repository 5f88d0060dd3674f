"""The wait for hosts counts from the last sign of progress, and the workers of a host share one copy of their files."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.errors import FleetFailed
from asyncrl.fleet.launching.join_point import JoinPoint, open_join_point
from asyncrl.fleet.launching.joining_host import JoiningHost
from asyncrl.lanes.control.wire import InprocWire
from asyncrl.lanes.data.file_cache import PART_BYTES, FileCache, FileServer, OfferedFiles
from asyncrl.lanes.host_id import HostId
from asyncrl.protocols.messages import FilePart, FileTree
from asyncrl.simulation import virtual_loop
from tests.unit.fleet.launching.test_joining import ADDRESS, ECHO, VERSIONS, FakeLauncher, place

DEADLINE = 100.0
PARTS = 12


class SlowFiles(FileServer):
    """Sends each part after some seconds, and none after `last` of them. sent: parts."""

    def __init__(self, model: Path, seconds: float, last: int = 1000, listing: float = 0.0) -> None:
        super().__init__({"echo": [OfferedFiles(model, "folder")], "other": [OfferedFiles(model, "folder")]})
        self.seconds = seconds
        self.last = last
        self.listing = listing
        self.sent = 0

    async def trees(self, service: str) -> list[FileTree]:
        await asyncio.sleep(self.listing)
        return [replace(tree, path=f"/nowhere{tree.path}") for tree in await super().trees(service)]

    async def part(self, service: str, digest: str, offset: int) -> FilePart:
        await asyncio.sleep(self.seconds if self.sent < self.last else 1e6)
        self.sent += 1
        return await super().part(service, digest, offset)


def joined(
    tmp_path: Path,
    files: SlowFiles,
    play: Callable[[JoinPoint, Callable[..., JoiningHost]], Awaitable[None]],
    needed: int = 1,
) -> list[str]:
    async def main() -> list[str]:
        wire = InprocWire()
        said = list[str]()
        tasks = list[asyncio.Task[None]]()
        places = {name: replace(ECHO, needed=needed if name == "echo" else 1) for name in ("echo", "other")}
        point = JoinPoint(
            *(ADDRESS, places, lambda proof: proof),
            deadline=DEADLINE,
            report=said.append,
            versions=VERSIONS,
            files=files,
        )

        def host(name: str, service: str = "echo", cache: str = "cache") -> JoiningHost:
            launcher = FakeLauncher(HostId(name, name=name))
            joining = JoiningHost(
                *(wire, ADDRESS, service, service, launcher, asyncio.Event()),
                FileCache(tmp_path / cache, said.append),
                timeout=30.0,
                say=said.append,
                host=launcher.host,
                versions=VERSIONS,
                gpus=[],
            )
            tasks.append(asyncio.get_running_loop().create_task(joining.serve()))
            return joining

        with suppress(RuntimeError):
            async with open_join_point(point, wire):
                await play(point, host)
                raise RuntimeError("hosts need not leave")
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        wire.close()
        return said

    return virtual_loop.run(main())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "w.safetensors").write_bytes(bytes(PARTS * PART_BYTES))
    return tmp_path / "model"


@pytest.mark.parametrize("seconds", [1.0, 50.0])
def test_a_host_that_copies_is_waited_for(seconds: float, model: Path, tmp_path: Path) -> None:
    async def play(point: JoinPoint, host: Callable[..., JoiningHost]) -> None:
        host("h1")
        worker = await point.spawn(place(0))
        assert asyncio.get_running_loop().time() >= PARTS / 4 * seconds
        assert worker.host.name == "h1"

    joined(tmp_path, SlowFiles(model, seconds), play)


def test_a_list_of_files_that_is_computed_for_long_is_waited_for(model: Path, tmp_path: Path) -> None:
    async def play(point: JoinPoint, host: Callable[..., JoiningHost]) -> None:
        host("h1")
        assert (await point.spawn(place(0))).host.name == "h1"

    joined(tmp_path, SlowFiles(model, 1.0, listing=5 * DEADLINE), play)


def test_a_copy_that_stands_still_ends_the_wait_and_names_its_host(model: Path, tmp_path: Path) -> None:
    """Parts that are late end the host's connection, and it joins again, which is no progress."""

    async def play(point: JoinPoint, host: Callable[..., JoiningHost]) -> None:
        host("h1")
        began = asyncio.get_running_loop().time()
        with pytest.raises(FleetFailed, match=r"1 of 1 echo .* make no progress: h1 \(\d\.\d MB copied\)"):
            await point.spawn(place(0))
        assert asyncio.get_running_loop().time() - began < 4 * DEADLINE

    joined(tmp_path, SlowFiles(model, 30.0, last=6), play)


def test_hosts_that_come_one_by_one_are_waited_for(model: Path, tmp_path: Path) -> None:
    async def play(point: JoinPoint, host: Callable[..., JoiningHost]) -> None:
        loop = asyncio.get_running_loop()
        spawns = [loop.create_task(point.spawn(place(replica))) for replica in range(5)]
        for number in range(5):
            await asyncio.sleep(0.9 * DEADLINE)
            host(f"h{number}")
        assert len({(await spawn).host.name for spawn in spawns}) == 5

    joined(tmp_path, SlowFiles(model, 0.01), play, needed=5)


def test_progress_of_another_service_on_another_host_is_none(model: Path, tmp_path: Path) -> None:
    async def play(point: JoinPoint, host: Callable[..., JoiningHost]) -> None:
        host("h1", "other")
        with pytest.raises(FleetFailed, match="1 of 1 echo workers"):
            await point.spawn(place(0))
        assert asyncio.get_running_loop().time() == pytest.approx(DEADLINE)

    joined(tmp_path, SlowFiles(model, 50.0), play)


def test_the_workers_of_a_host_share_one_copy_and_each_is_waited_for(model: Path, tmp_path: Path) -> None:
    files = SlowFiles(model, 50.0)

    async def play(point: JoinPoint, host: Callable[..., JoiningHost]) -> None:
        host("h1", "other")
        for _ in range(4):
            host("h1")
        for replica in range(4):
            await point.spawn(place(replica))

    said = joined(tmp_path, files, play, needed=4)
    assert files.sent == PARTS
    assert sum("copied 1 files" in line for line in said) == 1


def test_of_the_workers_of_a_host_one_reads_the_files_that_it_sees(model: Path, tmp_path: Path) -> None:
    server = FileServer({"echo": [OfferedFiles(model, "folder")]})
    caches = [FileCache(tmp_path / "cache", print) for _ in range(8)]

    async def main() -> None:
        trees = await server.trees("echo")

        async def none(digest: str, offset: int) -> FilePart:
            raise AssertionError("nothing is copied")

        found = await asyncio.gather(*(cache.bring(trees, none) for cache in caches))
        assert found == [{str(model): str(model)}] * 8

    asyncio.run(main())
    assert sorted(cache.progress for cache in caches) == [0] * 7 + [PARTS * PART_BYTES]


def test_files_that_are_seen_need_no_folder_for_copies(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    server = FileServer({"echo": [OfferedFiles(model, "folder")]})

    async def main() -> dict[str, str]:
        async def none(digest: str, offset: int) -> FilePart:
            raise AssertionError("nothing is copied")

        return await FileCache(tmp_path / "file" / "cache", print).bring(await server.trees("echo"), none)

    assert asyncio.run(main()) == {str(model): str(model)}


def test_a_host_whose_disk_is_full_for_a_while_joins_when_it_has_room(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = shutil.disk_usage(tmp_path)

    async def play(point: JoinPoint, host: Callable[..., JoiningHost]) -> None:
        free = room._replace(free=0)
        monkeypatch.setattr("asyncrl.lanes.data.file_cache.shutil.disk_usage", lambda path: free)
        host("h1")
        spawned = asyncio.ensure_future(point.spawn(place(0)))
        await asyncio.sleep(20)
        assert not spawned.done()
        free = room
        assert (await spawned).host.name == "h1"

    said = joined(tmp_path, SlowFiles(model, 0.0), play)
    assert [text.rpartition("; ")[2] for text in said if "are free" in text] == ["trying for 30 s"]

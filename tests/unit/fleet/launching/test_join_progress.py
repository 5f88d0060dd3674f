"""The wait for hosts counts from the last sign of progress, and the workers of a host share one copy of their files."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import FleetFailed
from asyncrl.lanes.data.file_cache import PART_BYTES, FileCache, FileServer, OfferedFiles
from asyncrl.protocols.messages import FilePart, FileTree
from tests.unit.fleet.launching.sites import DEADLINE, ECHO, Site, place, site
from tests.virtual_time import on_virtual_time

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


@asynccontextmanager
async def copying(tmp_path: Path, *slow: Any, needed: int = 1, **files: Any) -> AsyncIterator[Site]:
    """A site whose hosts copy the files of a model, slowly."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "w.safetensors").write_bytes(bytes(PARTS * PART_BYTES))
    places = {"echo": replace(ECHO, needed=needed), "other": ECHO}
    async with site(places=places, role_of=str, files=SlowFiles(model, *slow, **files)) as here:
        here.cache = tmp_path / "cache"
        yield here


@pytest.mark.parametrize(("seconds", "listing"), [(1.0, 0.0), (50.0, 0.0), (1.0, 5 * DEADLINE)])
@on_virtual_time
async def test_a_host_that_copies_or_waits_for_the_list_of_files_is_waited_for(
    seconds: float, listing: float, tmp_path: Path
) -> None:
    async with copying(tmp_path, seconds, listing=listing) as here:
        here.host("h1")
        assert (await here.point.spawn(place(0))).host.name == "h1"
        assert asyncio.get_running_loop().time() >= PARTS / 4 * seconds + listing


@on_virtual_time
async def test_a_copy_that_stands_still_ends_the_wait_and_names_its_host(tmp_path: Path) -> None:
    """Parts that are late end the host's connection, and it joins again, which is no progress."""
    async with copying(tmp_path, 30.0, last=6) as here:
        here.host("h1")
        with pytest.raises(FleetFailed, match=r"1 of 1 echo .* make no progress: h1 \(\d\.\d MB copied\)"):
            await here.point.spawn(place(0))
        assert asyncio.get_running_loop().time() < 4 * DEADLINE


@on_virtual_time
async def test_hosts_that_come_one_by_one_are_waited_for(tmp_path: Path) -> None:
    async with copying(tmp_path, 0.01, needed=5) as here:
        spawns = [asyncio.ensure_future(here.point.spawn(place(replica))) for replica in range(5)]
        for number in range(5):
            await asyncio.sleep(0.9 * DEADLINE)
            here.host(f"h{number}")
        assert len({(await spawn).host.name for spawn in spawns}) == 5


@on_virtual_time
async def test_progress_of_another_service_on_another_host_is_none(tmp_path: Path) -> None:
    async with copying(tmp_path, 50.0) as here:
        here.host("h1", "other", proof="other")
        with pytest.raises(FleetFailed, match="1 of 1 echo workers"):
            await here.point.spawn(place(0))
        assert asyncio.get_running_loop().time() == pytest.approx(DEADLINE)


@on_virtual_time
async def test_the_workers_of_a_host_share_one_copy_and_each_is_waited_for(tmp_path: Path) -> None:
    async with copying(tmp_path, 50.0, needed=4) as here:
        here.host("h1", "other", proof="other")
        for _ in range(4):
            here.host("h1")
        for replica in range(4):
            await here.point.spawn(place(replica))
        assert here.point.files.sent == PARTS  # type: ignore[attr-defined]
        assert sum("copied 1 files" in line for line in here.said) == 1


async def test_of_the_workers_of_a_host_one_reads_the_files_that_it_sees(tmp_path: Path) -> None:
    """For files that are seen no folder of copies is needed."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "w").write_bytes(bytes(PARTS * PART_BYTES))
    trees = await FileServer({"echo": [OfferedFiles(model, "folder")]}).trees("echo")
    caches = [FileCache(tmp_path / "cache", print) for _ in range(8)]

    async def none(digest: str, offset: int) -> FilePart:
        raise AssertionError("nothing is copied")

    found = await asyncio.gather(*(cache.bring(trees, none) for cache in caches))
    assert found == [{str(model): str(model)}] * 8
    assert sorted(cache.progress for cache in caches) == [0] * 7 + [PARTS * PART_BYTES]
    assert await FileCache(model / "w" / "cache", print).bring(trees, none) == found[0]


@on_virtual_time
async def test_a_host_whose_disk_is_full_for_a_while_joins_when_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = shutil.disk_usage(tmp_path)
    free = room._replace(free=0)
    async with copying(tmp_path, 0.0) as here:
        monkeypatch.setattr("asyncrl.lanes.data.file_cache.shutil.disk_usage", lambda path: free)
        here.host("h1")
        spawned = asyncio.ensure_future(here.point.spawn(place(0)))
        await asyncio.sleep(20)
        assert not spawned.done()
        free = room
        assert (await spawned).host.name == "h1"
        assert [text.rpartition("; ")[2] for text in here.said if "are free" in text] == ["trying for 30 s"]

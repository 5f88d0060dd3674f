"""Files of a controller on a host that does not see them: copied by digest, cut off, damaged, and without room."""

import asyncio
import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from asyncrl.errors import ConfigError, PeerLost, Refused, WireError
from asyncrl.lanes.data.file_cache import PART_BYTES, FileCache, FileServer, OfferedFiles, relocated
from asyncrl.protocols.messages import FilePart, FileTree, ListedFile

BIG = os.urandom(6 * PART_BYTES + 17)


class Copy(NamedTuple):
    """A controller with a model of two files, and a host that gets its parts through `tamper`."""

    model: Path
    cache: Path
    server: FileServer
    said: list[str]
    asked: list[int]

    async def bring(self, tamper: Callable[[FilePart], FilePart] = lambda part: part) -> dict[str, str]:
        """Makes the host look as a fresh process would, as if the model had another path there."""
        trees = [replace(tree, path=f"/elsewhere{tree.path}") for tree in await self.server.trees("generation")]

        async def fetch(digest: str, offset: int) -> FilePart:
            self.asked.append(offset)
            return tamper(await self.server.part("generation", digest, offset))

        return await FileCache(self.cache, self.said.append).bring(trees, fetch)

    def copied(self, places: dict[str, str]) -> Path:
        return Path(places[f"/elsewhere{self.model}"])


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    model = tmp_path / "model"
    (model / "parts").mkdir(parents=True)
    (model / "parts" / "weights.safetensors").write_bytes(BIG)
    (model / "config.json").write_text("{}")
    server = FileServer({"generation": [OfferedFiles(model, "folder")], "reward": []})
    return Copy(model, tmp_path / "cache", server, [], [])


def same(folder: Path, other: Path) -> bool:
    names = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    return names == {path.relative_to(other) for path in other.rglob("*") if path.is_file()} and all(
        (folder / name).read_bytes() == (other / name).read_bytes() for name in names
    )


async def test_a_host_that_sees_the_same_files_uses_them_where_they_are(copy: Copy) -> None:
    trees = await copy.server.trees("generation")

    async def nothing(digest: str, offset: int) -> FilePart:
        raise AssertionError("nothing is copied")

    places = await FileCache(copy.cache, copy.said.append).bring(trees, nothing)
    assert places == {str(copy.model): str(copy.model)}


async def test_files_that_a_host_does_not_see_are_copied_once(copy: Copy) -> None:
    first = copy.copied(await copy.bring())
    assert same(first, copy.model)
    assert first.parent == copy.cache
    assert len(copy.asked) == 8
    assert copy.copied(await copy.bring()) == first
    assert len(copy.asked) == 8


async def test_a_copy_that_was_cut_off_goes_on_where_it_was(copy: Copy) -> None:
    def cut(part: FilePart) -> FilePart:
        if len(copy.asked) > 6:
            raise PeerLost("the controller was killed")
        return part

    with pytest.raises(PeerLost):
        await copy.bring(cut)
    before = len(copy.asked)
    assert same(copy.copied(await copy.bring()), copy.model)
    assert len(copy.asked) - before == 3, "four of the seven parts were there"


async def test_a_damaged_part_is_asked_for_again(copy: Copy) -> None:
    damaged = iter([True, False, True] + [False] * 20)

    def damage(part: FilePart) -> FilePart:
        return replace(part, data=b"x" * len(part.data)) if next(damaged) else part

    assert same(copy.copied(await copy.bring(damage)), copy.model)
    shutil.rmtree(copy.cache)
    with pytest.raises(WireError, match="came damaged 3 times"):
        await copy.bring(lambda part: replace(part, crc32=part.crc32 ^ 1))


async def test_what_an_earlier_copy_left_damaged_is_copied_again(copy: Copy) -> None:
    folder = copy.copied(await copy.bring())
    (folder / "config.json").write_text("[]")
    asked = len(copy.asked)
    assert same(copy.copied(await copy.bring()), copy.model)
    assert len(copy.asked) == asked + 1, "the other file was intact"


async def test_a_file_that_keeps_another_digest_is_no_copy(copy: Copy) -> None:
    def other(part: FilePart) -> FilePart:
        data = bytes(len(part.data))
        return FilePart(data, zlib.crc32(data))

    with pytest.raises(WireError, match=r"config.json came 3 times with another digest"):
        await copy.bring(other)


async def test_a_file_that_changed_meanwhile_is_refused(copy: Copy) -> None:
    (tree,) = await copy.server.trees("generation")
    (copy.model / "config.json").write_text("{ }")
    with pytest.raises(Refused, match=r"config.json has changed"):
        await copy.server.part("generation", tree.files[0].sha256, 0)


async def test_a_host_reads_no_file_that_its_service_does_not(copy: Copy) -> None:
    (tree,) = await copy.server.trees("generation")
    assert await copy.server.trees("reward") == []
    with pytest.raises(Refused, match="is offered to reward workers"):
        await copy.server.part("reward", tree.files[0].sha256, 0)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", ""])
async def test_a_name_that_leads_out_of_its_folder_is_refused(copy: Copy, name: str) -> None:
    tree = FileTree("/elsewhere", "folder", (ListedFile(name, 1, "00"),))
    with pytest.raises(WireError, match="not in that folder"):
        await FileCache(copy.cache, copy.said.append).bring([tree], lambda digest, offset: asyncio.sleep(0, None))  # type: ignore[arg-type]


async def test_a_cache_without_room_says_how_much_is_needed(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(copy.model)._replace(free=10**6)
    monkeypatch.setattr("asyncrl.lanes.data.file_cache.shutil.disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"need 73 MB in .*/cache, where 1 MB are free. Make room .* --cache"):
        await copy.bring()
    assert not copy.asked


async def test_a_cache_that_cannot_be_written_is_named(copy: Copy) -> None:
    copy.cache.write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot be kept in .*/cache: .* --cache"):
        await copy.bring()


async def test_two_processes_of_a_host_copy_a_folder_once(copy: Copy) -> None:
    first, second = await asyncio.gather(copy.bring(), copy.bring())
    assert first == second
    assert len(copy.asked) == 8


async def test_code_is_copied_beside_what_it_imports_and_modules_have_to_be_there(copy: Copy, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    for name in ("rewards.py", "helper.py", "other.py"):
        (code / name).write_text(name)
    names = ("helper.py", "rewards.py")
    for use in ("files", "module"):
        copy.server._offered = {"generation": [OfferedFiles(code, use, names)]}
        if use == "module":
            with pytest.raises(ConfigError, match=r"does not see helper.py, rewards.py in .*FILE.py:NAME"):
                await copy.bring()
            continue
        places = await copy.bring()
        here = Path(places[f"/elsewhere{code}/rewards.py"])
        assert sorted(path.name for path in here.parent.iterdir()) == sorted(names)


async def test_the_logs_of_a_run_that_is_not_seen_are_kept_here(copy: Copy, tmp_path: Path) -> None:
    copy.server._offered = {"generation": [OfferedFiles(tmp_path / "model", "run", ("config.json",))]}
    folder = copy.copied(await copy.bring())
    assert (folder / "logs").is_dir()
    assert f"logs of workers are kept here, in {folder}/logs" in copy.said[-1]


async def test_who_writes_checkpoints_needs_the_run_directory_itself(copy: Copy, tmp_path: Path) -> None:
    offered = [OfferedFiles(tmp_path / "model", "shared", ("config.json",))]
    copy.server._offered = {"generation": offered}
    (tmp_path / "model" / "logs").mkdir()
    seen = await FileCache(copy.cache, copy.said.append).bring(await copy.server.trees("generation"), never)
    assert seen == {str(tmp_path / "model"): str(tmp_path / "model")}
    with pytest.raises(ConfigError, match=r"does not see /elsewhere.*, the run directory.*Mount that folder here"):
        await copy.bring()
    assert not (copy.cache / "runs").exists()


async def never(digest: str, offset: int) -> FilePart:
    raise AssertionError("nothing is copied")


def test_the_longest_path_that_fits_is_replaced() -> None:
    places = {"/run": "/here/run", "/run/model": "/here/model", "/c/r.py": "/here/r.py"}
    value = {"a": ["/run/logs/x", "/run/model", "/runs", 1], "use": "trl:/c/r.py:f", "b": {"c": "/run"}}
    assert relocated(value, places) == {
        "a": ["/here/run/logs/x", "/here/model", "/runs", 1], "use": "trl:/here/r.py:f", "b": {"c": "/here/run"}
    }  # fmt: skip

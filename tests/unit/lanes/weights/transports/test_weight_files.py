"""Files of weights in a folder that trainer and engines see."""

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import SafetensorError

from asyncrl.errors import ConfigError, FleetFailed, PeerLost, WeightsError
from asyncrl.lanes.weights.transports import weight_files
from asyncrl.lanes.weights.transports.weight_files import FileReceiver, FileSender
from asyncrl.lanes.weights.version_folder import try_folder
from tests.unit.lanes.weights.transports.sites import spec_of, weights


async def test_a_folder_that_a_reader_does_not_see_is_named(tmp_path: Path) -> None:
    """Readers wait for the next version where the trainer is gone, and would wait for ever here."""
    sender = FileSender(tmp_path / "weights", spec_of("float32"))
    published = sender.write(0, 0, weights(0))
    elsewhere = replace(published, arena=published.arena.replace(str(tmp_path), "/not/mounted"))
    with pytest.raises(WeightsError, match=r"/not/mounted/weights .*is not seen on host .*weights\.folder"):
        await FileReceiver(spec_of("float32")).fetch(elsewhere)
    sender.close()
    with pytest.raises(PeerLost, match="its trainer has ended"):
        await FileReceiver(spec_of("float32")).fetch(published)


def test_a_file_that_is_not_whole_has_not_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = FileSender(tmp_path, spec_of("float32"))
    sender.write(0, 0, weights(0))
    before = list(tmp_path.glob("*.safetensors"))

    def full(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr(weight_files, "save_file", full)
    with pytest.raises(FleetFailed, match="the disk is full"):
        sender.write(0, 1, weights(1))
    assert list(tmp_path.glob("*.safetensors")) == before


def test_the_files_of_a_trainer_that_died_go_with_the_first_version_of_the_next(tmp_path: Path) -> None:
    died = FileSender(tmp_path, spec_of("float32"))
    for version in range(3):
        died.write(0, version, weights(version))
    (tmp_path / "weights-0-3.draft").write_bytes(b"half of it")
    following = FileSender(tmp_path, spec_of("float32"))
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {f"weights-0-{n}.safetensors" for n in (1, 2)}
    for version in range(2, 5):
        following.write(1, version, weights(version))
        expected = {f"weights-1-{n}.safetensors" for n in range(max(2, version - 1), version + 1)}
        assert {path.name for path in tmp_path.iterdir()} == expected
    following.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk quota is used up"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "the disk is full; make room there"),
        (OSError(errno.EIO, "Input/output error"), r"\[Errno 5\] Input/output error"),
    ],
)
def test_a_version_that_cannot_be_written_names_its_folder_and_why(
    failure: Exception, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tensors: object, path: Path, metadata: object) -> None:
        raise failure

    sender = FileSender(tmp_path, spec_of("float32"))
    monkeypatch.setattr(weight_files, "save_file", fail)
    with pytest.raises(FleetFailed, match=rf"version 7 .* to {tmp_path} \(weights\.folder\): {why}"):
        sender.write(0, 7, weights(0))


async def test_a_folder_that_is_removed_meanwhile_is_named_by_both_ends(tmp_path: Path) -> None:
    sender = FileSender(tmp_path / "weights", spec_of("float32"))
    published = sender.write(0, 0, weights(0))
    shutil.rmtree(tmp_path / "weights")
    with pytest.raises(WeightsError, match=f"{tmp_path}/weights was removed"):
        await FileReceiver(spec_of("float32")).fetch(published)
    with pytest.raises(FleetFailed, match=f"{tmp_path}/weights .*the folder was removed while the run used it"):
        sender.write(0, 1, weights(1))


def with_other_shapes(whole: bytes) -> bytes:
    """Returns the same bytes with a header that makes them tensors of one dimension."""
    length = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:length])
    for name, each in header.items():
        if name != "__metadata__":
            size = each["data_offsets"][1] - each["data_offsets"][0]
            each |= {"shape": [size // 4], "dtype": "F32"}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + whole[length:]


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[:-8] + bytes(8),
        lambda whole: whole[: len(whole) // 2],
        lambda whole: b"",
        lambda whole: b"\xff" * 40 + whole[40:],
        with_other_shapes,
    ],
)
async def test_damaged_files_are_refused(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    sender = FileSender(tmp_path, spec_of("float32"))
    published = sender.write(0, 0, weights(0))
    path = sender._files[0]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(WeightsError, match=r"damaged|digest|differ|another|overwritten"):
        await FileReceiver(spec_of("float32")).fetch(published)


async def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    sender = FileSender(tmp_path, spec_of("float32"))
    published = sender.write(0, 0, weights(0))
    path = sender._files[0]
    path.unlink()
    path.mkdir()
    with pytest.raises(WeightsError, match=f"{path} cannot be read on host"):
        await FileReceiver(spec_of("float32")).fetch(published)


@pytest.mark.parametrize("place", ["/proc/nothere/weights", "{tmp}/file", "{tmp}/file/below"])
def test_a_folder_that_cannot_be_made_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = Path(place.format(tmp=tmp_path))
    with pytest.raises(ConfigError, match=rf"weights\.folder: new weights cannot be written to {folder} \("):
        FileSender(folder, spec_of("float32"))


def test_trying_a_folder_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    try_folder(tmp_path / "there" / "new" / "deep")
    assert [*tmp_path.rglob("*")] == [tmp_path / "there"]
    (tmp_path / "there" / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        try_folder(tmp_path / "there" / "file" / "deep")
    assert {*tmp_path.rglob("*")} == {tmp_path / "there", tmp_path / "there" / "file"}

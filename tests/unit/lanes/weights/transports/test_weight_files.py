"""Files of weights in a folder that trainer and engines see."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.errors import PeerLost, WeightsError
from asyncrl.lanes.weights.transports import weight_files
from asyncrl.lanes.weights.transports.weight_files import FileReceiver, FileSender
from tests.unit.lanes.weights.transports.sites import spec_of, weights


async def test_a_folder_that_a_reader_does_not_see_is_named(tmp_path: Path) -> None:
    """Readers wait for the next version where the trainer is gone, and would wait for ever here."""
    sender = FileSender(tmp_path / "weights", spec_of("float32"))
    published = sender.write(0, 0, weights(0))
    elsewhere = replace(published, arena=published.arena.replace(str(tmp_path), "/not/mounted"))
    with pytest.raises(WeightsError, match=r"/not/mounted/weights is not seen on host .*weights\.folder"):
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
    with pytest.raises(OSError, match="the disk is full"):
        sender.write(0, 1, weights(1))
    assert list(tmp_path.glob("*.safetensors")) == before

"""Files of weights in a folder that trainer and engines see."""

import errno
from pathlib import Path

import pytest

from asyncrl.lanes.weights.transports import weight_files
from asyncrl.lanes.weights.transports.weight_files import FileSender
from tests.unit.lanes.weights.transports.sites import spec_of, weights


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

"""Files of a model that are not whole are found without reading weights."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.engines.models.folder_checks import INDEX, WEIGHTS, damages, refuse_damaged
from asyncrl.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    save_file({"weight": torch.arange(50.0), "bias": torch.zeros(3, dtype=torch.bfloat16)}, tmp_path / WEIGHTS)
    return tmp_path


def test_a_whole_model_is_taken(folder: Path) -> None:
    refuse_damaged(folder)


@pytest.mark.parametrize("left", [0, 4, 30, 200, -1])
def test_weights_that_are_cut_short_are_named_with_what_to_do(folder: Path, left: int) -> None:
    whole = (folder / WEIGHTS).stat().st_size
    os.truncate(folder / WEIGHTS, left % whole)
    with pytest.raises(ConfigError, match=rf"^model\.name: {folder / WEIGHTS} is cut short .*Get it again"):
        refuse_damaged(folder)


@pytest.mark.parametrize(
    "harm",
    [
        lambda weights: weights.write_bytes(b"<html>not found</html>"),
        lambda weights: weights.write_bytes((2).to_bytes(8, "little") + b"[]"),
        lambda weights: weights.write_bytes(weights.read_bytes() + b"more"),
    ],
)
def test_weights_that_are_something_else_are_named(folder: Path, harm: Callable[[Path], None]) -> None:
    harm(folder / WEIGHTS)
    assert len(list(damages(folder))) == 1


def test_a_config_that_is_cut_short_is_named(folder: Path) -> None:
    (folder / "config.json").write_text('{"hidden_size": 5')
    assert list(damages(folder)) == [f"{folder / 'config.json'} is cut short or damaged: it is not JSON"]


def test_of_weights_in_parts_each_is_looked_at(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "part-1.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}))
    assert list(damages(folder)) == [f"{folder / 'part-2.safetensors'} is missing, and {INDEX} names it"]
    save_file({"b": torch.zeros(9)}, folder / "part-2.safetensors")
    assert list(damages(folder)) == []
    os.truncate(folder / "part-1.safetensors", 100)
    assert "part-1" in next(damages(folder))


def test_what_nobody_loads_is_not_looked_at(folder: Path) -> None:
    (folder / "adapter.safetensors").write_bytes(b"strange")
    assert list(damages(folder)) == []

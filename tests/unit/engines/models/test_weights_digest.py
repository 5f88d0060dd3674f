"""The digest by which a run with adapters knows its base model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.engines.models.weights_digest import BASE, refuse_other_base, weights_digest, write_base
from asyncrl.errors import ConfigError

WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(4, dtype=torch.bfloat16)}


def saved(folder: Path, tensors: dict[str, Any]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_the_digest_does_not_depend_on_files_and_order(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole", WEIGHTS)
    split = tmp_path / "split"
    split.mkdir()
    files = {}
    for number, name in enumerate(WEIGHTS):
        files[name] = f"model-{number}.safetensors"
        save_file({name: WEIGHTS[name]}, split / files[name])
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert weights_digest(whole) == weights_digest(split)


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: {**weights, "a.weight": weights["a.weight"] + 1e-6},
        lambda weights: {**weights, "a.weight": weights["a.weight"].reshape(3, 2)},
        lambda weights: {**weights, "b.weight": weights["b.weight"].half()},
        lambda weights: {"a.weight": weights["a.weight"]},
        lambda weights: {"a.weight": weights["a.weight"], "c.weight": weights["b.weight"]},
    ],
)
def test_any_other_weights_have_another_digest(change: Callable[[Any], dict[str, Any]], tmp_path: Path) -> None:
    assert weights_digest(saved(tmp_path / "a", WEIGHTS)) != weights_digest(saved(tmp_path / "b", change(WEIGHTS)))


def test_files_of_torch_are_digested_whole(tmp_path: Path) -> None:
    found = set()
    for number in (1, 1, 2):
        (tmp_path / "pytorch_model.bin").write_bytes(bytes([number]) * 9)
        found.add(weights_digest(tmp_path))
    assert len(found) == 2


def test_another_base_model_is_refused_with_both_digests(tmp_path: Path) -> None:
    base, other = saved(tmp_path / "base", WEIGHTS), saved(tmp_path / "other", {"a.weight": torch.zeros(2, 3)})
    refuse_other_base(tmp_path, other)
    write_base(tmp_path, base, weights_digest(base))
    assert json.loads((tmp_path / BASE).read_text())["folder"] == str(base)
    refuse_other_base(tmp_path, base)
    with pytest.raises(ConfigError, match="holds another model than the one") as refused:
        refuse_other_base(tmp_path, other)
    assert all(digest in str(refused.value) for digest in (weights_digest(base), weights_digest(other)))

"""The digest by which a run with adapters knows its base model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.config.schema import Config
from asyncrl.engines.models.model_families import probe_tokens_needed, refuse_rotation_by_longest_row
from asyncrl.engines.models.model_folder import BASE, refuse_other_base, weights_digest, write_base
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
    base = saved(tmp_path / "base", WEIGHTS)
    other = saved(tmp_path / "other", {"a.weight": torch.zeros(2, 3)})
    refuse_other_base(tmp_path, other)
    write_base(tmp_path, base, weights_digest(base))
    assert json.loads((tmp_path / BASE).read_text())["folder"] == str(base)
    refuse_other_base(tmp_path, base)
    with pytest.raises(ConfigError, match="holds another model than the one") as refused:
        refuse_other_base(tmp_path, other)
    assert all(digest in str(refused.value) for digest in (weights_digest(base), weights_digest(other)))


# The config of a model names what it does differently with longer rows; the engines refuse or probe it.
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 64}


def refuse(folder: Path, shape: dict[str, Any], longest: int) -> None:
    (folder / "config.json").write_text(json.dumps(shape))
    sections = {"task": {"prompts": "none", "max_prompt_tokens": longest - 24}, "generation": {"max_new_tokens": 24}}
    refuse_rotation_by_longest_row(folder, Config.model_validate({"model": {"name": "tiny"}, **sections}))


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ({"max_position_embeddings": 64, "rope_parameters": DYNAMIC}, "dynamic"),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"max_position_embeddings": 256, "rope_parameters": LONG}, "longrope"),
        ({"original_max_position_embeddings": 64, "rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"text_config": {"max_position_embeddings": 64, "rope_parameters": DYNAMIC}}, "dynamic"),
        ({"max_position_embeddings": 64, "rope_parameters": {"full_attention": DYNAMIC}}, "dynamic"),
    ],
)
def test_frequencies_that_follow_the_longest_row_are_refused_beyond_the_original_length(
    shape: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    refuse(tmp_path, shape, 64)
    said = rf"model\.name: .*'{kind}'.* once it passes 64 tokens.* may have 65 here.*max_new_tokens.* at most 64"
    with pytest.raises(ConfigError, match=said):
        refuse(tmp_path, shape, 65)


@pytest.mark.parametrize("kind", ["default", "linear", "yarn", "llama3"])
def test_static_frequencies_are_served_at_every_length(kind: str, tmp_path: Path) -> None:
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 64}
    refuse(tmp_path, {"max_position_embeddings": 256, "rope_parameters": scaling}, 4096)


@pytest.mark.parametrize(
    ("shape", "needed"),
    [
        ({"hidden_size": 64, "num_hidden_layers": 28}, 12),
        ({"sliding_window": 32}, 44),
        ({"sliding_window": None, "use_sliding_window": True}, 12),
        ({"sliding_window": 100}, 12),
        ({"sliding_window": 95}, 100),
        ({"sliding_window": 32, "use_sliding_window": False, "max_window_layers": 28}, 12),
        ({"text_config": {"attention_chunk_size": 16, "sliding_window": 32}}, 44),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 64}}, 12),
        ({"rope_parameters": {"rope_type": "unheard of", "original_max_position_embeddings": 64}}, 76),
    ],
)
def test_a_probe_goes_beyond_every_length_at_which_the_model_may_change(shape: dict[str, Any], needed: int) -> None:
    assert probe_tokens_needed(shape, 12, 100) == needed

"""The config of a model names what it does differently with longer rows; the engines refuse or probe it."""

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.engines.models.row_length import probe_tokens_needed, refuse_rotation_by_longest_row
from asyncrl.errors import ConfigError

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

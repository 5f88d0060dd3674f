"""Sizes of models by name against the parameters that their makers publish."""

import json
from pathlib import Path

import pytest

from asyncrl.engines.model_shape import Shape
from asyncrl.errors import ConfigError
from asyncrl.simulation.cost_model.model_size import NAMED, model_size

PUBLISHED = {
    "llama-7b": (6.74, 6.6),
    "llama-13b": (13.02, 12.9),
    "llama-70b": (68.98, 68.7),
    "llama-3.1-8b": (8.03, 7.5),
    "qwen2.5-7b": (7.62, 7.07),
    "qwen3-30b-a3b": (30.5, 3.0),
    "qwen3-235b-a22b": (235.0, 21.6),
    "deepseek-v3": (671.0, 36.6),
}
"""Billions of parameters, all and for each token without the looked up embedding."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_parameters_are_the_published_ones(name: str) -> None:
    size = model_size(name)
    assert (size.parameters / 1e9, size.active_parameters / 1e9) == pytest.approx(PUBLISHED[name], rel=0.02)


def test_a_dense_model_has_the_parameters_that_plans_of_memory_count() -> None:
    for name in ("llama-7b", "qwen3-4b"):
        assert model_size(name).parameters == Shape.of(NAMED[name]).parameters


def test_latent_attention_caches_one_compressed_vector() -> None:
    assert model_size("deepseek-v3").cache_bytes == 61 * (512 + 64) * 2
    assert model_size("llama-7b").cache_bytes == 32 * 2 * 4096 * 2


def test_many_tokens_touch_all_experts_and_one_token_touches_those_it_chose() -> None:
    size = model_size("qwen3-30b-a3b")
    assert size.touched_experts(1) == pytest.approx(8)
    assert size.touched_experts(1000) == pytest.approx(128)
    assert model_size("llama-7b").touched_experts(5) == 0


def test_a_model_is_read_from_its_folder_and_another_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NAMED["qwen2.5-7b"]))
    assert model_size(str(tmp_path)).parameters == model_size("qwen2.5-7b").parameters
    with pytest.raises(ConfigError, match="that is understood; known: llama-7b"):
        model_size(str(tmp_path / "nothing"))

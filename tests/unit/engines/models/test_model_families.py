"""A family that cannot be trained is refused by its name before anything starts, from config.json alone."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config
from asyncrl.deploy.preflight import model_problems
from asyncrl.engines.models.model_families import REFUSED, TRAINED, family_problems


def problems(folder: Path, engine: str = "torch", **shape: Any) -> list[Problem]:
    (folder / "config.json").write_text(json.dumps(shape))
    sections = {"model": {"name": str(folder)}, "task": {"prompts": "p"}, "generation": {"engine": engine}}
    return list(family_problems(Config.model_validate(sections), folder))


@pytest.mark.parametrize("family", REFUSED)
def test_a_refused_family_is_named_with_the_reason_and_what_to_do(family: str, tmp_path: Path) -> None:
    (found,) = problems(tmp_path, model_type=family)
    assert not found.is_warning
    assert found.key == "model.name"
    assert f"the family {family!r} is not supported: {REFUSED[family]}" in found.text
    assert "take a model of another family" in found.text


@pytest.mark.parametrize("family", TRAINED)
def test_a_family_that_trains_says_nothing(family: str, tmp_path: Path) -> None:
    assert not problems(tmp_path, model_type=family, layer_types=["sliding_attention", "full_attention"])


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (
            {"model_type": "qwen2", "layer_types": ["full_attention", "linear_attention"]},
            "of the type linear_attention",
        ),
        ({"model_type": "unknown", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "unknown", "vision_config": {}}, "encoder of images"),
        ({"model_type": "unknown", "text_config": {"layer_types": ["chunked_attention"]}}, "type chunked_attention"),
        ({"model_type": "falcon", "alibi": True}, "ALiBi"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "from both sides"),
    ],
)
def test_what_a_config_says_is_refused_whatever_the_family(shape: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (found,) = problems(tmp_path, **shape)
    assert reason in found.text
    assert not found.is_warning


@pytest.mark.parametrize(
    ("shape", "is_refused"),
    [
        *(({"model_type": family}, "experts" in special) for family, special in TRAINED.items()),
        ({"model_type": "qwen2_moe", "num_experts": 0}, False),
        ({"model_type": "llama", "num_experts": None, "num_experts_per_tok": 2}, False),
        ({"model_type": "olmoe", "num_experts": 64}, True),
        ({"model_type": "granitemoe", "num_local_experts": 8}, True),
        ({"model_type": "unknown", "n_routed_experts": 160}, True),
        ({"model_type": "dbrx", "ffn_config": {"moe_num_experts": 16}}, True),
        ({"model_type": "unknown", "text_config": {"num_local_experts": 4}}, True),
    ],
)
def test_bits_that_depend_on_no_neighbour_are_refused_for_models_with_experts(
    shape: dict[str, Any], is_refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shape))
    for deterministic in (True, False):
        sections: dict[str, Any] = {"model": {"name": "m"}, "task": {"prompts": "p"}}
        config = Config.model_validate(sections | {"generation": {"deterministic": deterministic}})
        found = [each for each in family_problems(config, tmp_path) if each.key == "generation.deterministic"]
        assert len(found) == (is_refused and deterministic)
        assert all("its neighbours: remove generation.deterministic" in str(each) for each in found)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("LlamaForTokenClassification", "it is a critic, .* write it in critic.model"),
        ("LlamaForSequenceClassification", "it scores texts .* write it in reward.model or cost.model"),
        ("LlamaModel", "it has no head that continues texts"),
        ("LlamaForCausalLM", ""),
        ("GPT2LMHeadModel", ""),
    ],
)
def test_a_model_that_continues_no_text_is_refused(architecture: str, reason: str, tmp_path: Path) -> None:
    found = [str(each) for each in problems(tmp_path, model_type="llama", architectures=[architecture])]
    assert len(found) == bool(reason)
    assert all(re.search(f"^model.name: .*its config.json names {architecture}; {reason}", text) for text in found)


def test_an_unknown_family_is_warned_about(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, model_type="newcomer")
    assert found.is_warning
    assert "'newcomer', which no test has trained" in found.text


def test_vllm_samples_what_only_our_engine_lacks(tmp_path: Path) -> None:
    assert all(each.is_warning for each in problems(tmp_path, engine="vllm", model_type="mamba"))
    assert not problems(tmp_path, engine="vllm", model_type="whisper")[0].is_warning
    assert not problems(tmp_path, engine="vllm", model_type="qwen2", layer_types=["linear_attention"])


def test_a_run_is_refused_with_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    config = Config.model_validate({"model": {"name": str(tmp_path)}, "task": {"prompts": "p"}})
    assert any("the family 'mamba'" in problem.text for problem in model_problems(config, tmp_path))

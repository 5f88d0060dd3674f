"""A family that cannot be trained is refused by its name before anything starts, from config.json alone."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config, TrainingConfig
from asyncrl.config.sections.training_config import LoraConfig
from asyncrl.deploy.preflight import model_problems
from asyncrl.engines.acting.networks import Actor, TwinCritics
from asyncrl.engines.acting.stepping.spaces import ActionSpace, Spaces
from asyncrl.engines.models.lora import attach, published_spec
from asyncrl.engines.models.model_families import (
    REFUSED,
    TRAINED,
    family_problems,
    probe_tokens_needed,
    refuse_rotation_by_longest_row,
)
from asyncrl.engines.training.optimizer import Optimizer
from asyncrl.errors import ConfigError
from asyncrl.lanes.weights.chunk_codec import WireCodec
from asyncrl.lanes.weights.slot_memory import Role, roles_of
from asyncrl.lanes.weights.transports.version_transfer import ChunkPlan
from tests.unit.engines.generation.test_families import OWN, SHAPE


def problems(folder: Path, engine: str = "torch", **shape: Any) -> list[Problem]:
    (folder / "config.json").write_text(json.dumps(shape))
    sections = {"model": {"name": str(folder)}, "task": {"prompts": "p"}, "generation": {"engine": engine}}
    return list(family_problems(Config.model_validate(sections), folder))


def test_a_refused_family_is_named_with_the_reason_and_what_to_do(tmp_path: Path) -> None:
    for family, reason in REFUSED.items():
        (found,) = problems(tmp_path, model_type=family)
        assert not found.is_warning
        assert found.key == "model.name"
        assert f"the family {family!r} is not supported: {reason}" in found.text
        assert "take a model of another family" in found.text


def test_a_family_that_trains_says_nothing(tmp_path: Path) -> None:
    for family in TRAINED:
        assert not problems(tmp_path, model_type=family, layer_types=["sliding_attention", "full_attention"]), family


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


# Roles of parameters in every family that trains, against lists of names, and the rules that follow them.
LIST = {
    Role.EMBEDDING: r"(embed_tokens|embed_in|wte)\.weight",
    Role.POSITIONS: r"wpe\.weight",
    Role.HEAD: r"(lm_head|score|classifier)\.weight",
    Role.BIAS: r"(\.|_)bias",
    Role.NORM: r"(\w*norm|ln_\w+)\.weight",
    Role.ROUTER: r"mlp\.(gate|router|shared_expert_gate)\.weight",
    Role.EXPERTS: r"experts\.(gate_up|down)_proj",
    Role.VECTOR: r"self_attn\.sinks",
    Role.MATRIX: r"\.(([qkvo]|qkv|gate|up|down|gate_up)_proj|dense\w*|query_key_value|fc[12]|c_(attn|proj|fc))\.weight",
}
"""The meanings of the ends of names in the families, written down from their files in transformers."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {family: (family, {}) for family in TRAINED}
VARIANTS |= {
    "cohere with norms of heads": ("cohere", {"use_qk_norm": True}),
    "tied llama": ("llama", {"tie_word_embeddings": True}),
    "untied gpt2": ("gpt2", {"tie_word_embeddings": False}),
    "tied gpt_oss": ("gpt_oss", {"tie_word_embeddings": True}),
    "biased llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
}


def model_of(variant: str, **changes: Any) -> nn.Module:
    family, settings = VARIANTS[variant]
    config = AutoConfig.for_model(family, **(SHAPE | OWN.get(family, {}) | settings | changes))
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def listed(name: str) -> Role:
    (role,) = [role for role, ends in LIST.items() if re.search(f"{ends}$", name)]
    return role


def names_of(tensors: Iterable[Tensor], model: nn.Module) -> set[str]:
    wanted = {id(each) for each in tensors}
    return {name for name, parameter in model.named_parameters() if id(parameter) in wanted}


@pytest.mark.parametrize("variant", VARIANTS)
def test_roles_are_those_of_the_list_and_every_rule_follows_them(variant: str) -> None:
    model = model_of(variant)
    expected = {name: listed(name) for name, _ in model.named_parameters()}
    assert {name: role for name, role in roles_of(model).items() if name in expected} == expected

    def of(*roles: Role) -> set[str]:
        return {name for name, role in expected.items() if role in roles}

    spared = of(Role.BIAS, Role.NORM, Role.VECTOR)
    decays = Optimizer(model, TrainingConfig(weight_decay=0.1), 3).parts[0].param_groups
    assert names_of(decays[0]["params"], model) == expected.keys() - spared
    assert (decays[0]["weight_decay"], decays[1]["weight_decay"]) == (0.1, 0.0)
    inner, others = Optimizer(model, TrainingConfig(optimizer="muon", weight_decay=0.1), 3).parts
    assert names_of((p for group in inner.param_groups for p in group["params"]), model) == of(Role.MATRIX, Role.ROUTER)
    assert names_of(others.param_groups[1]["params"], model) == spared
    spec = published_spec(model, "float32")
    rounded = {part.start for part in ChunkPlan.of(spec, WireCodec.FP8).parts if part.codec is WireCodec.FP8}
    at = {each.name for each in spec.tensors if each.offset in rounded}
    assert at == of(Role.MATRIX, Role.EXPERTS)


def test_a_critic_has_its_head_and_adapters_are_matrices() -> None:
    config = AutoConfig.for_model("qwen2", **SHAPE, num_labels=1)
    critic = AutoModelForTokenClassification.from_config(config, dtype=torch.float32)
    heads = [name for name, role in roles_of(critic).items() if role is Role.HEAD]
    assert heads == ["score.weight"]
    assert all(role is listed(name) for name, role in roles_of(critic).items())
    model = model_of("qwen2")
    attach(model, LoraConfig(rank=2), seed=0)
    trained = {role for name, role in roles_of(model).items() if "lora_" in name}
    assert trained == {Role.MATRIX}


def test_stacked_biases_of_twin_critics_do_not_decay() -> None:
    spaces = Spaces(3, ActionSpace("box", 2, low=(-1.0, -1.0), high=(1.0, 1.0), shape=(2,)))
    model = nn.ModuleList([TwinCritics(spaces, [8, 8], "relu"), Actor(spaces, [8], "tanh")])
    decayed, spared = Optimizer(model, TrainingConfig(weight_decay=0.1), 3).parts[0].param_groups
    names = names_of(decayed["params"], model)
    assert names == {*(f"0.weights.{layer}" for layer in range(3)), "1.layers.0.weight", "1.layers.2.weight"}
    assert len(spared["params"]) == 5


# What a config names that a model does differently with longer rows; the engines refuse or probe it.
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 64}


def refuse_rows(folder: Path, shape: dict[str, Any], longest: int) -> None:
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
    refuse_rows(tmp_path, shape, 64)
    said = rf"model\.name: .*'{kind}'.* once it passes 64 tokens.* may have 65 here.*max_new_tokens.* at most 64"
    with pytest.raises(ConfigError, match=said):
        refuse_rows(tmp_path, shape, 65)


@pytest.mark.parametrize("kind", ["default", "linear", "yarn", "llama3"])
def test_static_frequencies_are_served_at_every_length(kind: str, tmp_path: Path) -> None:
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 64}
    refuse_rows(tmp_path, {"max_position_embeddings": 256, "rope_parameters": scaling}, 4096)


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

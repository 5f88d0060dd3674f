"""Roles of parameters in every family that trains, against lists of names, and the rules that follow them."""

import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from asyncrl.config.schema import TrainingConfig
from asyncrl.config.sections.model_config import LoraConfig
from asyncrl.engines.acting.networks import Actor, TwinCritics
from asyncrl.engines.acting.stepping.spaces import ActionSpace, Spaces
from asyncrl.engines.lora.low_rank import attach, published_spec
from asyncrl.engines.models.model_families import TRAINED
from asyncrl.engines.training.optimizers.optimizer import Optimizer
from asyncrl.lanes.weights.codec.chunk import WireCodec
from asyncrl.lanes.weights.parameter_roles import Role, roles_of
from asyncrl.lanes.weights.transports.chunk_plan import ChunkPlan
from tests.unit.engines.generation.test_families import OWN, SHAPE

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
"""What the ends of names mean in the families, written down from their files in transformers."""
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

"""Low-rank layers: the formula, what is frozen, which layers are chosen, and when dropout acts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.sections.training_config import LoraConfig
from asyncrl.engines.models.lora import (
    adapted,
    attach,
    base_model,
    fill_for_probe,
    published_spec,
    published_tensors,
)
from asyncrl.errors import ConfigError

IDS = torch.arange(5, 25)[None]


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(**{"rank": 4, "alpha": 8.0, **settings})


def test_a_new_adapter_changes_nothing(folder: Path) -> None:
    plain = load(folder)
    model = load(folder)
    attach(model, lora(), seed=1)
    assert torch.equal(logits(plain), logits(model))


def test_the_layer_computes_the_formula(folder: Path) -> None:
    """y = W x + b + alpha / rank B A x"""
    model = load(folder)
    attach(model, lora(rank=3, alpha=7.0), seed=1)
    fill_for_probe(model)
    name, layer = next(adapted(model))
    x = torch.randn(6, layer.in_features)
    expected = x @ layer.weight.T + 7 / 3 * (x @ layer.lora_A.T) @ layer.lora_B.T
    torch.testing.assert_close(layer(x), expected)
    assert name == "model.layers.0.self_attn.q_proj"


def test_only_adapters_have_a_gradient_and_are_published(folder: Path) -> None:
    model = load(folder)
    attach(model, lora(targets=("q_proj", "v_proj")), seed=1)
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    expected = {
        f"model.layers.{layer}.self_attn.{part}.{matrix}"
        for layer in range(2)
        for part in ("q_proj", "v_proj")
        for matrix in ("lora_A", "lora_B")
    }
    assert trained == published_tensors(model).keys() == expected
    spec = published_spec(model, "bfloat16")
    # q: 48 -> 48; v: 48 -> 24. Two layers, rank 4, two bytes a number.
    assert sum(tensor.bytes for tensor in spec.tensors) == 2 * 4 * (48 + 48 + 48 + 24) * 2


def test_without_adapters_all_weights_are_published(folder: Path) -> None:
    model = load(folder)
    assert published_tensors(model).keys() == dict(model.named_parameters(remove_duplicate=False)).keys()


def test_the_same_seed_gives_the_same_adapters(folder: Path) -> None:
    found = []
    for seed in (1, 1, 2):
        model = load(folder)
        attach(model, lora(), seed=seed)
        found.append(published_tensors(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert not torch.equal(*(each["model.layers.0.self_attn.q_proj.lora_A"] for each in found[1:]))


@pytest.mark.parametrize("targets", [("query",), ("q_proj", "proj"), ("lm_head",), ("embed_tokens",), ("q_pro",)])
def test_a_target_without_a_layer_is_refused_with_the_layers(folder: Path, targets: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        attach(load(folder), lora(targets=targets), seed=1)
    assert repr(targets[-1]) in str(refused.value)
    assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in str(refused.value)


def test_a_target_may_be_a_part_of_the_model(folder: Path) -> None:
    model = load(folder)
    attach(model, lora(targets=("layers.1.mlp.up_proj",)), seed=1)
    assert [name for name, _ in adapted(model)] == ["model.layers.1.mlp.up_proj"]


def test_the_base_model_computes_without_adapters_and_only_in_the_scope(folder: Path) -> None:
    plain = logits(load(folder))
    model = load(folder)
    attach(model, lora(), seed=1)
    fill_for_probe(model)
    with base_model(model):
        assert torch.equal(logits(model), plain)
    assert not torch.allclose(logits(model), plain, atol=1e-2)


def test_dropout_acts_only_in_training_and_with_a_gradient(folder: Path) -> None:
    model = load(folder)
    attach(model, lora(dropout=0.5), seed=1)
    fill_for_probe(model)
    model.train()
    assert torch.equal(logits(model), logits(model))
    assert not torch.equal(model(IDS).logits, model(IDS).logits)
    model.eval()
    assert torch.equal(model(IDS).logits, model(IDS).logits)

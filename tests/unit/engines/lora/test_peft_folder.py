"""Folders of adapters: the format of peft, and a merged folder with the same log-probs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.sections.training_config import LoraConfig
from asyncrl.engines.models.lora import (
    attach,
    fill_for_probe,
    load_adapters,
    merge,
    published_tensors,
    read_adapters,
    write_adapters,
)
from asyncrl.errors import ConfigError, WeightsError

IDS = torch.arange(5, 25)[None]
FAMILIES = ["llama", "llama-tied", "qwen2"]


def logprobs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(IDS).logits.log_softmax(-1)
    return found


def written(base: Path, folder: Path, **settings: Any) -> Any:
    """Writes adapters of a model, and returns the model."""
    lora = LoraConfig(**{"rank": 4, "alpha": 8.0, **settings})
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    attach(model, lora, seed=1)
    fill_for_probe(model)
    write_adapters(folder, model, lora, str(base))
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return model


def test_names_and_config_are_those_of_peft(folder: Path, tmp_path: Path) -> None:
    written(folder, tmp_path, targets=("q_proj", "v_proj"), dropout=0.1)
    with safe_open(tmp_path / "adapter_model.safetensors", framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert shapes["base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight"] == (4, 48)
    assert shapes["base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"] == (24, 4)
    assert len(shapes) == 8
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"], described["lora_dropout"]) == (4, 8.0, 0.1)
    assert (described["peft_type"], described["task_type"]) == ("LORA", "CAUSAL_LM")
    assert described["target_modules"] == ["q_proj", "v_proj"]
    assert described["base_model_name_or_path"] == str(folder)


def test_all_linear_is_written_as_the_layers_that_it_names(folder: Path, tmp_path: Path) -> None:
    written(folder, tmp_path)
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    parts = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert described["target_modules"] == parts


def test_what_is_written_is_read_again(folder: Path, tmp_path: Path) -> None:
    model = written(folder, tmp_path)
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    attach(other, LoraConfig(rank=4, alpha=8.0), seed=9)
    load_adapters(tmp_path, other)
    assert read_adapters(tmp_path).keys() == published_tensors(model).keys()
    assert torch.equal(logprobs(model), logprobs(other))


def test_adapters_of_another_shape_are_refused(folder: Path, tmp_path: Path) -> None:
    written(folder, tmp_path)
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    attach(other, LoraConfig(rank=2), seed=9)
    with pytest.raises(WeightsError, match=r"layers\.0\.mlp\.down_proj\.lora_A"):
        load_adapters(tmp_path, other)


def test_a_folder_without_adapters_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors is missing"):
        read_adapters(folder)


@pytest.mark.parametrize("family", ["llama-biased", "llama-gelu", "llama-tied", "qwen3"])
def test_a_merged_folder_gives_the_same_logprobs(
    family: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model = written(model_folder(family), tmp_path / "adapters")
    merge(tmp_path / "adapters", model_folder(family), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.float32
    torch.testing.assert_close(logprobs(merged), logprobs(model), atol=2e-5, rtol=0)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "merged")) == 261


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft calls what transformers has renamed.
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "down_proj"), ("layers.1.mlp.up_proj",)], ids=str)
def test_peft_loads_the_folder_and_gives_the_same_logprobs(
    family: str, targets: tuple[str, ...], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed; asyncrl needs it nowhere")
    model = written(model_folder(family), tmp_path, targets=targets)
    base = AutoModelForCausalLM.from_pretrained(model_folder(family), dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(logprobs(loaded), logprobs(model), atol=2e-5, rtol=0)

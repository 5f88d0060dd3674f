"""Models that ranks fill by slices have the bits that transformers loads, in every family; where transformers would
change what is stored, it loads the model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from asyncrl.engines.models.model_families import TRAINED
from asyncrl.engines.models.model_loading import NotInSlices, sliced_weights, unfilled_model
from tests.unit.engines.generation.test_families import tiny_model

WEIGHTS = "model.safetensors"


def unfilled(folder: Path) -> Any:
    return unfilled_model(folder, AutoModelForCausalLM, config=AutoConfig.from_pretrained(folder), dtype=torch.float32)


def reason(folder: Path) -> str:
    with pytest.raises(NotInSlices) as found:
        sliced_weights(folder, unfilled(folder))
    return str(found.value)


def change(folder: Path, **changed: torch.Tensor | None) -> None:
    tensors: dict[str, Any] = load_file(folder / WEIGHTS) | changed
    kept = {name: each for name, each in tensors.items() if each is not None}
    save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("family", TRAINED)
def test_slices_and_buffers_are_those_that_transformers_loads(family: str, tmp_path: Path) -> None:
    folder = tiny_model(family, tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    random = torch.get_rng_state()
    model = unfilled(folder)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(each.is_meta for each in model.parameters())
    assert not model.training
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()
    found = dict(model.named_buffers())
    wanted = dict(expected.named_buffers())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    weights = sliced_weights(folder, model)
    state = expected.state_dict()
    assert weights.keys() == state.keys()
    for name, tensor in state.items():
        half = tuple(slice(size // 2, size) for size in tensor.shape)
        assert torch.equal(weights[name].whole(), tensor)
        assert torch.equal(weights[name][half], tensor[half])


def test_weights_in_bfloat16_and_in_several_files_are_read(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    (tmp_path / WEIGHTS).unlink()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    found = sliced_weights(tmp_path, unfilled(tmp_path))
    assert all(torch.equal(found[name].whole(), each) for name, each in model.state_dict().items())


def test_models_that_transformers_has_to_load_are_named(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tiny_model("qwen3", tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / WEIGHTS)
    change(tmp_path, **{"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    assert reason(tmp_path).endswith("is stored 2 times")  # transformers would not tie them.
    change(tmp_path, **{"lm_head.weight": None, name: None})
    assert reason(tmp_path) == f"{name} is stored 0 times"
    change(tmp_path, **{name: tensors[name][1:].clone()})
    assert reason(tmp_path) == f"{name} has another shape in its file"
    change(tmp_path, **{name: tensors[name].to(torch.float8_e4m3fn)})
    assert reason(tmp_path) == f"{name} has the type F8_E4M3"
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    assert reason(tmp_path) == "its weights are quantized"
    (tmp_path / WEIGHTS).rename(tmp_path / "pytorch_model.bin")
    assert reason(tmp_path) == "its weights are not in safetensors"


def test_an_expert_that_is_missing_is_found(tmp_path: Path) -> None:
    tiny_model("qwen3_moe", tmp_path)
    change(tmp_path, **{"model.layers.0.mlp.experts.1.up_proj.weight": None})
    assert reason(tmp_path) == "model.layers.0.mlp.experts.gate_up_proj has another shape in its file"


def test_a_new_head_may_be_missing(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path)
    options = {"config": AutoConfig.from_pretrained(tmp_path, num_labels=1), "dtype": torch.float32}
    model = unfilled_model(tmp_path, AutoModelForTokenClassification, **options)
    found = sliced_weights(tmp_path, model, missing=frozenset({"score.weight", "score.bias"}))
    assert found.keys() == model.state_dict().keys() - {"score.weight", "score.bias"}

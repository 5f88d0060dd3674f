"""The engine with adapters computes what the trainer computes, also when new ones arrive while it samples."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import Config
from asyncrl.engines.canary_logprobs import canary_distance
from asyncrl.engines.generation.engine_interface import NO_WEIGHTS
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.models.lora import attach
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.errors import WeightsError
from tests.unit.engines.generation.conftest import at, drain, plain_logprobs, requests

MakeConfig = Callable[..., Config]
FAMILIES = ["llama", "llama-tied", "llama-biased", "qwen2", "qwen3", "smollm2", "llama-gelu"]


def adapters(engine: TorchEngine, seed: int) -> dict[str, torch.Tensor]:
    """A version of the weights that an engine asks for."""
    random = torch.Generator().manual_seed(seed)
    return {each.name: 0.05 * torch.randn(each.shape, generator=random) for each in engine.spec.tensors}


def adapted(folder: Path, config: Config) -> Any:
    """Transformers' modules with adapters."""
    assert config.model.lora is not None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    attach(model, config.model.lora, seed=0)
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", [("all-linear",), ("v_proj", "down_proj")], ids=["all", "two"])
def test_logprobs_equal_a_plain_forward(
    family: str,
    targets: tuple[str, ...],
    model_folder: Callable[[str], Path],
    config: MakeConfig,
) -> None:
    settings = config(lora={"targets": targets})
    engine = TorchEngine(model_folder(family), settings)
    weights = adapters(engine, 1)
    engine.load(weights, 0, share=True)
    model = adapted(model_folder(family), settings)
    for completion in drain(engine, requests(9)).values():
        expected = plain_logprobs(model, completion, weights)
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5, rtol=0)
    assert engine._flat.fast == (family != "llama-gelu")


@pytest.mark.parametrize("share", [True, False], ids=["in place", "copied"])
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_new_adapters_between_two_steps_end_no_sequence(kv: str, share: bool, folder: Path, config: MakeConfig) -> None:
    settings = config(generation={"slots": 4, "max_new_tokens": 24, "kv": kv})
    engine = TorchEngine(folder, settings)
    versions = adapters(engine, 1), adapters(engine, 2)
    model = adapted(folder, settings)
    engine.load(versions[0], 0, share=share)
    done = drain(engine, requests(9, max_new_tokens=20), at(6, lambda: engine.load(versions[1], 1, share=share)))
    spanning = 0
    apart = 0.0
    for completion in done.values():
        old, new = (plain_logprobs(model, completion, each) for each in versions)
        before = completion.versions == 0
        np.testing.assert_allclose(completion.logprobs[before], old[before], atol=2e-5, rtol=0)
        if kv == "recompute" or not before.any():
            np.testing.assert_allclose(completion.logprobs[~before], new[~before], atol=2e-5, rtol=0)
        if 0 < before.sum() < len(before):
            spanning += 1
            apart = max(apart, float(np.abs(completion.logprobs - new)[~before].max()))
    assert (len(done), spanning) == (9, 4)
    assert (apart > 1e-3) == (kv == "keep"), "kept keys are those of the old adapters"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_canary_holds_with_the_right_adapters_and_only_with_those(
    dtype: str, folder: Path, config: MakeConfig
) -> None:
    precision = {"precision": dtype}
    settings = config(model={"name": "tiny", "dtype": dtype, "lora": {"rank": 4, "alpha": 8.0}}, training=precision)
    trainer = PolicyTrainer(settings, folder)
    engine = TorchEngine(folder, settings)
    assert trainer.weights_spec == engine.spec
    trained = adapters(engine, 3)
    with torch.no_grad():
        for name, own in trainer.named_tensors().items():
            own.copy_(trained[name])
    canary = trainer.canary()
    distances = []
    for version, weights in enumerate((trained, adapters(engine, 4))):
        cast = {name: each.to(getattr(torch, dtype)) for name, each in weights.items()}
        engine.load(cast, version, share=True)
        distances.append(canary_distance(canary, engine.logprobs_after(np.array(canary.prompt))))
    assert distances[0] < (1e-4 if dtype == "float32" else 0.3)
    assert distances[1] > 2 * distances[0]
    assert distances[1] > 0.1


def test_an_engine_without_adapters_samples_nothing_and_refuses_a_whole_model(folder: Path, config: MakeConfig) -> None:
    engine = TorchEngine(folder, config())
    assert engine.version == NO_WEIGHTS
    engine.submit(*requests(1))
    assert not engine.active
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with pytest.raises(WeightsError, match=r"lack model\.layers\.0\.self_attn\.q_proj\.lora_A"):
        engine.load(dict(model.named_parameters()), 1, share=False)

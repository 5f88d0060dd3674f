"""Adapters on a device: in the forward of the engine, in a step of the trainer, and between both in bfloat16."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.sections.training_config import LoraConfig
from asyncrl.engines.canary_logprobs import canary_distance
from asyncrl.engines.generation.engine_interface import NO_WEIGHTS
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.models.lora import attach, published_tensors
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.training_step import run_step
from asyncrl.lanes.weights.slot_memory import DTYPES
from tests.gpu.device_engine import TOLERANCE, check_versions, engine_config, requests, run_steps
from tests.unit.engines.generation.conftest import model_folder as model_folder
from tests.unit.engines.generation.test_agreement_with_training import train_row

LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0}
STEPS = 6
ModelFolder = Callable[[str], Path]


def adapted_model(folder: Path, device: str, dtype: str, seed: int) -> Any:
    """A model of transformers with adapters that do something."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).to(device).eval()
    attach(model, LoraConfig(**LORA), seed=seed)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in published_tensors(model).values():
            tensor.copy_(0.05 * torch.randn(tensor.shape, generator=random))
    return model


@pytest.mark.parametrize("share", [True, False], ids=["in place", "copied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_new_adapters_reach_running_samples(device: str, dtype: str, share: bool, model_folder: ModelFolder) -> None:
    folder = model_folder("llama")
    engine = TorchEngine(folder, engine_config(device, dtype, LORA, kv="recompute"), NO_WEIGHTS)
    models = [adapted_model(folder, device, dtype, seed) for seed in (1, 2)]
    engine.submit(*requests())
    done = []
    for version, model in enumerate(models):
        engine.load(published_tensors(model), version, share=share)
        done += run_steps(engine, 10_000 if version else STEPS)
    assert len(done) == len(requests())
    assert check_versions(done, models, recomputed=True, within=TOLERANCE[dtype]) > 6


def test_a_step_changes_adapters_as_on_the_cpu(device: str, model_folder: ModelFolder) -> None:
    folder = model_folder("llama")
    engine = TorchEngine(folder, engine_config("cpu", lora=LORA), NO_WEIGHTS)
    engine.load(published_tensors(adapted_model(folder, "cpu", "float32", 1)), 0, share=False)
    engine.submit(*requests())
    rows = [train_row(completion) for completion in run_steps(engine)]
    here, there = (PolicyTrainer(engine_config(each, lora=LORA), folder) for each in ("cpu", device))
    frozen = {name: each.clone() for name, each in there.model.whole.named_parameters() if not each.requires_grad}
    expected = run_step(here, rows, 0, 0)
    found = run_step(there, rows, 0, 0)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-3, abs=1e-4)
    assert frozen
    assert all(torch.equal(there.model.whole.get_parameter(name), each) for name, each in frozen.items())
    changed = published_tensors(there.model.whole)
    for name, each in published_tensors(here.model.whole).items():
        torch.testing.assert_close(changed[name].cpu(), each, atol=1e-4, rtol=1e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_and_trainer_agree_on_samples_of_adapters(device: str, dtype: str, model_folder: ModelFolder) -> None:
    """A version of the trainer is sampled from and trained on; the canary and every token are compared."""
    folder = model_folder("llama")
    config = engine_config(device, dtype, LORA)
    trainer = PolicyTrainer(config, folder)
    engine = TorchEngine(folder, config, NO_WEIGHTS)
    with torch.no_grad():
        for name, tensor in published_tensors(adapted_model(folder, device, "float32", 1)).items():
            trainer.named_tensors()[name].copy_(tensor)
    engine.load(trainer.named_tensors(), 0, share=False)
    canary = trainer.canary()
    assert canary_distance(canary, engine.logprobs_after(np.array(canary.prompt))) < TOLERANCE[dtype]
    engine.submit(*requests())
    metrics = run_step(trainer, [train_row(completion) for completion in run_steps(engine)], 0, 0).metrics
    assert metrics["policy/logprob_difference_max"] < TOLERANCE[dtype]
    assert metrics["mismatch/kl"] < (1e-6 if dtype == "float32" else 1e-2)

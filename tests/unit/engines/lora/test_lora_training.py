"""A trainer with adapters: what trains, what a checkpoint holds, and the reference log-probs of its base model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.schema import Config
from asyncrl.engines.models.lora import adapted, fill_for_probe
from asyncrl.engines.training import models_with_heads
from asyncrl.engines.training.micro_batches import lay_out_rows
from asyncrl.engines.training.models_with_heads import frozen_logprobs, load_causal_model
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.errors import WeightsError
from tests.unit.engines.generation.conftest import make_model
from tests.unit.engines.training.tiny_training import make_rows, step

MakeConfig = Callable[..., Config]


def tensors(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in trainer.model.whole.named_parameters()}


def test_a_step_changes_adapters_and_nothing_else(folder: Path, config: MakeConfig) -> None:
    trainer = PolicyTrainer(config(), folder)
    before = tensors(trainer)
    step(trainer, make_rows())
    step(trainer, make_rows(seed=1))
    changed = {name for name, each in tensors(trainer).items() if not torch.equal(each, before[name])}
    assert changed == trainer.named_tensors().keys() == {t.name for t in trainer.weights_spec.tensors}
    moments = trainer.optimizer.parts[0].state_dict()["state"]
    assert len(moments) == len(changed) == 2 * 7 * 2


def test_a_resumed_trainer_goes_on_bit_for_bit(folder: Path, config: MakeConfig, tmp_path: Path) -> None:
    settings = config(lora={"dropout": 0.2})
    trainer = PolicyTrainer(settings, folder)
    step(trainer, make_rows())
    trainer.save(tmp_path, {"version": 1})
    written = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= written
    assert "model.safetensors" not in written
    random = torch.get_rng_state()
    step(trainer, make_rows(seed=1))
    torch.manual_seed(77)
    resumed, extra = PolicyTrainer.resume(settings, tmp_path, base=folder)
    assert extra == {"version": 1}
    assert torch.equal(torch.get_rng_state(), random)
    step(resumed, make_rows(seed=1))
    expected = tensors(trainer)
    assert all(torch.equal(each, expected[name]) for name, each in tensors(resumed).items())


def test_adapters_on_another_base_model_are_refused(folder: Path, config: MakeConfig, tmp_path: Path) -> None:
    trainer = PolicyTrainer(config(), folder)
    (tmp_path / "checkpoint").mkdir()
    trainer.save(tmp_path / "checkpoint", {})
    (tmp_path / "other").mkdir()
    other = make_model("llama", tmp_path / "other", seed=1)
    with pytest.raises(WeightsError, match="trained on another model"):
        PolicyTrainer.resume(config(), tmp_path / "checkpoint", base=other)


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_the_base_model_in_the_trainer_replaces_a_reference_service(
    kl_in: str, folder: Path, config: MakeConfig
) -> None:
    """Adapters after two steps: as if a service had computed the log-probs with a model of its own."""
    given: dict[str, Any] = {"kl": 0.3, "kl_in": kl_in, "kl_estimator": "k1" if kl_in == "reward" else "k3"}
    rows = make_rows()
    model = load_causal_model(folder, "cpu")
    found = []
    rows = [replace(rows[0], versions=rows[0].versions - 4), *rows[1:]]  # One has no token that trains.
    own = frozen_logprobs(model, rows, 1024)
    with_reference = [replace(row, reference_logprobs=each) for row, each in zip(rows, own, strict=True)]
    for by_trainer, last in ((True, rows), (False, with_reference)):
        settings = config(algorithm=given)
        assert not settings.reference_by_service
        trainer = PolicyTrainer(settings, folder)
        for seed in (3, 4):
            step(trainer, make_rows(seed=seed))
        if not by_trainer:
            whole = settings.model.model_copy(update={"lora": None})
            trainer.config = settings.model_copy(update={"model": whole})
            assert trainer.config.reference_by_service
        metrics = step(trainer, last).metrics
        found.append((metrics["policy/kl_reference"], tensors(trainer)))
        assert all(layer.applied for _, layer in adapted(trainer.model.whole))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6)
    assert abs(found[0][0]) > 1e-3
    for name, each in found[0][1].items():
        torch.testing.assert_close(each, found[1][1][name], atol=1e-5, rtol=1e-4)


def test_passes_that_are_computed_again_drop_the_same_inputs(
    folder: Path, config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several passes recompute each of them in the backward pass, and draw the masks of the first one."""
    found = []
    for recomputed in (True, False):
        trainer = PolicyTrainer(config(lora={"dropout": 0.5}), folder)
        fill_for_probe(trainer.model.whole)
        rows = [row for row in make_rows(4) if len(row.response_ids) > 1]
        spans = [np.array([1, 0, len(row.response_ids) - 1, 0], np.int32) for row in rows]
        rows = [replace(row, spans=own) for row, own in zip(rows, spans, strict=True)]
        padded = lay_out_rows(rows, torch.device("cpu"), budget=20)
        assert len(padded.passes) > 1
        if not recomputed:
            monkeypatch.setattr(models_with_heads, "checkpoint", lambda function, rows, **_: function(rows))
        torch.manual_seed(5)
        trainer.model.states(padded).square().sum().backward()
        found.append([parameter.grad for parameter in trainer.optimizer.parameters])
    for again, once in zip(*found, strict=True):
        torch.testing.assert_close(again, once)

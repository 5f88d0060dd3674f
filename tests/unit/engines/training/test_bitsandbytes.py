"""bitsandbytes' 8-bit AdamW trains on CPUs and goes on from a checkpoint bit for bit."""

import importlib.metadata
from pathlib import Path

import pytest
import torch

from asyncrl.config.sections.training_config import kept_numbers
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from tests.unit.engines.training.tiny_training import make_config, make_rows, same, step, weights

OPTIMIZER = {"optimizer": "adamw8bit", "optimizer_options": {"min_8bit_size": 256}, "weight_decay": 0.1}


def test_a_version_without_updates_on_cpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version
    version = "0.49.1"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if "bits" in name else installed(name))
    with pytest.raises(ValueError, match=r"bitsandbytes 0\.49\.1 is installed, and AdamW8bit is supported .* 0\.50"):
        make_config(training=OPTIMIZER)
    version = "0.50.2"
    make_config(training=OPTIMIZER)


def test_it_trains_with_8_bit_moments_and_resumes(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    config = make_config(training=OPTIMIZER)
    trainer = PolicyTrainer(config, tiny)
    before = weights(trainer)
    step(trainer, make_rows())
    assert not any(torch.equal(each, before[name]) for name, each in weights(trainer).items())
    (part,) = trainer.optimizer.parts
    moments = [state[name] for state in part.state.values() for name in ("state1", "state2")]
    large = sum(p.numel() for p in trainer.optimizer.parameters if p.numel() >= 256)
    found = sum(each.nbytes for each in moments if each.dtype == torch.uint8)
    assert found == 4 * kept_numbers("adamw8bit", {}) * large
    trainer.save(tmp_path, {})
    resumed, _ = PolicyTrainer.resume(config, tmp_path)
    for each in (trainer, resumed):
        step(each, make_rows(seed=1))
    assert same(weights(trainer), weights(resumed))

"""bitsandbytes' 8-bit AdamW trains on CPUs and goes on from a checkpoint bit for bit."""

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncrl.config.schema import Config
from asyncrl.config.sections.training_config import kept_numbers
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.training_step import run_step

OPTIMIZER = {"optimizer": "adamw8bit", "optimizer_options": {"min_8bit_size": 256}, "weight_decay": 0.1}


def version_is(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if "bits" in name else installed(name))


def test_a_version_without_updates_on_cpus_is_refused(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    version_is(monkeypatch, "0.49.1")
    with pytest.raises(
        ValueError, match=r"bitsandbytes 0\.49\.1 is installed, and AdamW8bit is supported from .* 0\.50"
    ):
        make_config(training=OPTIMIZER)
    version_is(monkeypatch, "0.50.2")
    make_config(training=OPTIMIZER)


def test_it_trains_with_8_bit_moments_and_resumes(
    tiny: Path, make_config: Callable[..., Config], make_rows: Callable, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    config = make_config(training=OPTIMIZER)
    trainer = PolicyTrainer(config, tiny)
    before = [parameter.clone() for parameter in trainer.optimizer.parameters]
    run_step(trainer, make_rows(), 1, 5)
    assert not any(torch.equal(a, b) for a, b in zip(before, trainer.optimizer.parameters, strict=True))
    (part,) = trainer.optimizer.parts
    moments = [state[name] for state in part.state.values() for name in ("state1", "state2")]
    large = sum(p.numel() for p in trainer.optimizer.parameters if p.numel() >= 256)
    found = sum(each.nbytes for each in moments if each.dtype == torch.uint8)
    assert found == 4 * kept_numbers("adamw8bit", {}) * large
    trainer.save(tmp_path, {})
    resumed, _ = PolicyTrainer.resume(config, tmp_path)
    for each in (trainer, resumed):
        run_step(each, make_rows(seed=1), 1, 5)
    pairs = zip(trainer.optimizer.parameters, resumed.optimizer.parameters, strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)

"""What a checkpoint holds of the trainer: model/, which transformers loads, and trainer.pt, which resumes it."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from asyncrl.engines.training.model import CausalModel
from asyncrl.engines.training.optimizer import Optimizer
from asyncrl.errors import JournalError

MODEL = "model"
TRAINER = "trainer.pt"


def write_state(directory: Path, model: CausalModel, optimizer: Optimizer, extra: dict[str, Any]) -> None:
    """Write and fsync model/ (safetensors, config, tokenizer) and trainer.pt (optimizer, RNG, `extra`).

    extra: plain values (str, int, float). The config is the one the model came with, not the one without dropout
    that it trains under.
    """
    folder = directory / MODEL
    model.whole.save_pretrained(folder)
    model.source_config.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    state = {"optimizer": optimizer.state(), "rng": torch.get_rng_state(), "extra": extra}
    torch.save(state, directory / TRAINER)
    sync_tree(directory)


def read_state(directory: Path, optimizer: Optimizer) -> dict[str, Any]:
    """Restore optimizer and RNG from trainer.pt; answers with `extra`. Builds tensors and plain values only."""
    path = directory / TRAINER
    if not path.exists():
        raise JournalError(f"checkpoint {directory} has no {TRAINER}: it is not one of the trainer's")
    state = torch.load(path, map_location="cpu", weights_only=True)
    optimizer.restore(state["optimizer"])
    torch.set_rng_state(state["rng"])
    extra: dict[str, Any] = state["extra"]
    return extra


def digests(directory: Path) -> dict[str, str]:
    """sha256 hex of every file below the directory, by relative path."""
    return {str(path.relative_to(directory)): _digest(path) for path in _files(directory)}


def sync_tree(directory: Path) -> None:
    """fsync every file and folder below, and the directory itself."""
    for path in [*directory.rglob("*"), directory]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""What a checkpoint holds of a trainer: model/, which transformers loads, and trainer.pt, which resumes it.

Both are the first rank's: data-parallel ranks hold the same weights and moments. Of each other rank there is
rank-N.pt, with what is its own.
"""

import hashlib
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from asyncrl.engines.training.model import LoadedModel
from asyncrl.engines.training.optimizer import Optimizer
from asyncrl.engines.training.ranks import Ranks
from asyncrl.errors import ConfigError, JournalError
from asyncrl.objectives.kl import KlCoefficient
from asyncrl.objectives.lagrangian import Multiplier

MODEL = "model"
TRAINER = "trainer.pt"


def write_state(
    directory: Path,
    model: LoadedModel,
    optimizer: Optimizer,
    numbers: Mapping[str, float],
    extra: dict[str, Any],
    ranks: int,
) -> None:
    """Write and fsync model/ (safetensors, config, tokenizer) and trainer.pt (optimizer, RNG, `numbers`, `extra`).

    numbers: those of the loss that move from step to step, `kl` and `multiplier`. extra: plain values (str, int,
    float). ranks: how many write the checkpoint. The config is the one the model came with, not the one without
    dropout that it trains under.
    """
    folder = directory / MODEL
    model.whole.save_pretrained(folder)
    model.source_config.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    state = {"optimizer": optimizer.state(), "rng": torch.get_rng_state(), "extra": extra, "ranks": ranks}
    state.update(numbers)
    _save(state, directory / TRAINER)
    sync_tree(directory)


def write_own_state(directory: Path, rank: int) -> None:
    """Write and fsync what a rank but the first adds to a checkpoint."""
    path = directory / _own_file(rank)
    _save({"rng": torch.get_rng_state()}, path)
    for each in (path, directory):
        _sync(each)


def read_state(
    directory: Path,
    optimizer: Optimizer,
    kl: KlCoefficient | None,
    ranks: Ranks,
    multiplier: Multiplier | None = None,
) -> dict[str, Any]:
    """Restore optimizer, RNG, the multiplier of costs and, where it is adaptive, the KL coefficient; answers with
    `extra`.

    Builds tensors and plain values only.

    Raises:
        JournalError: the directory is no checkpoint of a trainer.
        ConfigError: it is of another number of ranks, and what each of them kept for itself differs.
    """
    if not (directory / TRAINER).exists():
        raise JournalError(f"checkpoint {directory} has no {TRAINER}: it is not one of the trainer's")
    state = _load(directory / TRAINER)
    others = [_load(directory / _own_file(rank)) for rank in range(1, state.get("ranks", 1))]
    optimizer.restore(state["optimizer"])
    torch.set_rng_state(_own_random_state([each["rng"] for each in (state, *others)], ranks, directory))
    if kl is not None and kl.target is not None:
        kl.value = state["kl"]
    if multiplier is not None and "multiplier" in state:
        multiplier.value = state["multiplier"]
    extra: dict[str, Any] = state["extra"]
    return extra


def _own_random_state(states: list[Tensor], ranks: Ranks, directory: Path) -> Tensor:
    if len(states) == ranks.size:
        return states[ranks.rank]
    if not all(torch.equal(state, states[0]) for state in states):
        raise ConfigError(
            f"training.layout_dp = {ranks.size}: checkpoint {directory} is of {len(states)} ranks, each with random "
            f"numbers of its own; write {len(states)}"
        )
    return states[0]


def _load(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


class _Target(io.BufferedWriter):
    """A file to write to. failed: why a write of it failed, which torch tells as an error of its own format."""

    failed: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failed = error
            raise


def _save(state: dict[str, Any], path: Path) -> None:
    """Raises OSError when the disk does not take it."""
    with _Target(io.FileIO(path, "wb")) as target:
        try:
            torch.save(state, target)
        except RuntimeError:
            if target.failed is None:
                raise
            raise target.failed from None


def _own_file(rank: int | Literal["*"]) -> str:
    return f"rank-{rank}.pt"


def digests(directory: Path, rank: int = 0) -> dict[str, str]:
    """sha256 hex of every file of this rank's below the directory, by relative path. Others may be writing theirs."""
    if rank > 0:
        return {_own_file(rank): _digest(directory / _own_file(rank))}
    others = set(directory.glob(_own_file("*")))
    return {str(path.relative_to(directory)): _digest(path) for path in _files(directory) if path not in others}


def sync_tree(directory: Path) -> None:
    """fsync every file and folder below, and the directory itself."""
    for path in [*directory.rglob("*"), directory]:
        _sync(path)


def _sync(path: Path) -> None:
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

"""The files of a trainer in a checkpoint: model/, which transformers or peft loads, and trainer.pt, which resumes it.
Rank 0 writes both, with the whole of weights and moments. Others write rank-N.pt with their random state."""

import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from asyncrl.engines.models.model_folder import sync_to_disk
from asyncrl.engines.training.models_with_heads import LoadedModel
from asyncrl.engines.training.optimizer import Optimizer
from asyncrl.engines.training.ranks.rank_mesh import RankMesh
from asyncrl.engines.training.ranks.shards import own_part
from asyncrl.engines.training.ranks.stage_weights import held_tensors
from asyncrl.errors import ConfigError, JournalError

MODEL = "model"
TRAINER = "trainer.pt"


def write_model(folder: Path, model: LoadedModel, weights: Mapping[str, Tensor] | None = None) -> None:
    """Writes safetensors, tokenizer, and the config that came with the model, dropout included. weights: the whole
    ones, where those of the model are shards."""
    model.whole.save_pretrained(folder, state_dict=weights)
    model.source_config.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)


def write_state(
    directory: Path, optimizer: Optimizer, ranks: int, states: Sequence[Mapping[str, Any]], **state: Any
) -> None:
    """Writes trainer.pt (optimizer with its whole `states`, RNG, number of `ranks`, and `state`, which is tensors and
    plain values), and fsyncs it with all other files of the directory."""
    state |= {"optimizer": optimizer.saved(states)}
    _save({**state, "rng": torch.get_rng_state(), "ranks": ranks}, directory / TRAINER)
    for path in [*directory.rglob("*"), directory]:
        sync_to_disk(path)


def write_own_state(directory: Path, rank: int) -> None:
    """Writes and fsyncs the file of a rank other than 0."""
    _save({"rng": torch.get_rng_state()}, directory / f"rank-{rank}.pt")
    sync_to_disk(directory / f"rank-{rank}.pt")
    sync_to_disk(directory)


def read_state(directory: Path, optimizer: Optimizer, mesh: RankMesh) -> dict[str, Any]:
    """Restores optimizer and RNG, and returns all that trainer.pt holds. Raises JournalError when the directory is not
    the checkpoint of a trainer, and ConfigError when another number of ranks with different states wrote it."""
    if not (directory / TRAINER).exists():
        raise JournalError(f"checkpoint {directory} has no {TRAINER}: it is not the checkpoint of a trainer")
    state = _load(directory / TRAINER)
    others = [_load(directory / f"rank-{rank}.pt") for rank in range(1, state.get("ranks", 1))]
    optimizer.load(state["optimizer"])
    random = [each["rng"] for each in (state, *others)]
    if len(random) != mesh.size and not all(torch.equal(each, random[0]) for each in random):
        raise ConfigError(
            f"{len(random)} ranks with different random states wrote checkpoint {directory}, and training.layout has "
            f"{mesh.size}; write one of {len(random)}"
        )
    torch.set_rng_state(random[mesh.rank if len(random) == mesh.size else 0])
    return state


def _load(path: Path) -> dict[str, Any]:
    return dict(torch.load(path, map_location="cpu", weights_only=True))


class _CheckpointFile(io.BufferedWriter):
    """Keeps the OSError of a failed write in `failed`, because torch.save hides it behind an error of its format."""

    failed: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failed = error
            raise


def _save(state: dict[str, Any], path: Path) -> None:
    """Saves the state with torch. Raises OSError when a write fails."""
    with _CheckpointFile(io.FileIO(path, "wb")) as file:
        try:
            torch.save(state, file)
        except RuntimeError:
            if file.failed is None:
                raise
            raise file.failed from None


def file_digests(directory: Path, rank: int = 0) -> dict[str, str]:
    """Returns the sha256 (hex) of each of this rank's files by relative path; other ranks may still write theirs."""
    paths = [directory / f"rank-{rank}.pt"]
    if rank == 0:
        others = set(directory.glob("rank-*.pt"))
        paths = [path for path in sorted(directory.rglob("*")) if path.is_file() and path not in others]
    found = {}
    for path in paths:
        with path.open("rb") as file:
            found[str(path.relative_to(directory))] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, float]]:
    """Returns XXH3 of the bytes of each tensor, and its Euclidean norm; of a sharded one those of this rank's part, and
    of those of other pipeline stages nothing."""
    found = {}
    for name, tensor in held_tensors(tensors).items():
        values = own_part(tensor).detach().cpu().contiguous()
        digest = xxh3_64_hexdigest(values.view(torch.uint8).numpy().data) if values.dim() else str(values.item())
        found[name] = (digest, float(values.double().norm()))
    return found

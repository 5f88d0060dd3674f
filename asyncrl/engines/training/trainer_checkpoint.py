"""The files of a trainer in a checkpoint.

model/       config, tokenizer, and weights or adapters, which transformers or peft loads;   by rank 0
             before the first update links to the weights that the run began with
trainer.pt   what resumes it: optimizer, random state, version                               by rank 0
rank-N.pt    random state                                                                    by all other ranks
parts/       in place of weights in model/ and moments in trainer.pt, where ranks            by every rank
             share out the weights: the parts of each, which ranks of any layout resume
"""

import asyncio
import hashlib
import io
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from asyncrl.concurrency import start_task
from asyncrl.config.install_hints import program
from asyncrl.config.schema import TrainingConfig
from asyncrl.config.sections.training_config import LoraConfig
from asyncrl.engines.models.lora import write_adapters
from asyncrl.engines.models.model_folder import (
    ADAPTER_CONFIG,
    BASE,
    INDEX,
    PARTS,
    sync_to_disk,
    weight_files,
    write_base,
)
from asyncrl.engines.models.prompt_pictures import PROCESSOR
from asyncrl.engines.models.tensor_parts import Kind, part_file, stored_tensors, write_parts
from asyncrl.engines.ranks.pipeline import held_tensors
from asyncrl.engines.ranks.rank_mesh import RankMesh
from asyncrl.engines.ranks.shards import Parts, own_part
from asyncrl.engines.training.models_with_heads import LoadedModel
from asyncrl.engines.training.optimizer import Optimizer, OtherWeights
from asyncrl.errors import ConfigError, JournalError, Refused, WeightsError
from asyncrl.protocols.messages import Checkpointed

CHECKPOINTS = "checkpoints"
MODEL = "model"
TRAINER = "trainer.pt"
DIGESTS_AT_A_TIME = 4
HELD_EXACTLY = {"F32", "BF16", "F16"}
"""Types of stored weights, by their names in safetensors, that float32 holds to the last bit."""
GIVES_WAY_FROM = 64 << 20
NICENESS = 15
"""Bytes of tensors from which a copy is written by a thread with this niceness: where no core is free it then takes a
thirtieth of the time of one from a step, and not half. To write smaller copies is mostly Python: a thread that gives
way while it holds the interpreter's lock would delay the step."""
BASE_TOLERANCE = 0.01
"""Largest difference of log-probs of likely tokens, in nats, between a model and itself after a resume, perhaps on
another machine or device. Another base model differs by far more."""


class AdaptedModel(NamedTuple):
    """Describes adapters, and the model that they belong to by the digest of its weights."""

    lora: LoraConfig
    folder: Path
    digest: str


def write_model(
    model: LoadedModel,
    weights: Mapping[str, Tensor] | None,
    adapted: AdaptedModel | None,
    prepared: Path | None,
    directory: Path,
) -> None:
    """Writes model/ below `directory` while steps go on: nothing is read that they change. Safetensors of the weights,
    unless they are None because they are in parts, tokenizer, and the config that came with the model, dropout
    included; or adapters, and what names their base. prepared: a folder with the same weights, to which links lead."""
    folder = directory / MODEL
    if adapted is None:
        linked = [] if prepared is None else _linkable(prepared)
        if weights is not None and not linked:
            model.whole.save_pretrained(folder, state_dict=weights)
        elif model.whole.can_generate():
            model.whole.generation_config.save_pretrained(folder)
        model.source_config.save_pretrained(folder)
        if prepared is not None and linked:
            _link(prepared, linked, folder)
    else:
        assert weights is not None, "adapters are gathered"
        write_adapters(folder, model.whole, adapted.lora, str(adapted.folder), weights)
        write_base(directory, adapted.folder, adapted.digest)
    model.tokenizer.save_pretrained(folder)
    if model.processor is not None:
        (folder / PROCESSOR).write_bytes(model.processor)


def _linkable(prepared: Path) -> list[str]:
    """Returns the weight files of a model folder; none where a checkpoint has to hold weights itself: they are not in
    safetensors, lie elsewhere, or have another type, which float32 rounds or which a quantizer made."""
    names = weight_files(prepared)
    for name in names:
        with safe_open(prepared / name, framework="pt") as file:
            types = {file.get_slice(tensor).get_dtype() for tensor in file.keys()}  # noqa: SIM118
        if Path(name).name != name or not types <= HELD_EXACTLY:
            return []
    return names


def _link(prepared: Path, names: Sequence[str], folder: Path) -> None:
    """Makes links to weight files. Those to RUN/model from RUN/checkpoints/VERSION/model are relative: so the run can
    be moved."""
    for name in names:
        target = prepared.absolute() / name
        inside = Path("../../../model", name)
        is_inside = (folder / inside).exists() and (folder / inside).samefile(target)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(inside if is_inside else target)
    if (prepared / INDEX).is_file():
        shutil.copyfile(prepared / INDEX, folder / INDEX)
    for path in (*(prepared / name for name in names), prepared, prepared.parent):
        if os.access(path, os.W_OK):  # Perhaps it was just made; what only others write was there before.
            sync_to_disk(path)


@dataclass(frozen=True, slots=True)
class StateCopy:
    """The state of a trainer in the memory of the host, which is written while steps go on. state: tensors and plain
    values. model: writes model/ and what describes its base model; None at ranks other than the first. parts: of
    weights and moments. ranks: number of those that write parts."""

    state: Mapping[str, Any]
    model: Callable[[Path], None] | None
    rank: int = 0
    parts: Parts = field(default_factory=dict)
    ranks: int = 1

    def write(self, directory: Path) -> dict[str, str]:
        """Writes all files, fsynced. Returns the sha256 (hex) of each by relative path. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        paths: list[Path] = []
        if self.model is not None:
            self.model(directory)
            paths = [directory / MODEL, *sorted((directory / MODEL).rglob("*")), *directory.glob(BASE)]
        files = [path for path in paths if path.is_file()]
        own = directory / (TRAINER if self.model is not None else f"rank-{self.rank}.pt")
        found = {own.name: _save(self.state, own)}
        with ThreadPoolExecutor(DIGESTS_AT_A_TIME) as threads:
            parts = [threads.submit(self._write_parts, directory / PARTS, kind) for kind in self.parts]
            found |= zip([str(path.relative_to(directory)) for path in files], threads.map(_digest, files), strict=True)
            found |= dict(each.result() for each in parts)
        for path in [*paths, own, *([directory / PARTS] if self.parts else []), directory]:
            if not path.is_symlink():
                sync_to_disk(path)
        return found

    def write_beside_steps(self, directory: Path) -> dict[str, str]:
        """Writes all files, as `write` does, while steps go on: a large copy gives way to threads that compute."""
        held = sum(each.nbytes for each in _tensors([self.state, *self.parts.values()]))
        if held < GIVES_WAY_FROM:
            return self.write(directory)
        with ThreadPoolExecutor(1, "files of a checkpoint", initializer=_give_way) as own:
            return own.submit(self.write, directory).result()

    def _write_parts(self, folder: Path, kind: Kind) -> tuple[str, str]:
        """Writes a file, fsynced. Returns its path in the checkpoint, and its digest."""
        folder.mkdir(exist_ok=True)
        path = folder / part_file(self.rank, kind)
        with _CheckpointFile(path) as file:
            write_parts(file, self.parts[kind], self.ranks)
        sync_to_disk(path)
        return f"{PARTS}/{path.name}", file.digest.hexdigest()


@dataclass(slots=True)
class HeldCopy:
    """A copy that a service holds until it is written. copy: None once it was. settings: say whether training goes on
    meanwhile. A call that ends early does not end the writing, and a repeated one gets its answer."""

    incarnation: int
    version: int
    chain: str
    copy: StateCopy | None
    settings: TrainingConfig
    _writing: "asyncio.Task[Checkpointed | OSError | SafetensorError] | None" = None

    async def write(self, directory: Path, tasks: asyncio.TaskGroup, below: str = "") -> Checkpointed:
        """Writes the files on a thread. tasks: of the worker. below: folder of the files. Raises OSError, and
        SafetensorError of a full disk."""
        if self._writing is None:
            self._writing = start_task(tasks, self._write(directory, below), f"files of version {self.version}")
        made = await asyncio.shield(self._writing)
        if not isinstance(made, Checkpointed):
            self._writing = None
            raise made
        return made

    async def _write(self, directory: Path, below: str) -> Checkpointed | OSError | SafetensorError:
        assert self.copy is not None, "it is written once"
        try:
            write = self.copy.write_beside_steps if self.settings.background_checkpoints else self.copy.write
            files = await asyncio.to_thread(write, directory / below)
        except (OSError, SafetensorError) as error:
            return error
        self.copy = None
        named = {str(PurePosixPath(below, name)): digest for name, digest in files.items()}
        return Checkpointed(self.version, self.chain, named)


def copy_of(held: HeldCopy | None, incarnation: int, version: int) -> HeldCopy:
    """Returns the copy of this version. Raises Refused where another one, or none, is held."""
    if held is None or (held.incarnation, held.version) != (incarnation, version):
        found = "none" if held is None else f"one of version {held.version} of incarnation {held.incarnation}"
        raise Refused(f"no copy of version {version} of incarnation {incarnation} can be written: {found} is held")
    return held


def whole_state(optimizer: Optimizer, ranks: int, states: Sequence[Mapping[str, Any]], **state: Any) -> dict[str, Any]:
    """Returns what trainer.pt holds: optimizer with its whole `states`, RNG, number of `ranks`, and `state`."""
    return {**state, "optimizer": optimizer.saved(states), **own_state(), "ranks": ranks}


def refuse_changed_base(adapters: Path, base: Path, distance: float) -> None:
    """Raises WeightsError when the model in `base` is not the one that adapters were trained on. distance: of its
    log-probs, with the adapters, from the canary that was saved beside them."""
    if not distance <= BASE_TOLERANCE:
        raise WeightsError(
            f"the adapters in {adapters} were trained on another model than that in {base}: log-probs differ by "
            f"{distance:.2g} nats; put back the model that the run began with, or start anew with another --run-dir"
        )


def own_state() -> dict[str, Any]:
    """Returns the state that ranks do not share."""
    return {"rng": torch.get_rng_state()}


def read_state(directory: Path, optimizer: Optimizer, mesh: RankMesh) -> dict[str, Any]:
    """Restores optimizer and RNG, and returns all that trainer.pt holds. Raises JournalError when the directory is not
    the checkpoint of a trainer, and ConfigError when another number of ranks with different states wrote it, unless
    they are as many as hold one copy here: then each copy takes their random states."""
    if not (directory / TRAINER).exists():
        raise JournalError(f"checkpoint {directory} has no {TRAINER}: it is not the checkpoint of a trainer")
    state = _load(directory / TRAINER)
    stored = stored_tensors(directory, "moments") if (directory / PARTS).is_dir() else {}
    others = [_load(directory / f"rank-{rank}.pt") for rank in range(1, state.get("ranks", 1))]
    try:
        optimizer.load(state["optimizer"], stored)
    except OtherWeights as other:
        raise ConfigError(
            f"the optimizer's state in checkpoint {directory} was written by another version of asyncrl, for weights "
            f"that were numbered in another way: it has {other}. Go on with that version, or start anew"
            f"{_anew(directory, has_model='modules' not in state)}"
        ) from None
    random = [each["rng"] for each in (state, *others)]
    own = {mesh.parts: mesh.part, mesh.size: mesh.rank}.get(len(random))
    if own is None and not all(torch.equal(each, random[0]) for each in random):
        raise ConfigError(
            f"{len(random)} ranks with different random states wrote checkpoint {directory}, and {mesh.key} has "
            f"{mesh.size}; write one of {len(random)}"
        )
    torch.set_rng_state(random[own or 0])
    return state


def _anew(directory: Path, *, has_model: bool) -> str:
    """Returns the commands that start a run from the weights of a checkpoint, or of its critic. has_model: they can be
    exported; a policy that acts begins at random."""
    checkpoint = directory if directory.parent.name == CHECKPOINTS else directory.parent
    run = quote(str(checkpoint.parents[1]))
    merge = " --merge" if (checkpoint / MODEL / ADAPTER_CONFIG).exists() else ""
    export = f"`{program()} export {run} MODEL --step {checkpoint.name}{merge}`, then " if has_model else ""
    model = " --model.name MODEL" if has_model else ""
    return (
        f"{' from its weights' if has_model else ''}: {export}`{program()} run {run}/config.toml --run-dir NEW{model}`"
    )


def _load(path: Path) -> dict[str, Any]:
    # Mapped, so that a rank that takes parts of moments never holds the whole ones.
    return dict(torch.load(path, map_location="cpu", weights_only=True, mmap=True))


class _CheckpointFile(io.BufferedWriter):
    """Digests what is written, and keeps the OSError of a failed write in `failed`, because torch.save hides it behind
    an error of its format."""

    failed: OSError | None = None

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.digest = hashlib.sha256()

    def write(self, data: Any, /) -> int:
        self.digest.update(data)
        try:
            return super().write(data)
        except OSError as error:
            self.failed = error
            raise


def _save(state: Mapping[str, Any], path: Path) -> str:
    """Saves the state with torch, which writes from the first byte to the last. Returns the sha256 (hex) of the file.
    Raises OSError when a write fails."""
    with _CheckpointFile(path) as file:
        try:
            torch.save({**state}, file)
        except RuntimeError:
            if file.failed is None:
                raise
            raise file.failed from None
        return file.digest.hexdigest()


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors of nested mappings and sequences."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors([*value.values()])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _give_way() -> None:
    """Lowers the priority of this thread, and of those that it starts, on Linux; other systems have none of threads."""
    if sys.platform == "linux":
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, max(NICENESS, os.getpriority(os.PRIO_PROCESS, own)))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, float]]:
    """Returns XXH3 of the bytes of each tensor, and its Euclidean norm; of a sharded one those of this rank's part, and
    of those of other pipeline stages nothing."""
    found = {}
    for name, tensor in held_tensors(tensors).items():
        values = own_part(tensor).detach().cpu().contiguous()
        digest = xxh3_64_hexdigest(values.view(torch.uint8).numpy().data) if values.dim() else str(values.item())
        found[name] = (digest, float(values.double().norm()))
    return found

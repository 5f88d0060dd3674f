"""Ranks of several layouts in turn, forked from this process: they save a checkpoint in one layout, resume it in
another one, and leave what they held in files.

python layout_process.py FOLDER
"""

import json
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from asyncrl.config.schema import Config, GenerationConfig
from asyncrl.engines.ranks.pipeline import held_tensors, owner_of
from asyncrl.engines.ranks.rank_mesh import RankMesh
from asyncrl.engines.ranks.shards import HeldModel, own_part, own_ranges
from asyncrl.engines.ranks.weight_gathering import gather_for_generation, regrouping_of
from asyncrl.engines.training.models_with_heads import ValueModel, load_score_model
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.training_step import run_step
from asyncrl.lanes.weights.slot_memory import DTYPES, fill
from asyncrl.protocols.rank_layout import Layout
from tests.unit.engines.training.ranks.forked_ranks import run_ranks
from tests.unit.engines.training.ranks.stage_process import rows_of

Made = TypeVar("Made", PolicyTrainer, ValueModel)


class TensorBytes(TorchDispatchMode):
    """Counts bytes of tensors that live at once, of those that were made in its scope. peak: the most."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = {each.__name__ for each in types}
        if "DTensor" in names:
            return NotImplemented  # It comes back with the parts.
        found = function(*args, **(kwargs or {}))
        if names - {"Tensor", "Parameter"}:
            return found  # A FakeTensor has no memory, and one that is gathered was counted as it was made.
        given = {each.untyped_storage().data_ptr() for each in _tensors([args, kwargs or {}])}
        for tensor in _tensors(found):
            storage = tensor.untyped_storage()
            if tensor.is_meta or storage.data_ptr() in given or id(storage) in self._known:
                continue
            self._known.add(id(storage))
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._freed, id(storage), storage.nbytes())
        return found

    def _freed(self, number: int, size: int) -> None:
        self._known.discard(number)
        self.live -= size


def _tensors(value: Any) -> list[Tensor]:
    """Returns the tensors with memory of their own, in nested containers."""
    if isinstance(value, Tensor):
        return [value] if type(value) in (Tensor, torch.nn.Parameter) else []
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def whole(trainer: PolicyTrainer) -> dict[str, Any]:
    """Returns at rank 0 what all ranks together hold, gathered as adapters are."""
    held = HeldModel(trainer.model.whole, trainer.model.stage_weights, trainer.mesh)
    weights = trainer.model.whole.state_dict(keep_vars=True)
    model, states = held.gathered(weights, trainer.optimizer.states(), copy=True)
    updates = trainer.optimizer.updates
    return {"model": model, "states": [each["state"] for each in states or []], "updates": updates}


def held_bytes(whole: Any) -> dict[str, int]:
    """Returns bytes of the weights and buffers that this rank holds, and of the largest one as a whole."""
    held = {id(each): each for each in (*whole.parameters(), *whole.buffers()) if not each.is_meta}
    largest = max(each.numel() * each.element_size() for each in whole.parameters())
    return {"share": sum(own_part(each.detach()).nbytes for each in held.values()), "largest": largest}


def loaded(load: Callable[[], Made], kind: Any, folder: Path) -> tuple[Made, dict[str, Any]]:
    """Loads what has a model. Returns bytes: of this rank's share of the weights, of the largest tensor, and that
    loading took; and the names of weights and buffers that are not those of the model as transformers loads it. kind:
    the class of transformers."""
    with TensorBytes() as loading:
        made = load()
    whole = made.model.whole if isinstance(made, PolicyTrainer) else made.whole
    expected, found = (
        dict(each.named_parameters(remove_duplicate=False)) | dict(each.named_buffers())
        for each in (kind.from_pretrained(folder, dtype=torch.float32), whole)
    )
    own = {name: each for name, each in found.items() if not each.is_meta}
    different = [
        name
        for name, each in own.items()
        if not torch.equal(own_part(each.detach()), expected[name].detach()[own_ranges(each)])
    ]
    return made, {"load": loading.peak, **held_bytes(whole), "different": different, "compared": len(own)}


def judged(folder: Path, mesh: RankMesh) -> dict[str, Any]:
    """Returns what `loaded` does of a reward model, with the scores of a few rows. Bytes are those of loading without
    the pass that checks the head, which gathers weights of shards as every pass does."""

    def load() -> ValueModel:
        model = load_score_model(folder, "cpu", in_parts=mesh.is_parted)
        model.share_out(mesh)
        return model

    with patch.object(ValueModel, "_has_known_output", return_value=True):
        model, loading = loaded(load, AutoModelForSequenceClassification, folder)
    return {**loading, "scores": scores_of(model), "loaded whole": model.loaded_whole}


@torch.no_grad()
def scores_of(model: ValueModel) -> Tensor:
    return model.scores([np.concatenate([row.prompt_ids, row.response_ids]) for row in rows_of(0)])


def saved(trainer: PolicyTrainer, folder: Path) -> dict[str, int]:
    """Writes a checkpoint of the state before a further step, and publishes. Returns bytes: of this rank's share of the
    weights, of the largest tensor as it is published, and that copying, writing and publishing took."""
    named = trainer.named_tensors()
    spec = trainer.weights_spec
    held = {id(each): each for each in held_tensors(named).values()}
    with TensorBytes() as copying:
        copy = trainer.copy_state({"version": 2})
    assert run_step(trainer, rows_of(4), 0, 4).updates, "the step changes what was copied"
    with TensorBytes() as writing:
        copy.write(folder)
    slot = {each.name: torch.empty(each.shape, dtype=DTYPES[spec.dtype]) for each in spec.tensors}
    with TensorBytes() as publishing:
        fill(slot, named) if trainer.mesh.rank == 0 else trainer.gather_published()
    return {
        "share": sum(own_part(each).nbytes for each in held.values()),
        "largest": max(each.nbytes for each in slot.values()),
        "copy": copying.peak,
        "write": writing.peak,
        "publish": publishing.peak,
    }


def sampling(trainer: PolicyTrainer, layout: Layout) -> dict[str, Any]:
    """Gathers what this rank samples with; also returns the bytes of it that this rank gives to others."""
    named = trainer.named_tensors()
    spec = trainer.weights_spec
    gathered, received = gather_for_generation(named, spec, regrouping_of(layout, GenerationConfig()), trainer.mesh)
    held = held_tensors({each.name: named[each.name] for each in spec.tensors}).items()
    own = [each for name, each in held if owner_of(named[name]) == trainer.mesh.stages.rank]
    size = DTYPES[spec.dtype].itemsize
    return {"gathered": gathered, "received": received, "own": sum(own_part(each).numel() * size for each in own)}


def run_layout(layout: Layout, folder: Path, number: int, mesh: RankMesh) -> None:
    """Saves, or resumes what another layout has saved."""
    trial = json.loads((folder.parent / "trial.json").read_text())
    config = Config.model_validate(trial["config"])
    if number == 1:
        with TensorBytes() as resuming:
            trainer, extra = PolicyTrainer.resume(config, folder, mesh)
        found = {
            "whole": whole(trainer),
            "extra": extra,
            "bytes": {"load": resuming.peak, **held_bytes(trainer.model.whole)},
        }
    else:
        model = Path(trial["model"])
        trainer, loading = loaded(lambda: PolicyTrainer(config, model, mesh), AutoModelForCausalLM, model)
        for version in range(2):
            run_step(trainer, rows_of(version), 0, version)
        found = {"sampling": sampling(trainer, layout), "whole": whole(trainer), "bytes": saved(trainer, folder)}
        found["loading"] = loading
        if layout.pp == layout.ep == 1:
            found["judge"] = judged(Path(trial["judge"]), mesh)
    torch.save(found, folder.with_name(f"{folder.name}-{number}-{mesh.rank}.pt"))
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    for name, layouts in json.loads((root / "trial.json").read_text())["layouts"].items():
        for number, sizes in enumerate(layouts):
            if sizes:
                layout = Layout(generation_pp=1, generation_tp=1, **sizes)
                codes = run_ranks(layout, partial(run_layout, layout, root / name, number))
                assert codes == [0] * layout.size, f"ranks of {name} ended with {codes}"

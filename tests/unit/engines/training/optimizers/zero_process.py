"""Two ranks that DeepSpeed shares a model out over, forked from this process: they train each trial, save, resume, and
leave what they saw in files.

python zero_process.py FOLDER
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.config.schema import Config
from asyncrl.engines.ranks.pipeline import held_tensors
from asyncrl.engines.ranks.rank_mesh import RankMesh
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import run_step
from asyncrl.engines.training.zero_optimizer import noted_modules
from asyncrl.lanes.weights.slot_memory import whole_tensor
from asyncrl.protocols.rank_layout import Layout
from tests.unit.engines.training.ranks.forked_ranks import run_ranks
from tests.unit.engines.training.ranks.stage_process import rows_of

STEPS = 20


def share(rank: int, version: int) -> list[TrainRow]:
    """Returns an uneven share of the rows, none for a rank in turn."""
    rows = rows_of(version)
    first = (len(rows), 0, len(rows) // 3)[version % 3]
    return [rows[:first], rows[first:]][rank]


def step_of(trainer: PolicyTrainer, version: int) -> list[Any]:
    """Trains a step, and returns what it reported of all ranks."""
    outcome = run_step(trainer, share(trainer.mesh.rank, version), 0, version)
    return [outcome.updates, outcome.skipped, outcome.trained, outcome.metrics]


def run_trial(mesh: RankMesh, folder: Path, trial: dict[str, Any]) -> dict[str, Any]:
    """Returns what a rank saw. held, gathered: numbers of each weight that it has between steps, for others and where
    the model computes. noted: modules that DeepSpeed notes as running then."""
    object.__setattr__(mesh, "zero", trial["config"]["training"]["deepspeed"]["stage"])
    config = Config.model_validate(trial["config"])
    trainer = PolicyTrainer(config, Path(trial["model"]), mesh)
    noted = len(noted_modules())
    steps = [step_of(trainer, version) for version in range(STEPS)]
    gathered = sum(each.numel() for each in trainer.model.whole.parameters())
    named = trainer.named_tensors()
    weights = {each.name: whole_tensor(named[each.name]).clone() for each in trainer.weights_spec.tensors}
    held = {name: each.numel() for name, each in held_tensors(named).items()}
    canary = trainer.canary()
    noted = len(noted_modules()) - noted
    trainer.save(folder, {"steps": STEPS})
    dist.barrier()
    resumed, extra = PolicyTrainer.resume(config, folder, mesh)
    again = step_of(resumed, STEPS)
    following = step_of(trainer, STEPS)
    other, _ = PolicyTrainer.resume(config, Path(trial["of_one_rank"]), mesh)
    return {
        "steps": steps,
        "weights": weights,
        "held": held,
        "gathered": gathered,
        "noted": noted,
        "canary": canary.logprobs,
        "extra": extra,
        "again": again,
        "next": following,
        "after_one_rank": step_of(other, STEPS),
    }


def run_trials(mesh: RankMesh) -> None:
    folder = Path(sys.argv[1])
    for name, trial in json.loads((folder / "trials.json").read_text()).items():
        torch.save(run_trial(mesh, folder / name, trial), folder / f"{name}-{mesh.rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["DS_ACCELERATOR"] = "cpu"
    codes = run_ranks(Layout(dp=2), run_trials, 120.0)
    assert codes == [0, 0], f"ranks ended with {codes}"

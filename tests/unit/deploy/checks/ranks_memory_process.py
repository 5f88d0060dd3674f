"""Two ranks, forked from this process: each trains two steps of every trial and prints what `asyncrl plan` predicts of
it and what it took, as torch counts it: tensors between steps, and the most beside them at one moment of the second.

python ranks_memory_process.py MODEL TRIALS, where TRIALS are tables of `training` in JSON
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asyncrl.bench.benchmark_model import write_model
from asyncrl.bench.packed_rows import INCARNATION, StepShape, rows_of
from asyncrl.config.placement import rank_layout
from asyncrl.config.schema import Config
from asyncrl.deploy.checks.memory_needs import TrainedModel
from asyncrl.deploy.checks.run_prompts import RowLengths
from asyncrl.engines.models.model_shape import shape_of
from asyncrl.engines.ranks.rank_mesh import RankMesh
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.training_step import run_step
from asyncrl.protocols.rank_layout import Layout
from tests.unit.deploy.checks.torch_memory import NOT_OF_TORCH, held_bytes, most_beside
from tests.unit.engines.training.ranks.forked_ranks import run_ranks

ROWS = StepShape(64, 64, 32, 1)
SIZES = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_key_value_heads": 2}
PATIENCE = 300.0


def ratio(training: dict[str, Any], model: Path, mesh: RankMesh) -> float:
    """Returns predicted over measured bytes of this rank."""
    config = Config.model_validate(
        {
            "model": {"name": str(model)},
            "task": {"prompts": "none", "prompts_per_step": ROWS.groups, "samples_per_prompt": ROWS.members},
            "generation": {"max_new_tokens": ROWS.answer},
            "training": {"micro_batch_tokens": 1024, **training},
            "algorithm": {"preset": "grpo"},
        }
    )
    shape = shape_of(str(model))
    trainer = PolicyTrainer(config, model, mesh)
    rows = rows_of(ROWS)[mesh.rows.rank :: mesh.rows.size]
    run_step(trainer, rows, INCARNATION, 0)
    measured = held_bytes() + most_beside(partial(run_step, trainer, rows, INCARNATION, 1))[0]
    assert shape is not None, "the shape of this family is known"
    trained = TrainedModel(
        "training", config, shape, RowLengths(ROWS.prompt, ROWS.prompt, 1), "cpu", config.training.layout
    )
    parts = trained.parts(trained.likely_pass, rank_layout(config.training.layout).place(mesh.rank).pp)
    return sum(size for name, size in parts.items() if name not in NOT_OF_TORCH) / measured


def run_trial(training: dict[str, Any], model: Path) -> list[float]:
    """Returns the ratio of each rank."""
    found, tell = os.pipe()

    def work(mesh: RankMesh) -> None:
        os.write(tell, f"{json.dumps([mesh.rank, ratio(training, model, mesh)])}\n".encode())

    zero = training.get("deepspeed", {}).get("stage", 0)
    codes = run_ranks(Layout(**training["layout"]), work, PATIENCE, zero=zero)
    assert codes == [0, 0], f"ranks ended with {codes}"
    return [each for _, each in sorted(map(json.loads, os.read(found, 1000).decode().splitlines()))]


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    if (child := os.fork()) == 0:
        write_model(folder, **SIZES)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the model is written"
    sys.stdout.write(json.dumps([run_trial(trial, folder) for trial in json.loads(sys.argv[2])]))

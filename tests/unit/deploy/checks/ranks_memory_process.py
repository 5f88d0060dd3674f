"""Two ranks, forked from this process: each trains two steps of every trial and prints what `asyncrl plan` predicts of
it and what it took, as torch counts it: tensors between steps, and the most beside them at one moment of the second.

python ranks_memory_process.py MODEL TRIALS, where TRIALS are tables of `training` in JSON
"""

import asyncio
import json
import os
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asyncrl.bench.end_to_end.benchmark_model import write_model
from asyncrl.bench.end_to_end.packed_rows import INCARNATION, StepShape, rows_of
from asyncrl.config.schema import Config
from asyncrl.config.service_placement import rank_layout
from asyncrl.deploy.checks.memory_needs import TrainedModel
from asyncrl.deploy.checks.row_lengths import RowLengths
from asyncrl.engines.model_shape import shape_of
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.ranks.rank_mesh import RankPlace, connect_mesh
from asyncrl.engines.training.training_step import run_step
from asyncrl.fleet.worker.rank_meeting import RankMeeting
from tests.unit.deploy.checks.torch_memory import NOT_OF_TORCH, held_bytes, most_beside

ROWS = StepShape(64, 64, 32, 1)
SIZES = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_key_value_heads": 2}
PATIENCE = 300.0


def ratio(rank: int, address: str, told: int, training: dict[str, Any], model: Path) -> float:
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
    layout, shape, meeting = rank_layout(config.training.layout), shape_of(str(model)), RankMeeting()
    address = meeting.take(address)
    if rank == 0:
        os.write(told, address.encode())
    zero = training.get("deepspeed", {}).get("stage", 0)
    place = RankPlace(rank, layout, "cpu", nullcontext, PATIENCE, PATIENCE, zero=zero)
    mesh = connect_mesh(asyncio.run(meeting.place(PATIENCE)), place)
    trainer = PolicyTrainer(config, model, mesh)
    rows = rows_of(ROWS)[mesh.rows.rank :: mesh.rows.size]
    run_step(trainer, rows, INCARNATION, 0)
    measured = held_bytes() + most_beside(partial(run_step, trainer, rows, INCARNATION, 1))[0]
    assert shape is not None, "the shape of this family is known"
    trained = TrainedModel("training", config, shape, RowLengths(ROWS.prompt, ROWS.prompt, 1), "cpu", layout)
    parts = trained.parts(trained.likely_pass, layout.place(rank).pp)
    return sum(size for name, size in parts.items() if name not in NOT_OF_TORCH) / measured


def in_child(work: Any) -> int:
    if (child := os.fork()) == 0:
        torch.set_num_threads(1)
        work()
        os._exit(0)
    return child


def run_trial(training: dict[str, Any], model: Path) -> list[float]:
    """Returns the ratio of each rank. Ranks are forked from a process that has run no operation of torch."""
    read, write = os.pipe()
    found, tell = os.pipe()

    def work(rank: int) -> None:
        address = os.read(read, 1000).decode() if rank else ""
        os.write(tell, f"{json.dumps([rank, ratio(rank, address, write, training, model)])}\n".encode())

    children = [in_child(partial(work, rank)) for rank in range(2)]
    codes = [os.waitpid(child, 0)[1] for child in children]
    assert codes == [0, 0], f"ranks ended with {codes}"
    return [each for _, each in sorted(map(json.loads, os.read(found, 1000).decode().splitlines()))]


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    folder = Path(sys.argv[1])
    assert os.waitpid(in_child(partial(write_model, folder, **SIZES)), 0)[1] == 0, "the model is written"
    sys.stdout.write(json.dumps([run_trial(trial, folder) for trial in json.loads(sys.argv[2])]))

"""FSDP2 on a device, with a mesh of one rank: it trains what a plain trainer does, publishes it, and resumes."""

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from asyncrl.config.schema import Config
from asyncrl.engines.ranks.rank_mesh import RankMesh, RankPlace, connect_mesh
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.training_step import run_step
from asyncrl.fleet.worker.rank_meeting import RankMeeting
from asyncrl.lanes.weights.slot_memory import whole_tensor
from asyncrl.protocols.rank_layout import Layout
from tests.gpu.test_training_gpu import config
from tests.gpu.test_training_gpu import folder as folder
from tests.gpu.test_training_gpu import rows as rows

PATIENCE = 60.0
STEPS = 20


@pytest.fixture
def mesh(device: str) -> Iterator[RankMesh]:
    """A mesh of one rank that shards: over NCCL on CUDA, over gloo on the CPU."""
    meeting = RankMeeting()
    meeting.take("")
    own = "cuda:0" if device == "cuda" else device
    place = RankPlace(0, Layout(), own, nullcontext, PATIENCE, PATIENCE, has_own_gpu=device == "cuda")
    alone = connect_mesh(asyncio.run(meeting.place(PATIENCE)), place)
    assert dist.get_backend() == ("nccl" if device == "cuda" else "gloo")
    yield replace(alone, sharding=init_device_mesh(device, (1,), mesh_dim_names=("shard",)))
    dist.destroy_process_group()


def sampled(rows: list[TrainRow], version: int) -> list[TrainRow]:
    return [replace(row, versions=np.full_like(row.versions, version)) for row in rows]


def losses(trainer: PolicyTrainer, rows: list[TrainRow], steps: int = STEPS) -> list[dict[str, float]]:
    """Trains rows that each version has sampled itself, and returns the metrics of each step."""
    reports = [run_step(trainer, sampled(rows[version % 5 :], version), 1, version) for version in range(steps)]
    assert all(each.updates for each in reports)
    return [dict(each.metrics) for each in reports]


def test_shards_train_what_a_plain_trainer_does(
    device: str, folder: Path, rows: list[TrainRow], mesh: RankMesh
) -> None:
    plain = PolicyTrainer(config(device), folder)
    sharded = PolicyTrainer(config(device), folder, mesh)
    expected = losses(plain, rows)
    found = losses(sharded, rows)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4 if device == "cuda" else 1e-5, abs=1e-5)
    whole = plain.named_tensors()
    for name, tensor in sharded.named_tensors().items():
        torch.testing.assert_close(whole_tensor(tensor), whole[name], atol=1e-4, rtol=1e-3)


def test_shards_in_bfloat16_stay_near_float32(device: str, folder: Path, rows: list[TrainRow], mesh: RankMesh) -> None:
    exact = losses(PolicyTrainer(config(device), folder), rows, 3)
    rough = losses(PolicyTrainer(config(device, precision="bfloat16"), folder, mesh), rows, 3)
    for one, other in zip(rough, exact, strict=True):
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.1)


def test_shards_resume_a_checkpoint(
    device: str, folder: Path, rows: list[TrainRow], mesh: RankMesh, tmp_path: Path
) -> None:
    settings: Config = config(device)
    trainer = PolicyTrainer(settings, folder, mesh)
    losses(trainer, rows, 2)
    trainer.save(tmp_path, {"version": 2})
    resumed, extra = PolicyTrainer.resume(settings, tmp_path, mesh)
    assert extra == {"version": 2}
    plain, _ = PolicyTrainer.resume(settings, tmp_path)
    for name, tensor in plain.named_tensors().items():
        assert torch.equal(whole_tensor(trainer.named_tensors()[name]), tensor)
        assert torch.equal(whole_tensor(resumed.named_tensors()[name]), tensor)
    for one, other in zip(losses(resumed, rows, 1), losses(trainer, rows, 1), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5), "kernels of CUDA may add in another order"

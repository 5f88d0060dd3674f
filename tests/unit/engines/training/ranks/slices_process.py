"""Four tensor ranks, forked from this process: they gather slices to sample with, in groups of all sizes,
connect as groups, and leave what they saw in files.

python slices_process.py FOLDER
"""

import asyncio
import json
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.engines.ranks.rank_mesh import RankMesh, RankPlace, Ranks, connect_beside
from asyncrl.engines.ranks.shards import own_part
from asyncrl.engines.ranks.weight_gathering import gather_for_generation, regrouping_of
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.fleet.worker.rank_meeting import RankMeeting
from asyncrl.protocols.rank_layout import Layout
from tests.unit.engines.training.ranks.forked_ranks import PATIENCE, run_ranks

LAYOUT = Layout(tp=4, generation_pp=1, generation_tp=2)
CUT = {r"(q|k|v|gate|up)_proj\.(weight|bias)$": 0, r"(o|down)_proj\.weight$": 1}


def dim_of(name: str) -> int | None:
    return next((dim for pattern, dim in CUT.items() if re.search(pattern, name)), None)


def slice_of(whole: Tensor, name: str, parts: int, number: int) -> Tensor:
    dim = dim_of(name)
    return whole if dim is None else whole.chunk(parts, dim)[number]


def gathered(trainer: PolicyTrainer, mesh: RankMesh, whole: dict[str, Tensor], tp: int) -> dict[str, Any]:
    generation = trainer.config.generation
    generation = generation.model_copy(update={"layout": generation.layout.model_copy(update={"tp": tp})})
    regrouping = regrouping_of(LAYOUT, generation)
    with_whom = {2: mesh.gathering, 4: Ranks()}[tp]
    named = trainer.named_tensors()
    weights = trainer.trained_weights
    tensors, received = gather_for_generation(
        named, trainer.weights_spec, regrouping, replace(mesh, gathering=with_whom)
    )
    weights.hold_once(tensors)
    twice = weights.held_twice(tensors)
    place = LAYOUT.place(mesh.rank).tp // (LAYOUT.tp // tp)
    slices = all(torch.equal(each, slice_of(whole[name], name, tp, place)) for name, each in tensors.items())
    before = {name: each.clone() for name, each in tensors.items()}
    weights.hold_apart()
    cut = [
        (name, own_part(each.detach())) for name, each in weights.model.named_parameters() if dim_of(name) is not None
    ]
    trained = all(torch.equal(part, slice_of(whole[name], name, 4, mesh.rank)) for name, part in cut)
    for _, part in cut:
        part.add_(1)
    kept = all(torch.equal(tensors[name], before[name]) for name, _ in cut)
    for name, part in cut:
        part.copy_(slice_of(whole[name], name, 4, mesh.rank))
    bytes_cut = sum(whole[name].nbytes for name, _ in cut)
    return {"slices": slices, "trained": trained, "kept": kept, "received": received, "twice": twice, "M": bytes_cut}


def joined(mesh: RankMesh, group: list[int]) -> list[float]:
    """Connects a group, of two tensor ranks in each stage, beside the ranks of the mesh; returns what all of them,
    those of a stage and those of a slice sum, and what the first of them told."""
    meeting = RankMeeting()
    rank = group.index(mesh.rank)
    address = mesh.everyone.told_by_each("" if rank else meeting.take(""))[group[0]]
    meeting.take(address)
    layout = Layout(pp=len(group) // 2, tp=2)
    place = RankPlace(rank, layout, "cpu", nullcontext, PATIENCE, PATIENCE, is_led=True)
    beside = connect_beside(asyncio.run(meeting.place(PATIENCE)), place)
    assert beside.announcements is not None
    axes = (beside.everyone, beside.tensor, beside.stages)
    summed = [ranks.sum(torch.tensor([float(mesh.rank)])).item() for ranks in axes]
    if rank == 0:
        beside.announcements.tell(mesh.rank)
    told = mesh.rank if rank == 0 else beside.announcements.next()
    mesh.everyone.sum(torch.zeros(1))  # The store of a group ends with its first rank.
    return [*summed, told]


def leave_what_is_seen(mesh: RankMesh) -> None:
    folder = Path(sys.argv[1])
    trial = json.loads((folder / "trial.json").read_text())
    trainer = PolicyTrainer(Config.model_validate(trial["config"]), Path(trial["model"]), mesh)
    whole = load_file(Path(trial["model"]) / "model.safetensors")
    found = {str(tp): gathered(trainer, mesh, whole, tp) for tp in trial["sizes"]}
    found["groups"] = [joined(mesh, next(each for each in groups if mesh.rank in each)) for groups in trial["groups"]]
    torch.save(found, folder / f"{mesh.rank}.pt")
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    codes = run_ranks(LAYOUT, leave_what_is_seen)
    assert codes == [0] * LAYOUT.size, f"ranks ended with {codes}"

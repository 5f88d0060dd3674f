"""Four ranks of a trainer, forked from this process, of which one kills itself in the middle of a step: each other one
leaves and saves its part, in place of the service, and four new ranks go on from what was saved.

python leaving_process.py FOLDER
"""

import json
import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.schema import Config
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.ranks.rank_mesh import RankMesh
from asyncrl.engines.training.trainer_checkpoint import tensor_digests
from asyncrl.engines.training.training_step import run_step
from asyncrl.errors import PeerLost
from asyncrl.protocols.rank_layout import Layout
from tests.unit.engines.training.ranks.forked_ranks import run_ranks
from tests.unit.engines.training.ranks.killed_process import Case
from tests.unit.engines.training.ranks.stage_process import rows_of

VERSIONS = (4, 5)
"""Number of the steps, of which a rank dies in the last one."""
LAYOUTS = {"shard": Layout(dp=2, shard=2), "tp": Layout(dp=2, tp=2), "pp": Layout(dp=2, pp=2), "ep": Layout(dp=2, ep=2)}
DEATHS = {"rows": 1, "forward": 0, "backward": 3, "optimizer": 2, "publish": 1}
"""Points of a step, as in `killed_process`, and the rank that dies there."""

Report = dict[str, Any]


def trained(trainer: PolicyTrainer, version: int) -> Report:
    """Trains a step, and returns what it reported, with digests of what this rank holds."""
    ranks = trainer.mesh.rows
    trainer.mesh.everyone.largest(torch.zeros(1))  # Ranks agree that no row is lost.
    metrics = run_step(trainer, rows_of(version)[ranks.rank :: ranks.size], 0, version).metrics
    return {"metrics": metrics, "digests": tensor_digests(trainer.named_tensors())}


def live(mesh: RankMesh, config: Config, model: Path, case: Case) -> Report:
    """Trains all steps; where another rank dies, saves this rank's part of the state before the last one."""
    trainer = PolicyTrainer(config, model, mesh)
    for version in VERSIONS[:-1]:
        trained(trainer, version)
    case.watch(trainer)
    updates = trainer.updates
    try:
        case.at("rows")
        found = trained(trainer, VERSIONS[-1])
        case.at("publish")
        mesh.everyone.largest(torch.zeros(1))
    except PeerLost:
        if held := trainer.updates == updates:
            trainer.leave_ranks()
            trainer.copy_state({"version": VERSIONS[-1]}).write(
                case.folder.with_suffix(f".part-{mesh.part}.{mesh.rank}")
            )
        return {"held": held}
    return found


def go_on(mesh: RankMesh, config: Config, model: Path, case: Case) -> Report:
    """Trains the last step from what was saved."""
    trainer, extra = PolicyTrainer.resume(config, case.folder.with_suffix(".state"), mesh)
    return {**extra, **trained(trainer, VERSIONS[-1])}


def run_case(layout: Layout, work: Callable[..., Report], folder: Path, dies: int = -1) -> None:
    """Does `work` at each rank, which leaves its report in a file."""

    def report(mesh: RankMesh) -> None:
        trial = json.loads((folder.parent / "trial.json").read_text())
        model = Path(trial["experts" if layout.ep > 1 else "model"])
        found = work(mesh, Config.model_validate(trial["config"]), model, Case(folder, dies=mesh.rank == dies))
        torch.save(found, folder.with_suffix(f".{work.__name__}-{mesh.rank}"))

    run_ranks(layout, report)


def join_parts(folder: Path, parts: int) -> bool:
    """Puts the parts that ranks saved into one checkpoint, the first of each; returns whether there are all."""
    for part in range(parts):
        saved = sorted(folder.parent.glob(f"{folder.name}.part-{part}.*"))
        if not saved:
            return False
        shutil.copytree(saved[0], folder.with_suffix(".state"), dirs_exist_ok=True)
    return True


if __name__ == "__main__":
    torch.set_num_threads(1)
    for module in ("tensor.parallel", "fsdp", "pipelining"):  # Ranks share what is imported before they are forked.
        import_module(f"torch.distributed.{module}")
    root = Path(sys.argv[1])
    for name, points in json.loads((root / "trial.json").read_text())["points"].items():
        run_case(LAYOUTS[name], live, root / f"{name} lives on")
        for point in points:
            folder = root / f"{name} dies {point}"
            run_case(LAYOUTS[name], live, folder, DEATHS[point])
            if join_parts(folder, LAYOUTS[name].parts):
                run_case(LAYOUTS[name], go_on, folder)

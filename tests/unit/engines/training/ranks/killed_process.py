"""Ranks of a trainer, forked from this process, of which one kills itself at a point of a step: the others leave what
they saw in files.

python killed_process.py FOLDER
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import torch

from asyncrl.config.schema import Config
from asyncrl.engines.ranks.rank_mesh import RankMesh
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.training_step import run_step
from asyncrl.errors import PeerLost
from asyncrl.lanes.weights.slot_memory import DTYPES, fill
from asyncrl.protocols.rank_layout import Layout
from tests.unit.engines.training.ranks.forked_ranks import run_ranks
from tests.unit.engines.training.ranks.stage_process import rows_of

PATIENCE = 3600.0
Death: TypeAlias = tuple[str, int, str]
"""Layout, rank and point."""
LAYOUTS = {"dp": Layout(dp=2), "shard": Layout(shard=2), "tp": Layout(tp=2), "pp": Layout(pp=2), "ep": Layout(ep=2)}
POINTS = ("rows", "forward", "backward", "optimizer", "publish", "checkpoint")
"""Where a rank dies: before ranks agree that no row is lost, in a forward and before a backward pass, before the
optimizer's step, before tensors are gathered to be published, before a state is copied."""


class Case:
    """One death. folder: has its files, by name. dies: whether this rank does."""

    def __init__(self, folder: Path, *, dies: bool) -> None:
        self.folder = folder
        self._dies = dies
        self._point = folder.name.split()[2]

    def at(self, point: str, *_: Any) -> None:
        if self._dies and point == self._point:
            self.folder.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

    def before(self, point: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **named: Any) -> Any:
            self.at(point)
            return function(*args, **named)

        return called

    def watch(self, trainer: PolicyTrainer) -> None:
        """Has the rank die in the middle of what the trainer does."""
        trainer.model.whole.base_model.register_forward_pre_hook(lambda *_: self.at("forward"))
        torch.autograd.backward = self.before("backward", torch.autograd.backward)
        trainer.optimizer.step = self.before("optimizer", trainer.optimizer.step)  # type: ignore[method-assign]


def train(trainer: PolicyTrainer, mesh: RankMesh, case: Case) -> str:
    """Does what the service does in each step. Returns where it lost another rank, "" where it did not."""
    doing = ""
    slot = {each.name: torch.empty(each.shape, dtype=DTYPES["float32"]) for each in trainer.weights_spec.tensors}
    try:
        doing = "rows"
        case.at("rows")
        mesh.everyone.largest(torch.zeros(1))
        doing = "step"
        run_step(trainer, rows_of(0), 0, 0)
        doing = "publish"
        case.at("publish")
        with mesh.failing():
            fill(slot, trainer.named_tensors()) if mesh.rank == 0 else trainer.gather_published()
            trainer.canary()
        doing = "checkpoint"
        case.at("checkpoint")
        trainer.copy_state({})
        mesh.everyone.largest(torch.zeros(1))
    except PeerLost:
        return doing
    return ""


def run_case(trial: dict[str, Any], death: Death, folder: Path) -> list[int]:
    """Returns how the ranks ended, as `os.waitpid` says it."""
    layout, dies, _ = death

    def live(mesh: RankMesh) -> None:
        case = Case(folder, dies=mesh.rank == dies)
        trainer = PolicyTrainer(Config.model_validate(trial["config"]), Path(trial["models"][layout]), mesh)
        case.watch(trainer)
        lost = train(trainer, mesh, case)
        seen = {"lost": lost, "seconds": time.monotonic() - float(case.folder.read_text())}
        case.folder.with_suffix(".json").write_text(json.dumps(seen))

    return run_ranks(LAYOUTS[layout], live, PATIENCE)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for module in ("tensor.parallel", "fsdp", "pipelining"):  # Ranks share what is imported before they are forked.
        import_module(f"torch.distributed.{module}")
    root = Path(sys.argv[1])
    described = json.loads((root / "trial.json").read_text())
    for layout, dies, point in described["deaths"]:
        codes = run_case(described, (layout, dies, point), root / f"{layout} {dies} {point}")
        (root / f"{layout} {dies} {point}.codes").write_text(json.dumps(codes))

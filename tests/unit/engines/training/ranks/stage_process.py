"""Ranks of several layouts in turn, forked from this process: they train what the test describes, and leave what they
saw in files.

python stage_process.py FOLDER
"""

import json
import subprocess
import sys
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.config.schema import Config
from asyncrl.engines.models.model_families import RecordShape
from asyncrl.engines.ranks.rank_mesh import RankMesh
from asyncrl.engines.ranks.shards import own_part
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow
from asyncrl.engines.training.trainer_checkpoint import tensor_digests
from asyncrl.engines.training.training_step import run_step
from asyncrl.lanes.weights.slot_memory import whole_tensor
from asyncrl.protocols.rank_layout import Layout
from tests.unit.engines.training.ranks.forked_ranks import run_ranks

VOCABULARY = 50


def rows_of(version: int) -> list[TrainRow]:
    """Ragged rows, with values and a reference. Every fifth batch has one, so that one of two updates has none, and
    the one before it a row whose loss is not finite."""
    draw = np.random.default_rng(version)
    rows = [_row(draw, version, index) for index in range(1 if version % 5 == 3 else 5 + version % 7)]
    if version % 5 == 2:
        rows[-1] = replace(rows[-1], logprobs=np.full_like(rows[-1].logprobs, np.nan))
    return rows


def _row(draw: np.random.Generator, version: int, index: int) -> TrainRow:
    tokens = int(draw.integers(1, 30))
    logprobs, reference = draw.normal(-4, 0.3, (2, tokens)).astype(np.float32)
    return TrainRow(
        group=4 * version + index // 4,
        member=index % 4,
        attempt=0,
        incarnation=0,
        prompt_ids=draw.integers(0, VOCABULARY, int(draw.integers(1, 9))),
        response_ids=draw.integers(0, VOCABULARY, tokens),
        logprobs=logprobs,
        versions=np.full(tokens, version),
        advantage=float(draw.normal()),
        values=draw.normal(size=tokens).astype(np.float32),
        reference_logprobs=reference,
    )


def share_of(trainer: PolicyTrainer, version: int) -> list[TrainRow]:
    """Returns the rows of this rank, with experts that were recorded where the trainer replays them."""
    ranks = trainer.mesh.rows
    replay = trainer.model.replay
    return [
        row if replay is None else _recorded(row, replay.shape) for row in rows_of(version)[ranks.rank :: ranks.size]
    ]


def _recorded(row: TrainRow, shape: RecordShape) -> TrainRow:
    """Returns the row with two neighbouring experts for each token and router, and none for some tokens."""
    tokens = len(row.prompt_ids) + len(row.response_ids)
    first = np.arange(tokens)[:, None] * 7 + np.arange(shape.routers) + row.member
    chosen = np.stack([first % shape.experts, (first + 1) % shape.experts], -1)
    chosen[::5] = shape.none
    return replace(row, experts=chosen.astype(shape.dtype).reshape(-1))


def trained(trainer: PolicyTrainer, steps: int) -> list[tuple[Any, ...]]:
    """Trains, and returns what each step reported."""
    found = [run_step(trainer, share_of(trainer, version), 0, version) for version in range(steps)]
    return [(each.updates, each.skipped, each.trained, each.metrics, [*map(astuple, each.samples)]) for each in found]


def found_by_ranks(made: dict[str, dict[str, Any]], folder: Path) -> None:
    """Trains each trial with the ranks of its layout, and adds to it what each rank found."""
    (folder / "trials.json").write_text(json.dumps(made))
    subprocess.run([sys.executable, __file__, str(folder)], check=True, timeout=500)
    for name, trial in made.items():
        ranks = range(Layout(**trial["layout"]).size)
        trial |= {"folder": str(folder / name), "found": [torch.load(folder / f"{name}-{rank}.pt") for rank in ranks]}


def run_trials(folder: Path, trials: dict[str, dict[str, Any]], mesh: RankMesh) -> None:
    for name, trial in trials.items():
        torch.save(run_trial(mesh, folder / name, trial), folder / f"{name}-{mesh.rank}.pt")


def run_trial(mesh: RankMesh, folder: Path, trial: dict[str, Any]) -> dict[str, Any]:
    config = Config.model_validate(trial["config"])
    texts = Path(trial["texts"]) if trial["texts"] else None
    trainer = PolicyTrainer(config, Path(trial["model"]), mesh, texts)
    steps = trained(trainer, trial["steps"])
    canary = trainer.canary()
    named = trainer.named_tensors()
    weights = {each.name: whole_tensor(named[each.name]).clone() for each in trainer.weights_spec.tensors}
    held = sum(own_part(each).numel() for each in trainer.model.whole.parameters() if not each.is_meta)
    folder.mkdir(exist_ok=True)
    trainer.save(folder, {"steps": len(steps)})
    mesh.everyone.sum(torch.zeros(1))  # All have saved.
    resumed, _ = PolicyTrainer.resume(config, folder, mesh, texts, Path(trial["model"]))
    again = run_step(resumed, share_of(resumed, len(steps)), 0, len(steps)).metrics
    return {
        "steps": steps,
        "canary": canary.logprobs,
        "weights": weights if mesh.rank == 0 else {},
        "held": held,
        "digests": tensor_digests(named),
        "again": again,
        "next": run_step(trainer, share_of(trainer, len(steps)), 0, len(steps)).metrics,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    by_layout: dict[str, dict[str, dict[str, Any]]] = {}
    for name, trial in json.loads((root / "trials.json").read_text()).items():
        by_layout.setdefault(json.dumps(trial["layout"]), {})[name] = trial
    for sizes, trials in by_layout.items():
        wanted = Layout(**json.loads(sizes))
        codes = run_ranks(wanted, partial(run_trials, root, trials))
        assert codes == [0] * wanted.size, f"ranks ended with {codes}"

"""The measurement of memory while a rank loads, on one rank in this process."""

from functools import partial
from pathlib import Path

import torch

from asyncrl.bench.end_to_end.benchmark_model import write_model
from asyncrl.bench.end_to_end.loading_memory import load_checkpoint, load_model, measure, watched, write_checkpoint
from asyncrl.engines.training.ranks.rank_mesh import RankMesh


def test_a_peak_counts_what_was_freed_before_the_end() -> None:
    with watched() as peak:
        held = torch.ones(1 << 24)
        del held
    assert peak.all >= 1 << 25


def test_a_checkpoint_has_weights_and_both_moments_of_a_model(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    write_checkpoint(model, tmp_path / "checkpoint", RankMesh())
    loads = (partial(load, model, tmp_path / "checkpoint") for load in (load_model, load_checkpoint))
    of_model, of_checkpoint = (measure(load, RankMesh())[0] for load in loads)
    assert 3 * of_model <= of_checkpoint < 3.01 * of_model, "an optimizer counts its steps for each weight"

"""The sides of asyncrl-bench checkpoints: a checkpoint is written from the beginning of a step to its end."""

import threading
from pathlib import Path

import pytest

from asyncrl.bench.end_to_end import checkpoint_cost
from asyncrl.bench.end_to_end.benchmark_model import write_model
from asyncrl.bench.end_to_end.checkpoint_cost import seconds_beside, seconds_of_copy, seconds_with
from asyncrl.bench.end_to_end.packed_rows import StepShape, trainer


def test_a_checkpoint_is_written_beside_a_step_and_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_cost, "SHAPE", StepShape(6, 3, 2, 2))
    made = trainer(write_model(tmp_path / "model"), packs=True)
    assert seconds_of_copy(made) > 0
    for folder, side in ((tmp_path / "beside", seconds_beside), (tmp_path / "before", seconds_with)):
        assert side(made, folder) > 0
        assert (folder / "trainer.pt").stat().st_size > 0
    assert not [each for each in threading.enumerate() if each.name == "checkpoints"], "the writer ended"

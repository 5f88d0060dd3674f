"""The steps of asyncrl-bench packed-rows: both sides train the same tokens, and only one packs them."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl.bench.end_to_end.benchmark_model import write_model
from asyncrl.bench.end_to_end.packed_rows import StepShape, rows_of, tokens_per_second, trainer
from asyncrl.engines.training.batch import micro_batches, packed_rows
from asyncrl.engines.training.batch.train_rows import Ids


def test_sides_differ_in_packing_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []
    pack = packed_rows.pack_rows

    def counted(prompts: Sequence[Ids], responses: Sequence[Ids], *limits: float) -> object:
        packed.append(len(prompts))
        return pack(prompts, responses, *limits)

    monkeypatch.setattr(micro_batches, "pack_rows", counted)
    model, rows = write_model(tmp_path), rows_of(StepShape(6, 3, 2, 2))
    assert [len(row.prompt_ids) for row in rows] == [6] * 4
    assert rows[0].prompt_ids.tolist() == rows[1].prompt_ids.tolist() != rows[2].prompt_ids.tolist()
    assert tokens_per_second(trainer(model, packs=False), rows) > 0
    assert packed == []
    assert tokens_per_second(trainer(model, packs=True), rows) > 0
    assert packed

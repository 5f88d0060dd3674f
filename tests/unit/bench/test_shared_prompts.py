"""The steps of asyncrl-bench shared-prompts: both sides train the same tokens, and only one shares prompts."""

from pathlib import Path

import pytest

from asyncrl.bench.end_to_end.benchmark_model import write_model
from asyncrl.bench.end_to_end.shared_prompts import StepShape, rows_of, tokens_per_second, trainer
from asyncrl.engines.training.batch import micro_batches, shared_prompts


def test_sides_differ_in_sharing_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    share = shared_prompts.share_prompts

    def counted(prompts: object, responses: object, width: int) -> object:
        widths.append(width)
        return share(prompts, responses, width)  # type: ignore[arg-type]

    monkeypatch.setattr(micro_batches, "share_prompts", counted)
    model, rows = write_model(tmp_path), rows_of(StepShape(6, 3, 2, 2))
    assert [len(row.prompt_ids) for row in rows] == [6] * 4
    assert rows[0].prompt_ids.tolist() == rows[1].prompt_ids.tolist() != rows[2].prompt_ids.tolist()
    assert tokens_per_second(trainer(model, shares=False), rows) > 0
    assert widths == []
    assert tokens_per_second(trainer(model, shares=True), rows) > 0
    assert widths

"""A rank with a part of the state dies in the middle of a step, and others that have copies of all parts save them: new
ranks go on from there as if none had died. Where an update was taken nothing is saved."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from asyncrl.config.schema import Config
from tests.unit.engines.training.ranks import leaving_process
from tests.unit.engines.training.ranks.leaving_process import DEATHS, LAYOUTS, VERSIONS

ONE = {"shard": ["backward"]}
ALL = {layout: [*DEATHS] for layout in LAYOUTS}
TAKEN = {"shard": ("optimizer", "publish")}
"""Points at which a living rank may have taken the update: one copy of the shards sums its norm without the other."""


@pytest.mark.timeout(620)
@pytest.mark.parametrize("points", [ONE, pytest.param(ALL, marks=pytest.mark.long)], ids=["one", "all"])
def test_new_ranks_go_on_from_the_parts_of_living_ones(
    points: dict[str, list[str]], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    training = {"micro_batch_tokens": 64, "logits_chunk": 16, "learning_rate": 1e-3}
    config = Config.model_validate({"model": {"name": "tiny"}, "task": {"prompts": "none"}, "training": training})
    models = {"model": str(make_model("llama")), "experts": str(make_model("qwen3_moe"))}
    trial = {**models, "config": config.model_dump(mode="json", exclude_unset=True), "points": points}
    (tmp_path / "trial.json").write_text(json.dumps(trial))
    subprocess.run([sys.executable, leaving_process.__file__, str(tmp_path)], check=True, timeout=600)
    for layout, deaths in points.items():
        for point in deaths:
            _check(layout, point, tmp_path, TAKEN.get(layout, ("publish",)))


def _check(layout: str, point: str, folder: Path, taken: Sequence[str]) -> None:
    name, ranks = f"{layout} dies {point}", range(LAYOUTS[layout].size)
    held = [torch.load(folder / f"{name}.live-{rank}")["held"] for rank in ranks if rank != DEATHS[point]]
    assert (folder / f"{name}.state").exists() == (point not in taken), f"{name}: {held}"
    assert point in taken or all(held), f"{name}: {held}"
    for rank in ranks if point not in taken else ():
        expected = torch.load(folder / f"{layout} lives on.live-{rank}")
        found = torch.load(folder / f"{name}.go_on-{rank}")
        assert found == {"version": VERSIONS[-1], **expected}, f"{name}: rank {rank}"

"""Tensor ranks gather the slices that they sample with in groups: what they hold, receive and hold twice is what Table
2 of HybridFlow says. The ranks are processes over gloo."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engines.training.ranks import slices_process
from tests.unit.engines.training.ranks.slices_process import LAYOUT

SIZES = (2, 4)
GROUPS = [LAYOUT.generation_replicas(), [[0, 1], [2, 3]], [[0, 1, 2, 3]]]


@pytest.fixture(scope="module")
def ranks(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns what each rank saw."""
    folder = tmp_path_factory.mktemp("slices")
    config = {"model": {"name": "tiny"}, "task": {"prompts": "none"}, "training": {"layout": {"tp": 4}}}
    model = make_model("qwen2", num_attention_heads=4, num_key_value_heads=4)
    trial = {"model": str(model), "config": config, "sizes": SIZES, "groups": GROUPS}
    (folder / "trial.json").write_text(json.dumps(trial))
    subprocess.run([sys.executable, slices_process.__file__, str(folder)], check=True, timeout=200)
    return [torch.load(folder / f"{rank}.pt") for rank in range(LAYOUT.size)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tp", SIZES)
def test_a_rank_samples_with_its_slices_and_trains_its_own(tp: int, ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        case = found[str(tp)]
        assert case["slices"], "those of its place in the group"
        assert case["trained"], "of views too"
        assert case["kept"] != (tp == 4), "a step changes what it samples with only where that is what it trains"
        assert (case["received"], case["twice"]) == ((4 - tp) / tp * case["M"] / 4, 0)


def test_ranks_connect_as_groups_beside_those_of_the_trainer(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        groups = [next(each for each in groups if rank in each) for groups in GROUPS]
        pairs = {
            0: (1, 2),
            1: (1, 4),
            2: (5, 2),
            3: (5, 4),
        }  # Sums of two stages of two slices: 0 + 1, 0 + 2 and so on.
        sums = [pairs[rank] if len(group) == 4 else (sum(group), rank) for group in groups]
        assert found["groups"] == [[sum(group), *own, group[0]] for group, own in zip(groups, sums, strict=True)]

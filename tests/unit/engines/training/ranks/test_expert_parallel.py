"""Ranks that share out the experts of each layer train, publish and save what one rank does; each has its own rows."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from asyncrl.config.schema import Config
from asyncrl.engines.ranks.rank_limits import rank_problems
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.training_step import run_step
from asyncrl.protocols.rank_layout import Layout
from tests.unit.engines.training.ranks.stage_process import found_by_ranks, share_of, trained

BUDGET = {"micro_batch_tokens": 64, "logits_chunk": 16, "learning_rate": 1e-4}
TRIALS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"layout": {"ep": 2}, "steps": 20, "training": {"updates": 2}},
    "mixtral": {"layout": {"ep": 2}, "steps": 20, "training": {"updates": 2}},
    "copies": {"layout": {"dp": 2, "ep": 2}, "family": "qwen3_moe", "steps": 20},
    "replayed": {"layout": {"ep": 2}, "family": "mixtral", "steps": 5, "training": {"router_replay": True}},
    "qwen2_moe": {"layout": {"dp": 2, "ep": 2}, "steps": 5, "training": {"gradient_checkpointing": True}},
    "gpt_oss": {"layout": {"ep": 2}, "steps": 5, "training": {"gradient_checkpointing": True, "updates": 2}},
}
BESIDE = ("pp", "tp", "sp", "shard")


def config_of(**training: Any) -> Config:
    sections = {"model": {"name": "tiny"}, "task": {"prompts": "none"}, "steps": 100}
    return Config.model_validate({**sections, "training": training})


@pytest.fixture(scope="module")
def trials(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Returns what the ranks are given, by name of the trial, with what they found."""
    folder = tmp_path_factory.mktemp("experts")
    made: dict[str, dict[str, Any]] = {}
    for name, trial in TRIALS.items():
        config = config_of(**BUDGET, **trial.get("training", {})).model_dump(mode="json", exclude_unset=True)
        model = str(make_model(trial.get("family", name)))
        made[name] = {"model": model, "config": config, "steps": trial["steps"], "texts": "", "layout": trial["layout"]}
    for layout in {json.dumps(trial["layout"]) for trial in made.values()}:
        chosen = {name: trial for name, trial in made.items() if json.dumps(trial["layout"]) == layout}
        own = folder / layout
        own.mkdir()
        found_by_ranks(chosen, own, Layout(**json.loads(layout)))
    return made


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TRIALS)
def test_ranks_with_experts_train_publish_and_save_what_one_rank_does(
    name: str, trials: dict[str, dict[str, Any]]
) -> None:
    """Of uneven rows; every fifth batch has one row, so that all ranks but one have none."""
    trial = trials[name]
    found = trials[name]["found"]
    config = Config.model_validate(trial["config"])
    first = trials[name]["found"][0]
    one = PolicyTrainer(config, Path(trial["model"]))
    worst = 0.0
    for number, expected in enumerate(trained(one, trial["steps"])):
        reports = [each["steps"][number] for each in found]
        assert all(each[:4] == reports[0][:4] for each in reports), "ranks report the same"
        assert reports[0][:3] == expected[:3]
        assert sorted(sample for each in reports for sample in each[4]) == sorted(expected[4])
        if expected[0]:
            worst = max(worst, abs(reports[0][3]["loss/policy"] - expected[3]["loss/policy"]))
            assert reports[0][3]["grad_norm"] == pytest.approx(expected[3]["grad_norm"], rel=1e-3)
        assert reports[0][3] == pytest.approx(expected[3], rel=1e-2, abs=1e-4)
    sys.stdout.write(f"{name:<10} {trial['layout']!s:<20} loss differs by {worst:.1e} over {trial['steps']} steps\n")
    assert worst < 1e-5
    for each, tensor in first["weights"].items():
        torch.testing.assert_close(tensor, one.named_tensors()[each], atol=1e-4, rtol=1e-3)
    assert first["canary"] == pytest.approx(one.canary().logprobs, abs=1e-3)
    assert all(each["again"] == each["next"] == first["next"] for each in found), "a resume goes on with the same bits"
    ranks = trial["layout"]["ep"]
    experts = sum(each.numel() for key, each in one.model.whole.named_parameters() if ".experts." in key)
    total = sum(each.numel() for each in one.model.whole.parameters())
    assert {each["held"] for each in found} == {total - experts + experts // ranks}
    resumed, _ = PolicyTrainer.resume(config, Path(trial["folder"]))
    again = run_step(resumed, share_of(resumed, trial["steps"]), 0, trial["steps"]).metrics
    assert first["next"] == pytest.approx(again, rel=1e-2, abs=1e-4)


@pytest.mark.parametrize(
    ("family", "ranks", "says"),
    [
        ("llama", 2, "ep = 2 is not supported for the family 'llama': .* write ep = 1, and dp or shard for ranks"),
        ("mixtral", 3, "ep = 3 is not supported for a model with 4 experts: write one of 1, 2, 4"),
        ("qwen3_moe", 4, ""),
    ],
)
def test_models_whose_experts_cannot_be_shared_out_are_refused(
    family: str, ranks: int, says: str, make_model: Callable[..., Path]
) -> None:
    found = list(rank_problems(config_of(layout={"ep": ranks}), {"training": str(make_model(family))}))
    assert [each.key for each in found] == (["training.layout"] if says else [])
    for each in found:
        assert re.search(says, each.text)


@pytest.mark.parametrize(
    ("training", "sections", "says"),
    [
        *(({"layout": {"ep": 2, axis: 2}}, {}, "ep = 2 is not supported beside pp, tp, sp") for axis in BESIDE),
        (
            {"layout": {"ep": 2}},
            {"model": {"name": "m", "lora": {}}},
            "training.layout.*ep is not supported with adapters",
        ),
        ({"layout": {"ep": 2}, "optimizer": "muon"}, {}, "muon is not supported with training.layout.ep"),
        (
            {"layout": {"ep": 2}},
            {"generation": {"colocate": "training"}, "staleness": {"limit": 0}},
            "training.layout.*ep is not supported beside sampling",
        ),
    ],
)
def test_what_was_not_built_is_refused(training: dict[str, Any], sections: dict[str, Any], says: str) -> None:
    given = {"model": {"name": "m"}, "task": {"prompts": "p"}, "training": training} | sections
    with pytest.raises(ValidationError, match=says):
        Config.model_validate(given)

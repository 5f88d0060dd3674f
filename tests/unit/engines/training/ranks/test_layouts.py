"""Ranks that share out layers, tokens or experts, as processes over gloo, train, publish, save and resume what one rank
does."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from asyncrl.config.schema import Config
from asyncrl.engines.ranks.parallel_layers import attend_in_slices
from asyncrl.engines.ranks.pipeline import keep_stage
from asyncrl.engines.ranks.rank_mesh import RankMesh, Ranks
from asyncrl.engines.training.models_with_heads import load_causal_model
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.training_step import run_step
from asyncrl.errors import ConfigError
from tests.unit.engines.training.ranks.stage_process import found_by_ranks, share_of, trained

BUDGET = {"micro_batch_tokens": 64, "logits_chunk": 16, "learning_rate": 1e-4}
AGAIN = {"gradient_checkpointing": True}
PP = {"pp": 2}
SP = {"sp": 2}
EP = {"ep": 2}
CORE: dict[str, dict[str, Any]] = {
    "stages": {"layout": PP, "family": "llama", "steps": 5, "training": {"updates": 2}},
    "tied stages": {
        "layout": PP,
        "family": "qwen2",
        "steps": 5,
        "shape": {"tie_word_embeddings": True, "num_hidden_layers": 3},
    },
    "stages of m2po": {
        "layout": PP,
        "family": "qwen3",
        "steps": 3,
        "training": {"updates": 2, **AGAIN},
        "algorithm": {"preset": "m2po"},
    },
    "stages of ppo": {
        "layout": PP,
        "family": "llama",
        "steps": 3,
        "training": {"updates": 2, "micro_batch_tokens": 4096},
        "algorithm": {"preset": "ppo", "old_logprobs": "recomputed"},
    },
    "stages with texts": {
        "layout": PP,
        "family": "llama",
        "steps": 2,
        "texts": 3,
        "algorithm": {"pretrain_coefficient": 0.5},
    },
    "stages of adapters": {
        "layout": PP,
        "family": "llama",
        "steps": 3,
        "model": {"lora": {"rank": 2}},
        "algorithm": {"kl": 0.1, "kl_target": 0.1},
    },
    "slices": {"layout": SP, "family": "llama", "steps": 5, "training": {"updates": 2}},
    "slices again": {"layout": SP, "family": "qwen3", "steps": 3, "training": AGAIN},
    "experts": {"layout": EP, "family": "qwen3_moe", "steps": 5, "training": {"updates": 2}},
    "copies of experts": {"layout": {"dp": 2, "ep": 2}, "family": "qwen3_moe", "steps": 5},
    "replayed experts": {"layout": EP, "family": "mixtral", "steps": 5, "training": {"router_replay": True}},
}
OTHERS: dict[str, dict[str, Any]] = {
    "experts of qwen2_moe": {"layout": {"dp": 2, "ep": 2}, "family": "qwen2_moe", "steps": 5, "training": AGAIN},
    "experts of gpt_oss": {"layout": EP, "family": "gpt_oss", "steps": 5, "training": {"updates": 2, **AGAIN}},
}
"""Families whose experts have other weights beside them."""
Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def make_trials(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Found]:
    """make_trials(described) -> what the ranks are given, by name of the trial, with what they found."""
    known: dict[str, Found] = {}

    def make(described: dict[str, dict[str, Any]]) -> Found:
        first = next(iter(described))
        if first not in known:
            folder = tmp_path_factory.mktemp("layouts")
            texts = folder / "texts.jsonl"
            texts.write_text("".join(json.dumps({"text": " ".join(["w1"] * count)}) + "\n" for count in (3, 9, 5, 14)))
            known[first] = {name: _trial(trial, make_model, texts) for name, trial in described.items()}
            found_by_ranks(known[first], folder)
        return known[first]

    return make


def _trial(trial: dict[str, Any], make_model: Callable[..., Path], texts: Path) -> dict[str, Any]:
    with_texts = {"pretrain": str(texts), "pretrain_per_step": trial["texts"]} if "texts" in trial else {}
    sections = {
        "model": {"name": "tiny", **trial.get("model", {})},
        "task": {"prompts": "none", **with_texts},
        "training": BUDGET | trial.get("training", {}),
        "algorithm": trial.get("algorithm", {}),
        "steps": 100,
    }
    config = Config.model_validate(sections).model_dump(mode="json", exclude_unset=True)
    made = {"model": str(make_model(trial["family"], **trial.get("shape", {}))), "config": config}
    return made | {"texts": str(texts) if with_texts else "", "steps": trial["steps"], "layout": trial["layout"]}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*CORE, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)])
def test_ranks_train_publish_and_save_what_one_rank_does(name: str, make_trials: Callable[..., Found]) -> None:
    """Of uneven rows; every fifth batch has one row, so that all ranks with other rows but one have none."""
    trial = make_trials(CORE if name in CORE else OTHERS)[name]
    config = Config.model_validate(trial["config"])
    texts = Path(trial["texts"]) if trial["texts"] else None
    found = trial["found"]
    first = found[0]
    one = PolicyTrainer(config, Path(trial["model"]), texts=texts)
    for number, expected in enumerate(trained(one, trial["steps"])):
        _same_step([each["steps"][number] for each in found], expected, shared="ep" not in trial["layout"])
    for each, tensor in first["weights"].items():
        torch.testing.assert_close(tensor, one.named_tensors()[each], atol=1e-4, rtol=1e-3)
    assert first["canary"] == pytest.approx(one.canary().logprobs, abs=1e-3)
    assert all(each["again"] == each["next"] == first["next"] for each in found), "a resume goes on with the same bits"
    _hold_their_parts(trial["layout"], found, one)
    resumed, extra = PolicyTrainer.resume(config, Path(trial["folder"]), texts=texts, base=Path(trial["model"]))
    assert extra == {"steps": trial["steps"]}
    for ours, expected in zip(_moments(resumed), _moments(one), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-2)
    again = run_step(resumed, share_of(resumed, trial["steps"]), 0, trial["steps"]).metrics
    assert first["next"] == pytest.approx(again, rel=1e-2, abs=1e-4)


def _same_step(reports: list[Any], expected: Any, *, shared: bool) -> None:
    """Ranks report the same, and what one rank did. shared: they have the same rows."""
    first = reports[0]
    assert all(each[:4] == first[:4] for each in reports)
    assert first[:3] == expected[:3]
    if shared:
        assert all(each[4] == expected[4] for each in reports)
    else:
        assert sorted(sample for each in reports for sample in each[4]) == sorted(expected[4])
    if expected[0]:
        assert first[3]["loss/policy"] == pytest.approx(expected[3]["loss/policy"], abs=1e-5)
        assert first[3]["grad_norm"] == pytest.approx(expected[3]["grad_norm"], rel=1e-3)
    assert first[3] == pytest.approx(expected[3], rel=1e-2, abs=1e-4)


def _hold_their_parts(layout: dict[str, int], found: list[dict[str, Any]], one: PolicyTrainer) -> None:
    total = sum(each.numel() for each in one.model.whole.parameters())
    experts = sum(each.numel() for name, each in one.model.whole.named_parameters() if ".experts." in name)
    held = [each["held"] for each in found]
    if "ep" in layout:
        assert set(held) == {total - experts + experts // layout["ep"]}
        return
    assert all(each["canary"] == found[0]["canary"] for each in found)
    if "pp" in layout:
        assert max(held) < total
        assert {name for each in found for name in each["digests"]} == one.named_tensors().keys()
    else:
        assert set(held) == {total}
        assert all(each["digests"] == found[0]["digests"] for each in found), "copies have the same bits"


def _moments(trainer: PolicyTrainer) -> list[torch.Tensor]:
    states = trainer.optimizer.parts[0].state_dict()["state"]
    return [moment for number in sorted(states) for moment in states[number].values()]


class OneOfTwo(Ranks):
    """The first of two ranks that exchange nothing."""

    size = 2


OF_STAGES = partial(keep_stage, mesh=RankMesh(stages=OneOfTwo()))


@pytest.mark.parametrize(
    ("share", "shape", "says"),
    [
        (OF_STAGES, {"family": "gemma"}, "pp splits .* is gemma; write pp"),
        (
            OF_STAGES,
            {"num_hidden_layers": 1},
            "pp = 2 is more than its lay",
        ),
        (partial(attend_in_slices, size=2), {"family": "gemma"}, "sp cuts rows .* is gemma; write sp = 1"),
        (partial(attend_in_slices, size=4), {}, "sp = 4 does not divide num_key_value_heads = 2: write 1 or 2"),
        (
            partial(attend_in_slices, size=2),
            {"family": "qwen2", "use_sliding_window": True, "max_window_layers": 0},
            "attend to all earlier tokens",
        ),
    ],
)
def test_models_that_ranks_cannot_share_are_refused(
    share: Callable[[Any], Any], shape: dict[str, Any], says: str, make_model: Callable[..., Path]
) -> None:
    model = load_causal_model(make_model(**shape), "cpu")
    with pytest.raises(ConfigError, match=says):
        share(model.whole)


@pytest.mark.parametrize(
    ("training", "sections", "says"),
    [
        *(({axis: 2}, {}, "ep = 2 is not supported beside pp, tp, sp") for axis in ("pp", "tp", "sp", "shard")),
        ({}, {"model": {"name": "m", "lora": {}}}, "training.layout.*ep is not supported with adapters"),
        ({}, {"training": {"layout": EP, "optimizer": "muon"}}, "muon is not supported with training.layout.ep"),
        (
            {},
            {"generation": {"colocate": "training"}, "staleness": {"limit": 0}},
            "training.layout.*ep is not supported beside sampling",
        ),
    ],
)
def test_what_was_not_built_is_refused(training: dict[str, Any], sections: dict[str, Any], says: str) -> None:
    given = {"model": {"name": "m"}, "task": {"prompts": "p"}, "training": {"layout": EP | training}} | sections
    with pytest.raises(ValidationError, match=says):
        Config.model_validate(given)

"""Two pipeline stages, as processes over gloo, train, publish, save and resume what one rank does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.config.schema import Config
from asyncrl.engines.ranks.pipeline import keep_stage
from asyncrl.engines.ranks.rank_mesh import RankMesh, Ranks
from asyncrl.engines.training.models_with_heads import load_causal_model
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.training_step import run_step
from asyncrl.errors import ConfigError
from asyncrl.protocols.rank_layout import Layout
from tests.unit.engines.training.ranks.stage_process import found_by_ranks, rows_of, trained

BUDGET = {"micro_batch_tokens": 64, "logits_chunk": 16, "learning_rate": 1e-4}
TRIALS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "steps": 20, "training": {"updates": 2}},
    "tied": {"family": "qwen2", "steps": 20, "shape": {"tie_word_embeddings": True, "num_hidden_layers": 3}},
    "m2po": {
        "family": "qwen3",
        "steps": 4,
        "training": {"updates": 2, "gradient_checkpointing": True},
        "algorithm": {"preset": "m2po"},
    },
    "ppo": {
        "family": "llama",
        "steps": 5,
        "training": {"updates": 2, "micro_batch_tokens": 4096},
        "algorithm": {"preset": "ppo", "old_logprobs": "recomputed"},
    },
    "texts": {"family": "llama", "steps": 2, "texts": True, "algorithm": {"pretrain_coefficient": 0.5}},
    "adapters": {
        "family": "llama",
        "steps": 4,
        "model": {"lora": {"rank": 2}},
        "algorithm": {"kl": 0.1, "kl_target": 0.1},
    },
}
TOLERANCE: dict[str, float] = {"atol": 1e-4, "rtol": 1e-3}


@pytest.fixture(scope="module")
def trials(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Returns what both stages are given, by name of the trial; `folder` has what they left."""
    folder = tmp_path_factory.mktemp("stages")
    texts = folder / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": " ".join(["w1"] * count)}) + "\n" for count in (3, 9, 5, 14)))
    made = {name: _trial(trial, make_model, texts) for name, trial in TRIALS.items()}
    found_by_ranks(made, folder, Layout(pp=2))
    return made


def _trial(trial: dict[str, Any], make_model: Callable[..., Path], texts: Path) -> dict[str, Any]:
    training = BUDGET | trial.get("training", {})
    task = {"prompts": "none", **({"pretrain": str(texts), "pretrain_per_step": 3} if "texts" in trial else {})}
    sections = {"task": task, "training": training, "steps": 100, "algorithm": trial.get("algorithm", {})}
    model = {"name": "tiny", **trial.get("model", {})}
    config = Config.model_validate({"model": model, **sections}).model_dump(mode="json", exclude_unset=True)
    folder = make_model(trial["family"], **trial.get("shape", {}))
    if "texts" in trial:
        words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(50)}, unk_token="w0"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0").save_pretrained(folder)
    return {
        "model": str(folder),
        "config": config,
        "steps": trial["steps"],
        "texts": str(texts) if "texts" in trial else "",
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TRIALS)
def test_two_stages_train_publish_and_save_what_one_rank_does(name: str, trials: dict[str, dict[str, Any]]) -> None:
    trial, (first, last) = trials[name], trials[name]["found"]
    config = Config.model_validate(trial["config"])
    texts = Path(trial["texts"]) if trial["texts"] else None
    one = PolicyTrainer(config, Path(trial["model"]), texts=texts)
    for expected, found, of_last in zip(trained(one, trial["steps"]), first["steps"], last["steps"], strict=True):
        assert found == of_last, "stages report the same"
        assert found[:3] == expected[:3]
        assert found[4] == expected[4]
        if expected[0]:
            assert found[3]["loss/policy"] == pytest.approx(expected[3]["loss/policy"], abs=1e-5)
            assert found[3]["grad_norm"] == pytest.approx(expected[3]["grad_norm"], rel=1e-3)
        assert found[3] == pytest.approx(expected[3], rel=1e-2, abs=1e-4)
    for each, tensor in first["weights"].items():
        torch.testing.assert_close(tensor, one.named_tensors()[each], **TOLERANCE)
    assert first["digests"].keys() | last["digests"].keys() == one.named_tensors().keys()
    assert first["canary"] == last["canary"] == pytest.approx(one.canary().logprobs, abs=1e-3)
    assert first["again"] == first["next"], "a resume of stages goes on with the same bits"
    assert max(first["held"], last["held"]) < sum(each.numel() for each in one.model.whole.parameters())
    resumed, extra = PolicyTrainer.resume(config, Path(trial["folder"]), texts=texts, base=Path(trial["model"]))
    assert extra == {"steps": trial["steps"]}
    assert _states(resumed).keys() == _states(one).keys()
    for number, moments in _states(one).items():
        for key, moment in moments.items():
            torch.testing.assert_close(_states(resumed)[number][key], moment, atol=1e-4, rtol=1e-2)
    again = run_step(resumed, rows_of(trial["steps"]), 0, trial["steps"]).metrics
    assert first["next"] == pytest.approx(again, rel=1e-2, abs=1e-4)


@pytest.mark.parametrize(
    ("family", "stages", "says"),
    [
        (
            "gemma",
            2,
            r"pp splits models of the families llama, qwen2, qwen3 by layers, and this one is gemma; write pp",
        ),
        ("llama", 3, "pp = 3 is more than its layers, num_hidden_layers = 2: write 2 or less"),
    ],
)
def test_models_that_stages_cannot_share_are_refused(
    family: str, stages: int, says: str, make_model: Callable[..., Path]
) -> None:
    model = load_causal_model(make_model(family), "cpu")
    with pytest.raises(ConfigError, match=says):
        keep_stage(model.whole, RankMesh(stages=_OneOf(stages)))


class _OneOf(Ranks):
    """The first of several ranks that exchange nothing."""

    def __init__(self, size: int) -> None:
        self.size = size


def _states(trainer: PolicyTrainer) -> dict[int, dict[str, torch.Tensor]]:
    states: dict[int, dict[str, torch.Tensor]] = trainer.optimizer.parts[0].state_dict()["state"]
    return states

"""Model folders that are damaged, have another tokenizer or head, or too short a context are found without weights."""

import json
import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.config.schema import Config
from asyncrl.engines.models.model_folder import (
    BASE,
    INDEX,
    WEIGHTS,
    context_of,
    damages,
    refuse_damaged,
    refuse_other_base,
    vocabulary,
    weights_digest,
    write_base,
)
from asyncrl.engines.models.scoring_models import head_labels, scoring_model_folders
from asyncrl.errors import ConfigError
from asyncrl.tasks.prompt_lengths import TokenBudget

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    save_file({"weight": torch.arange(50.0), "bias": torch.zeros(3, dtype=torch.bfloat16)}, tmp_path / WEIGHTS)
    return tmp_path


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        *(
            (lambda weights, left=left: os.truncate(weights, left % weights.stat().st_size), "cut short")
            for left in (0, 4, 30, 200, -1)
        ),
        (lambda weights: weights.write_bytes(b"<html>not found</html>"), ""),
        (lambda weights: weights.write_bytes((2).to_bytes(8, "little") + b"[]"), ""),
        (lambda weights: weights.write_bytes(weights.read_bytes() + b"more"), ""),
        (lambda weights: weights.with_name("config.json").write_text('{"hidden_size": 5'), "it is not JSON"),
    ],
)
def test_what_is_damaged_is_named_with_what_to_do(folder: Path, harm: Callable[[Path], object], said: str) -> None:
    refuse_damaged(folder)
    (folder / "adapter.safetensors").write_bytes(b"strange")
    assert list(damages(folder)) == [], "nobody loads it"
    harm(folder / WEIGHTS)
    (damage,) = damages(folder)
    assert said in damage
    with pytest.raises(ConfigError, match=r"^model\.name: .*Get it again"):
        refuse_damaged(folder)


def test_of_weights_in_parts_each_is_looked_at(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "part-1.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}))
    assert list(damages(folder)) == [f"{folder / 'part-2.safetensors'} is missing, and {INDEX} names it"]
    save_file({"b": torch.zeros(9)}, folder / "part-2.safetensors")
    assert list(damages(folder)) == []
    os.truncate(folder / "part-1.safetensors", 100)
    assert "part-1" in next(damages(folder))


@pytest.mark.parametrize(
    ("shape", "positions"),
    [
        ({"max_position_embeddings": 100}, 100),
        ({"n_positions": 70}, 70),
        ({}, None),
        ({"max_position_embeddings": None}, None),
        ({"text_config": {"max_position_embeddings": 30}, "max_position_embeddings": 9}, 30),
        ({"max_position_embeddings": 100, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": 2}}, 200),
        ({"max_position_embeddings": 100, "rope_parameters": YARN}, 400),
        ({"max_position_embeddings": 500, "rope_parameters": YARN}, 500),
        ({"max_position_embeddings": 800, "rope_scaling": {**YARN, "rope_type": "llama3", "factor": 32}}, 800),
    ],
)
def test_positions_are_those_of_the_config_and_of_its_scaling(shape: dict[str, Any], positions: int | None) -> None:
    assert context_of(shape) == positions


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (0, "the prompt has no tokens"),
        (1, None),
        (12, None),
        (13, r"13 tokens, and with generation.max_new_tokens = 8 .* beyond the 20 positions .* max_new_tokens = 7$"),
        (20, r"beyond the 20 positions .*: shorten it$"),
        (40, r"beyond the 20 positions .*: shorten it$"),
    ],
)
def test_a_prompt_needs_room_for_its_answer(tokens: int, says: str | None) -> None:
    mistake = TokenBudget(prompt=30, answer=8, context=20).mistake(tokens)
    assert mistake is None if says is None else re.search(says, str(mistake))


def test_without_a_bound_of_the_model_that_of_the_config_holds() -> None:
    assert TokenBudget(prompt=30, answer=8).mistake(30) is None
    assert "task.max_prompt_tokens is 30" in str(TokenBudget(prompt=30, answer=8).mistake(31))


def test_a_critic_begins_with_the_policy_or_with_a_folder_that_holds_a_model(tmp_path: Path) -> None:
    def with_critic(model: str) -> Config:
        changes = {"algorithm": {"preset": "ppo"}, "critic": {"model": model}}
        return Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p.jsonl"}, **changes})

    assert scoring_model_folders(with_critic(""), tmp_path) == {"critic": tmp_path, "cost_critic": tmp_path}
    with pytest.raises(ConfigError, match=r"^critic\.model: there is no folder nowhere; write one"):
        scoring_model_folders(with_critic("nowhere"), tmp_path)
    with pytest.raises(ConfigError, match=r"^critic\.model: .* holds no model: .* and it is empty"):
        scoring_model_folders(with_critic(str(tmp_path)), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"^critic\.model: there is no tokenizer in .*; save that of model\.name besi"
    ):
        scoring_model_folders(with_critic(str(tmp_path)), tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert scoring_model_folders(with_critic(str(tmp_path)), Path("policy"))["critic"] == tmp_path


def test_a_model_that_judges_has_to_have_the_policys_tokenizer(tmp_path: Path) -> None:
    """Known before anything is started: tokenizer.json says what each id means."""
    folders = {}
    for name, words in (("policy", "abc"), ("same", "abc"), ("other", "acb"), ("silent", "")):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        (folders[name] / "config.json").write_text("{}")
        save_file({"score.weight": torch.zeros(1, 4)}, folders[name] / "model.safetensors")
        described = {"model": {"vocab": {word: i for i, word in enumerate(words)}}, "added_tokens": None}
        (folders[name] / "tokenizer.json").write_text(json.dumps(described) if words else "{}")

    for service in ("reward", "cost", "critic", "cost_critic"):
        assert judged_by(service, folders["same"])[service] == folders["same"]
        assert judged_by(service, folders["silent"])[service] == folders["silent"], "only the service itself can tell"
        with pytest.raises(ConfigError, match=rf"^{service}\.model: its tokenizer is not that of model\.name"):
            judged_by(service, folders["other"], folders["policy"])


def test_a_model_that_judges_has_positions_for_the_longest_row(tmp_path: Path) -> None:
    folders = {}
    for name, positions in (("policy", 2000), ("small", 500), ("short", 520)):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        (folders[name] / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
        save_file({"score.weight": torch.zeros(1, 4)}, folders[name] / "model.safetensors")
        (folders[name] / "tokenizer.json").write_text("{}")
    for service in ("reward", "cost", "critic", "cost_critic"):
        with pytest.raises(ConfigError, match=rf"^{service}\.model: .* made for 520 positions .* may have \d+ tokens"):
            judged_by(service, folders["short"], folders["policy"])
        assert judged_by(service, folders["short"], folders["small"]), "no row is longer than the policy's positions"


def judged_by(service: str, folder: Path, policy: Path | None = None) -> dict[str, Path]:
    changes: dict[str, dict[str, Any]] = {"algorithm": {"preset": "safe_rlhf"}}
    changes["cost"] = {"functions": ["exact_match"], "limit": 1}
    changes[service] = {**changes.get(service, {}), "model": str(folder)}
    given = {"model": {"name": "m"}, "task": {"prompts": "p.jsonl"}, **changes}
    return scoring_model_folders(Config.model_validate(given), policy or folder)


@pytest.mark.parametrize(
    ("weights", "config", "labels"),
    [
        ({"score.weight": (1, 4)}, {}, 1),
        ({"score.weight": (2, 4)}, {"id2label": {"0": "no"}}, 2),
        ({"classifier.weight": (3, 4), "classifier.bias": (3,)}, {}, 3),
        ({"classifier.dense.weight": (4, 4)}, {}, None),
        ({"lm_head.weight": (9, 4)}, {"num_labels": 1}, 0),
        (None, {"id2label": {"0": "no", "1": "yes"}}, 2),
        (None, {"num_labels": 1}, 1),
        (None, {}, None),
    ],
)
def test_a_head_of_other_than_one_score_is_known_before_anything_is_started(
    weights: dict[str, tuple[int, ...]] | None, config: dict[str, Any], labels: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    if weights is None:
        (tmp_path / "pytorch_model.bin").touch()
    else:
        tensors = {name: torch.zeros(shape) for name, shape in weights.items()}
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert head_labels(tmp_path) == labels
    for service in ("reward", "cost", "critic", "cost_critic"):
        refused = labels in (2, 3) and weights is not None if "critic" in service else labels in (0, 2, 3)
        says = "has no head that scores" if labels == 0 else rf"the head of .* has {labels} labels"
        with pytest.raises(ConfigError, match=rf"^{service}\.model: .*{says}") if refused else nullcontext():
            assert judged_by(service, tmp_path)[service] == tmp_path


def test_a_vocabulary_is_read_as_each_kind_of_tokenizer_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<eos>"}]}))
    assert vocabulary(tmp_path) == {0: "a", 1: "b", 2: "<eos>"}
    path.write_text(json.dumps({"model": {"vocab": [["a", -1.5], ["b", -2.0]]}, "added_tokens": []}))
    assert vocabulary(tmp_path) == {0: "a", 1: "b"}
    path.write_text("no json")
    assert vocabulary(tmp_path) == {}


# The digest by which a run with adapters knows its base model.
TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(4, dtype=torch.bfloat16)}


def saved(folder: Path, tensors: dict[str, Any]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def test_the_digest_does_not_depend_on_files_and_order(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole", TENSORS)
    split = tmp_path / "split"
    split.mkdir()
    files = {}
    for number, name in enumerate(TENSORS):
        files[name] = f"model-{number}.safetensors"
        save_file({name: TENSORS[name]}, split / files[name])
    (split / INDEX).write_text(json.dumps({"weight_map": files}))
    assert weights_digest(whole) == weights_digest(split)


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: {**weights, "a.weight": weights["a.weight"] + 1e-6},
        lambda weights: {**weights, "a.weight": weights["a.weight"].reshape(3, 2)},
        lambda weights: {**weights, "b.weight": weights["b.weight"].half()},
        lambda weights: {"a.weight": weights["a.weight"]},
        lambda weights: {"a.weight": weights["a.weight"], "c.weight": weights["b.weight"]},
    ],
)
def test_any_other_weights_have_another_digest(change: Callable[[Any], dict[str, Any]], tmp_path: Path) -> None:
    assert weights_digest(saved(tmp_path / "a", TENSORS)) != weights_digest(saved(tmp_path / "b", change(TENSORS)))


def test_files_of_torch_are_digested_whole(tmp_path: Path) -> None:
    found = set()
    for number in (1, 1, 2):
        (tmp_path / "pytorch_model.bin").write_bytes(bytes([number]) * 9)
        found.add(weights_digest(tmp_path))
    assert len(found) == 2


def test_another_base_model_is_refused_with_both_digests(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", TENSORS)
    other = saved(tmp_path / "other", {"a.weight": torch.zeros(2, 3)})
    refuse_other_base(tmp_path, other)
    write_base(tmp_path, base, weights_digest(base))
    assert json.loads((tmp_path / BASE).read_text())["folder"] == str(base)
    refuse_other_base(tmp_path, base)
    with pytest.raises(ConfigError, match="holds another model than the one") as refused:
        refuse_other_base(tmp_path, other)
    assert all(digest in str(refused.value) for digest in (weights_digest(base), weights_digest(other)))

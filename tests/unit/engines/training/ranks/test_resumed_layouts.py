"""Checkpoints of ranks that share out the weights: each rank writes its parts, and any other layout resumes them bit
for bit. The ranks are processes over gloo."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from asyncrl.config.schema import Config
from asyncrl.engines.models.model_folder import existing_folder
from asyncrl.engines.models.tensor_parts import TensorPart, gather_model, part_file, stored_tensors, write_parts
from asyncrl.engines.training.models_with_heads import load_score_model
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.training_step import run_step
from asyncrl.errors import ConfigError, JournalError
from asyncrl.protocols.rank_layout import Layout
from tests.unit.engines.training.ranks import layout_process
from tests.unit.engines.training.ranks.layout_process import TensorBytes, scores_of, whole
from tests.unit.engines.training.ranks.stage_process import rows_of

OF_LLAMA: dict[str, list[dict[str, int]]] = {
    "shards to one": [{"shard": 2}, {}],
    "stages to shards": [{"pp": 2}, {"shard": 2}],
    "layers and shards to copies": [{"tp": 2, "shard": 2}, {"dp": 2}],
    "uneven shards to stages": [{"shard": 3}, {"pp": 2, "tp": 2}],
}
OF_EXPERTS: dict[str, list[dict[str, int]]] = {
    "one to experts": [{}, {"dp": 2, "ep": 2}],
    "copies to experts": [{"dp": 2, "ep": 2}, {"ep": 4}],
}
"""Those of a model with layers of experts. Ranks that share out experts do not sample."""
TRIALS = OF_LLAMA | OF_EXPERTS
PARTED = [name for name, (first, _) in TRIALS.items() if first]
COUNTERS = 4096
"""Most bytes of what moments hold beside two numbers for each weight."""


@pytest.fixture(scope="module")
def config() -> Config:
    training = {"learning_rate": 1e-3, "micro_batch_tokens": 64, "logits_chunk": 16}
    model = {"name": "tiny", "dtype": "bfloat16"}
    return Config.model_validate({"model": model, "task": {"prompts": "none"}, "training": training})


@pytest.fixture(scope="module")
def folder(config: Config, make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has checkpoints by the names of trials, and `NAME-0-RANK.pt` and `NAME-1-RANK.pt` of what ranks held."""
    folder = tmp_path_factory.mktemp("layouts")
    policy = make_model("llama", tie_word_embeddings=True)
    torch.manual_seed(2)
    judge = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    judge.save_pretrained(folder / "judge")
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder / "judge")
    _run(folder, config, policy, OF_LLAMA)
    _run(folder, config, make_model("qwen3_moe"), OF_EXPERTS)
    return folder


def _run(folder: Path, config: Config, model: Path, layouts: dict[str, list[dict[str, int]]]) -> None:
    trial = {"model": str(model), "config": config.model_dump(mode="json", exclude_unset=True), "layouts": layouts}
    trial["judge"] = str(folder / "judge")
    (folder / "trial.json").write_text(json.dumps(trial))
    one = PolicyTrainer(config, model)
    for version in range(2):
        run_step(one, rows_of(version), 0, version)
    for name in [name for name, (first, _) in layouts.items() if not first]:
        one.save(folder / name, {"version": 2})
        torch.save({"whole": whole(one)}, folder / f"{name}-0-0.pt")
    subprocess.run([sys.executable, layout_process.__file__, str(folder)], check=True, timeout=300)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TRIALS)
def test_another_layout_resumes_bit_for_bit(name: str, folder: Path, config: Config) -> None:
    expected = torch.load(folder / f"{name}-0-0.pt")["whole"]
    if TRIALS[name][1]:
        found = torch.load(folder / f"{name}-1-0.pt")
    else:
        one, extra = PolicyTrainer.resume(config, folder / name)
        found = {"whole": whole(one), "extra": extra}
    assert found["extra"] == {"version": 2}
    _same(found["whole"], expected)


@pytest.mark.parametrize("name", PARTED)
def test_no_rank_holds_more_than_its_share_and_a_tensor(name: str, folder: Path) -> None:
    """Counts tensor bytes. While a model is loaded its parts have memory, and one tensor that is read; weights and two
    moments are copied once; a version is gathered tensor by tensor in the wire's type, which takes a tensor, its pieces
    and the part of this rank."""
    layout = Layout(**TRIALS[name][0])
    expected = scores_of(load_score_model(folder / "judge", "cpu"))
    for rank in range(layout.size):
        found = torch.load(folder / f"{name}-0-{rank}.pt")
        saved = found["bytes"]
        assert saved["copy"] <= 3 * saved["share"] + COUNTERS
        assert saved["copy"] > 0 or layout.place(rank).dp >= layout.shard * layout.ep, "copies write nothing"
        assert saved["write"] == 0
        assert 0 < saved["publish"] <= 3 * saved["largest"]
        judge = [found["judge"]] if "judge" in found else []
        for loading in (found["loading"], *judge):
            assert loading["compared"]
            assert loading["different"] == []
            assert 0 < loading["load"] <= loading["share"] + loading["largest"]
        for each in judge:
            assert each["loaded whole"] == ""
            torch.testing.assert_close(each["scores"], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", OF_LLAMA)
def test_each_rank_gathers_the_whole_model_to_sample_with_and_nothing_twice(name: str, folder: Path) -> None:
    """Three shards of numbers of rows that they do not divide send rows to fill up, which are at most two a tensor."""
    ranks = [torch.load(folder / f"{name}-0-{rank}.pt") for rank in range(Layout(**TRIALS[name][0]).size)]
    model = ranks[0]["whole"]["model"]
    for each in ranks:
        gathered = each["sampling"]["gathered"]
        _same(gathered, {name: model[name].to(torch.bfloat16) for name in gathered})
        assert gathered.keys() | {"lm_head.weight"} == model.keys(), "the head is the embedding"
        missing = sum(tensor.nbytes for tensor in gathered.values()) - each["sampling"]["own"]
        fill = sum(2 * tensor[0].nbytes for tensor in gathered.values()) if TRIALS[name][0].get("shard") == 3 else 0
        assert 0 < missing <= each["sampling"]["received"] <= missing + fill


@pytest.mark.parametrize("name", [name for name, (_, second) in TRIALS.items() if Layout(**second).size > 1])
def test_a_rank_resumes_its_share_alone(name: str, folder: Path) -> None:
    """Weights and two moments, also from the checkpoint of one rank, which has whole moments."""
    for rank in range(Layout(**TRIALS[name][1]).size):
        found = torch.load(folder / f"{name}-1-{rank}.pt")["bytes"]
        assert 0 < found["load"] <= 3 * found["share"] + found["largest"] + COUNTERS


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["layers and shards to copies", "copies to experts"])
def test_the_whole_model_is_gathered_tensor_by_tensor(name: str, folder: Path, tmp_path: Path) -> None:
    """transformers loads it, and torch.distributed.checkpoint reads the parts too."""
    checkpoint = folder / name
    expected = torch.load(folder / f"{checkpoint.name}-0-0.pt")["whole"]["model"]
    with pytest.raises(ConfigError, match=r"are in parts, .* write the whole model with `asyncrl export RUN FOLDER`$"):
        existing_folder(str(checkpoint / "model"))
    with TensorBytes() as gathering:
        gather_model(checkpoint / "model", tmp_path / "whole")
    assert 0 < gathering.peak <= 2 * max(each.nbytes for each in expected.values())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    _same(dict(model.state_dict()), expected)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "whole")) == 50
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    read = {name: torch.zeros_like(each) for name, each in expected.items() if name not in tied}
    reader = HuggingFaceStorageReader(str(checkpoint / "parts"))
    load(read, storage_reader=reader, no_dist=True)
    _same(read, {name: expected[name] for name in read})


def test_a_part_that_is_missing_or_cut_short_is_named(folder: Path, tmp_path: Path, config: Config) -> None:
    copy = tmp_path / "3"
    shutil.copytree(folder / "shards to one", copy)
    file = copy / "parts" / "rank-1-moments.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(JournalError, match=r"rank-1-moments\.safetensors is cut short or damaged"):
        PolicyTrainer.resume(config, copy)
    file.unlink()
    with pytest.raises(JournalError, match=r"3 has no parts/rank-1-moments\.safetensors, with parts of rank 1$"):
        PolicyTrainer.resume(config, copy)


def test_a_hole_between_parts_is_found(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    with (tmp_path / "parts" / part_file(0, "weights")).open("wb") as file:
        write_parts(file, {"q": TensorPart(torch.arange(4.0), (2,)), "step": TensorPart(torch.tensor(7), ())}, 1)
    stored = stored_tensors(tmp_path, "weights")
    assert torch.equal(stored["q"][slice(3, 5),], torch.tensor([1.0, 2.0]))
    assert stored["step"].whole().item() == 7
    with pytest.raises(JournalError, match=r"^q: the parts of the checkpoint hold 4 of 6 numbers$"):
        stored["q"].whole()


def _same(found: Any, expected: Any) -> None:
    """Two states have the same names and bits."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            _same(found[key], value)
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            _same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected

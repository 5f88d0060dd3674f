"""What a checkpoint holds: a model that transformers loads, and a trainer that goes on bit for bit."""

import asyncio
import dataclasses
import errno
import os
import sys
import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.schema import Config, TrainingConfig
from asyncrl.engines.ranks.rank_mesh import RankMesh
from asyncrl.engines.training.optimizer import learning_rate
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.trainer_checkpoint import GIVES_WAY_FROM, NICENESS, HeldCopy, StateCopy, own_state
from asyncrl.errors import ConfigError, JournalError
from tests.power_cut_disk import Disk
from tests.unit.engines.training.tiny_training import changed, make_config, make_rows, side_by_side, step

SETTINGS = {"schedule": "cosine", "warmup_steps": 2, "updates": 2, "weight_decay": 0.1}


def train(engine: PolicyTrainer, versions: range) -> list[dict[str, float]]:
    metrics = []
    for version in versions:
        rows = changed(make_rows(8, seed=version), versions=lambda row, v=version: np.full_like(row.versions, v))
        metrics.append(step(engine, rows, version).metrics)
    return metrics


def test_steps_after_a_load_equal_steps_without_interruption_bit_for_bit(tiny: Path, tmp_path: Path) -> None:
    config = make_config(training=SETTINGS)
    whole = PolicyTrainer(config, tiny)
    train(whole, range(3))
    whole.save(tmp_path, {"version": 3, "chain": "ab"})
    expected = train(whole, range(3, 6))
    resumed, extra = PolicyTrainer.resume(config, tmp_path)
    assert extra == {"version": 3, "chain": "ab"}
    assert train(resumed, range(3, 6)) == expected
    for name, tensor in whole.named_tensors().items():
        assert torch.equal(tensor, resumed.named_tensors()[name]), name


def test_all_that_a_trainer_saves_outlives_a_power_cut(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def files(folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    disk = Disk(monkeypatch)
    first = tmp_path / "first"
    second = tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    PolicyTrainer(make_config(), tiny).save(first, {})
    StateCopy(own_state(), None, 1).write(second)
    for folder in (first, second):
        found = disk.after_power_cut(tmp_path / f"{folder.name} after", folder.stat().st_ino)
        assert files(found) == files(folder)
        assert files(folder)


def test_a_full_disk_is_an_error_of_the_operating_system(tmp_path: Path) -> None:
    (tmp_path / "rank-1.pt").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as raised:
        StateCopy(own_state(), None, 1).write(tmp_path)
    assert raised.value.errno == errno.ENOSPC


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no priorities of threads")
@pytest.mark.parametrize(("size", "gives_way"), [(GIVES_WAY_FROM, True), (GIVES_WAY_FROM - 1, False)])
def test_a_large_copy_is_written_by_a_thread_that_gives_way_to_steps(
    size: int, gives_way: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    monkeypatch.setattr(StateCopy, "write", lambda *_: {"niceness": str(niceness())})
    before = niceness()
    copy = StateCopy({"optimizer": [{"exp_avg": torch.empty(size, dtype=torch.uint8)}]}, None, 1)
    assert copy.write_beside_steps(tmp_path) == {"niceness": str(max(before, NICENESS) if gives_way else before)}
    assert niceness() == before, "the caller's thread stays as it was"


@pytest.mark.parametrize(("in_background", "written_as"), [(True, "beside steps"), (False, "at once")])
async def test_a_copy_that_training_waits_for_gives_way_to_nothing(
    in_background: bool, written_as: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StateCopy, "write_beside_steps", lambda *_: {"written": "beside steps"})
    monkeypatch.setattr(StateCopy, "write", lambda *_: {"written": "at once"})
    held = HeldCopy(1, 0, "", StateCopy({}, None, 1), TrainingConfig(background_checkpoints=in_background))
    async with asyncio.TaskGroup() as tasks:
        assert (await held.write(tmp_path, tasks)).files == {"written": written_as}


def test_the_model_folder_loads_with_transformers(tmp_path: Path, make_model: Callable) -> None:
    engine = PolicyTrainer(make_config(), make_model("llama", attention_dropout=0.25))
    train(engine, range(1))
    engine.save(tmp_path, {})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    saved = dict(model.named_parameters())
    assert all(torch.equal(tensor, saved[name]) for name, tensor in engine.named_tensors().items())
    assert AutoConfig.from_pretrained(tmp_path / "model").attention_dropout == 0.25, "the config as it came"
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == 50


@pytest.mark.trap("padded_vocabulary")
def test_tied_weights_are_published_under_both_names_and_resume(tmp_path: Path, make_model: Callable) -> None:
    """The tied output layer is in every weight path."""
    config = make_config()
    engine = PolicyTrainer(config, make_model("llama", tie_word_embeddings=True))
    train(engine, range(1))
    tensors = engine.named_tensors()
    assert tensors["lm_head.weight"] is not None
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert engine.weights_spec.aliases == (("lm_head.weight", "model.embed_tokens.weight"),)
    engine.save(tmp_path, {})
    resumed, _ = PolicyTrainer.resume(config, tmp_path)
    assert torch.equal(resumed.named_tensors()["lm_head.weight"], tensors["lm_head.weight"])


def test_a_checkpoint_without_the_trainers_file_says_so(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(tiny)
    with pytest.raises(JournalError, match=r"has no trainer\.pt"):
        PolicyTrainer.resume(make_config(), tmp_path)


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_digests_are_those_of_every_file(lora: dict[str, int] | None, tiny: Path, tmp_path: Path) -> None:
    made = PolicyTrainer(make_config(model={"name": "tiny", "lora": lora}), tiny).save(tmp_path, {})
    found = {path for path in tmp_path.rglob("*") if path.is_file()}
    state = torch.load(tmp_path / "trainer.pt", weights_only=True)  # It holds no code.
    assert state.keys() - {"canary"} == {"optimizer", "rng", "kl", "extra", "ranks"}
    assert made == {str(path.relative_to(tmp_path)): sha256(path.read_bytes()).hexdigest() for path in found}


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_a_copy_that_is_written_after_further_steps_is_of_its_own_version(
    lora: dict[str, int] | None, tiny: Path, tmp_path: Path
) -> None:
    config = make_config(training=SETTINGS, model={"name": "tiny", "lora": lora})
    engine = PolicyTrainer(config, tiny)
    train(engine, range(2))
    engine.save(tmp_path / "at once", {})
    copy = engine.copy_state({})
    train(engine, range(2, 4))
    copy.write(tmp_path / "later")
    for name in sorted(copy.write(tmp_path / "again")):
        assert (tmp_path / "later" / name).read_bytes() == (tmp_path / "at once" / name).read_bytes(), name


def test_the_rate_warms_up_and_then_follows_the_schedule() -> None:
    def rates(schedule: str, updates: int = 1) -> list[float]:
        settings = TrainingConfig(learning_rate=1.0, schedule=schedule, warmup_steps=3, updates=updates)
        return [learning_rate(settings, update, 10 * updates) for update in range(10 * updates)]

    assert rates("constant") == [0.25, 0.5, 0.75, *[1.0] * 7]
    np.testing.assert_allclose(rates("linear")[3:], 1 - np.arange(7) / 7)
    np.testing.assert_allclose(rates("cosine")[3:], (1 + np.cos(np.pi * np.arange(7) / 7)) / 2)
    assert rates("constant", updates=2)[5:7] == [6 / 7, 1.0]


def test_weight_decay_spares_norms_and_biases(make_model: Callable) -> None:
    engine = PolicyTrainer(make_config(training={"weight_decay": 0.5}), make_model("qwen2"))
    decayed, spared = engine.optimizer.parts[0].param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.5, 0.0)
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in spared["params"]} == {1}


def test_a_checkpoint_of_two_ranks_is_taken_up_by_one_two_or_three(
    tiny: Path, tmp_path: Path, thread_ranks: Callable[[int], list[RankMesh]]
) -> None:
    two, (made, by_second) = save_on_two_ranks(make_config(), tiny, tmp_path, thread_ranks)
    assert {"trainer.pt", "model/model.safetensors"} <= made.keys()
    assert by_second.keys() == {"rank-1.pt"}
    for ranks in (two, thread_ranks(3), [RankMesh()]):
        for rank in ranks:
            _, extra = PolicyTrainer.resume(make_config(), tmp_path, rank)
            assert extra == {"version": 3}


def test_ranks_with_random_numbers_of_their_own_get_them_back_and_others_are_refused(
    tiny: Path, tmp_path: Path, thread_ranks: Callable[[int], list[RankMesh]]
) -> None:
    two, _ = save_on_two_ranks(make_config(), tiny, tmp_path, thread_ranks)
    torch.manual_seed(5)
    StateCopy(own_state(), None, 1).write(tmp_path)
    expected = torch.rand(3)
    PolicyTrainer.resume(make_config(), tmp_path, two[1])
    assert torch.equal(torch.rand(3), expected)
    with pytest.raises(ConfigError, match=r"2 ranks with different random states .*layout has 1; write one of 2"):
        PolicyTrainer.resume(make_config(), tmp_path)
    second_of_a_copy = dataclasses.replace(thread_ranks(4)[3], part=1, parts=2)
    PolicyTrainer.resume(make_config(), tmp_path, second_of_a_copy)
    assert torch.equal(torch.rand(3), expected), "each copy of two ranks takes what two ranks saved"


def save_on_two_ranks(
    config: Config, model: Path, folder: Path, thread_ranks: Callable[[int], list[RankMesh]]
) -> tuple[list[RankMesh], list[dict[str, str]]]:
    two = thread_ranks(2)
    engines = [PolicyTrainer(config, model, rank) for rank in two]
    return two, side_by_side([lambda e=engine: e.save(folder, {"version": 3}) for engine in engines])

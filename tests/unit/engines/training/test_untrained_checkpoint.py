"""A checkpoint before the first update refers to the weights that the run began with."""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from asyncrl.controller.journal.checkpoints import commit, newest_model, plan_resume
from asyncrl.controller.journal.journal import Journal
from asyncrl.controller.journal.run_copy import Head, Snapshot, download, upload
from asyncrl.controller.journal.run_storage import FileStore
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.errors import ConfigError, JournalError
from asyncrl.protocols.messages import Checkpointed
from tests.memory_objects import MemoryObjects
from tests.unit.engines.training.test_trainer_checkpoint import SETTINGS, train
from tests.unit.engines.training.tiny_training import make_config

EXTRA = {"version": 0, "chain": "", "incarnation": 1}


def prepared(config: object, folder: Path) -> PolicyTrainer:
    """Returns a trainer as the service of a run makes it."""
    trainer = PolicyTrainer(config, folder)  # type: ignore[arg-type]
    trainer.prepared = folder
    return trainer


def held(folder: Path) -> int:
    """Returns the bytes that the files of a folder take themselves."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.suffix == ".safetensors")


def stored_as(dtype: torch.dtype, folder: Path, shards: int = 1) -> Path:
    """Stores the weights of a model folder in another type, and in several files."""
    tensors = {name: each.to(dtype) for name, each in load_file(folder / "model.safetensors").items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    where = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file({name: tensors[name] for name in names[shard::shards]}, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names[shard::shards], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


async def committed(run_dir: Path, trainer: PolicyTrainer) -> None:
    with closing(FileStore(run_dir)) as store:
        journal = Journal(store)

        async def write(directory: str) -> Checkpointed:
            return Checkpointed(0, journal.ledger.chain.hex(), trainer.save(Path(directory), EXTRA))

        await commit(journal, write, keep=1)


@pytest.mark.parametrize(("dtype", "shards"), [(torch.float32, 1), (torch.bfloat16, 1), (torch.float16, 3)])
def test_an_untrained_checkpoint_holds_no_weights_and_resumes_bit_for_bit(
    dtype: torch.dtype, shards: int, tmp_path: Path, make_model: Callable
) -> None:
    folder = stored_as(dtype, make_model("llama"), shards)
    config = make_config(training=SETTINGS)
    whole = prepared(config, folder)
    checkpoint = tmp_path / "run" / "checkpoints" / "0"
    digests = whole.save(checkpoint, EXTRA)
    assert held(checkpoint) < held(folder) / 20
    assert sum(name.endswith(".safetensors") for name in digests) == shards, "the manifest has the digest of each"
    weights = AutoModelForCausalLM.from_pretrained(checkpoint / "model", dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in whole.named_tensors().items())
    expected = train(whole, range(3))
    resumed, extra = PolicyTrainer.resume(config, checkpoint)
    assert extra == EXTRA
    assert train(resumed, range(3)) == expected
    for name, tensor in whole.named_tensors().items():
        assert torch.equal(tensor, resumed.named_tensors()[name]), name


def test_later_checkpoints_hold_their_weights(tmp_path: Path, make_model: Callable) -> None:
    folder = make_model("llama")
    trainer = prepared(make_config(), folder)
    train(trainer, range(1))
    trainer.save(tmp_path / "trained", EXTRA)
    resumed, _ = PolicyTrainer.resume(make_config(), tmp_path / "trained")
    resumed.save(tmp_path / "resumed", EXTRA)
    for checkpoint in (tmp_path / "trained", tmp_path / "resumed"):
        assert not (checkpoint / "model" / "model.safetensors").is_symlink()
        assert held(checkpoint) >= held(folder)


def test_weights_of_a_type_that_float32_rounds_are_copied(tmp_path: Path, make_model: Callable) -> None:
    prepared(make_config(), stored_as(torch.float64, make_model("llama"))).save(tmp_path / "0", EXTRA)
    assert load_file(tmp_path / "0" / "model" / "model.safetensors")["model.norm.weight"].dtype == torch.float32


def test_adapters_are_copied(tmp_path: Path, make_model: Callable) -> None:
    prepared(make_config(model={"name": "tiny", "lora": {}}), make_model("llama")).save(tmp_path / "0", EXTRA)
    assert not (tmp_path / "0" / "model" / "adapter_model.safetensors").is_symlink()


@pytest.mark.parametrize("is_link", [False, True])
async def test_links_to_the_model_of_a_run_move_with_it(is_link: bool, tmp_path: Path, make_model: Callable) -> None:
    model = tmp_path / "run" / "model"
    cached = make_model("llama")
    model.parent.mkdir()
    model.symlink_to(cached) if is_link else shutil.copytree(cached, model)
    await committed(tmp_path / "run", prepared(make_config(), model))
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    assert newest_model(moved) == (moved / "checkpoints" / "0" / "model", 0)
    link = moved / "checkpoints" / "0" / "model" / "model.safetensors"
    assert link.readlink() == Path("../../../model/model.safetensors")


async def test_a_copy_in_a_store_of_objects_has_the_weights_themselves(tmp_path: Path, make_model: Callable) -> None:
    run_dir = tmp_path / "run"
    folder = make_model("llama")
    objects = MemoryObjects()
    await committed(run_dir, prepared(make_config(), folder))
    snapshot = Snapshot.take(run_dir, 0)
    head, _ = upload(objects, snapshot, None, "", "one")
    snapshot.release()
    weights = (folder / "model.safetensors").read_bytes()
    shutil.rmtree(run_dir), shutil.rmtree(folder)
    download(objects, Head.decode(head.encode(), "memory"), tmp_path / "elsewhere")
    found, version = newest_model(tmp_path / "elsewhere")
    assert version == 0
    assert not (found / "model.safetensors").is_symlink()
    assert (found / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize(("change", "words"), [("edit", "was changed or damaged"), ("remove", "is missing")])
async def test_a_resume_from_weights_that_are_others_by_now_is_refused(
    change: str, words: str, tmp_path: Path, make_model: Callable
) -> None:
    folder = make_model("llama")
    await committed(tmp_path / "run", prepared(make_config(), folder))
    weights = folder / "model.safetensors"
    if change == "edit":
        tensors = load_file(weights)
        times = weights.stat()
        tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1e-3
        save_file(tensors, weights, metadata={"format": "pt"})
        os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    else:
        weights.unlink()
        with pytest.raises(ConfigError, match=rf"is a link to {weights}, which is gone"):
            PolicyTrainer.resume(make_config(), tmp_path / "run" / "checkpoints" / "0")
    with (
        closing(FileStore(tmp_path / "run")) as store,
        pytest.raises(JournalError, match=rf"{words}.*it is a link: put back {weights} as it was.*--run-dir"),
    ):
        plan_resume(store)


def test_files_that_only_others_write_are_linked(
    tmp_path: Path, make_model: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model("llama")
    synced = []
    monkeypatch.setattr("asyncrl.engines.training.trainer_checkpoint.sync_to_disk", synced.append)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    prepared(make_config(), folder).save(tmp_path / "0", EXTRA)
    assert (tmp_path / "0" / "model" / "model.safetensors").is_symlink()
    assert synced
    assert all(path.is_relative_to(tmp_path / "0") and not path.is_symlink() for path in synced)

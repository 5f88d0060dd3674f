"""Models of the hub, from a small true hub on the loopback, with a cache of their own."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import hf_hub_download

from asyncrl.config.schema import Config
from asyncrl.deploy.checks.model_checks import here
from asyncrl.deploy.preflight import preflight
from asyncrl.engines.models.model_preparation import (
    Show,
    cached_folder,
    is_hub_name,
    make_model,
    needed_files,
    prepare,
)
from asyncrl.engines.models.scoring_models import scoring_model_folders
from asyncrl.errors import ConfigError
from tests import golden
from tests.hub import FIRST, SECOND, Hub, running_hub
from tests.unit.engines.generation.conftest import make_model as random_model

NAME = "owner/tiny"
SHARDED = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
TEMPLATE = "additional_chat_templates/x.jinja"


def config(name: str = NAME, **sections: Any) -> Config:
    model = {"name": name} | sections.pop("model", {})
    return Config.model_validate({"model": model, "task": {"prompts": "rows.jsonl"}, **sections})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with copies of its weights in other formats, as repositories have them."""
    folder = random_model("llama", tmp_path_factory.mktemp("tiny"))
    for name in ("pytorch_model.bin", "model.fp16.safetensors", "consolidated.safetensors", "tiny.gguf", "README.md"):
        (folder / name).write_bytes(b"a copy in another format")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    (folder / "onnx" / "model.safetensors").write_bytes(b"a copy")
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: Path) -> Iterator[Hub]:
    """A hub with the model NAME, and an empty cache, for this process and its children."""
    with running_hub() as running:
        running.put(NAME, tiny)
        for name, value in running.environment(tmp_path / "home").items():
            if name.startswith("HF_"):
                monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", running.address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        template = running.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield running


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(
    ("names", "needed"),
    [
        (["model.safetensors", "pytorch_model.bin", "model.onnx"], ["model.safetensors"]),
        (["model.safetensors", "model.fp16.safetensors", "consolidated.safetensors"], ["model.safetensors"]),
        (
            [*SHARDED, "consolidated.safetensors", "pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"],
            SHARDED,
        ),
        (["pytorch_model.bin", "tf_model.h5", "flax_model.msgpack"], ["pytorch_model.bin"]),
        (
            ["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json", "training_args.bin"],
            ["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"],
        ),
        (
            ["model.safetensors", "model.safetensors.index.json", "model-00001-of-00001.safetensors"],
            ["model.safetensors"],
        ),
        (["config.json", "tokenizer.model", "merges.txt", "chat_template.jinja"],) * 2,
        (["original/params.json", "onnx/config.json", TEMPLATE, "README.md", "a.gguf"], [TEMPLATE]),
    ],
)
def test_of_weights_in_several_formats_one_is_needed(names: list[str], needed: list[str]) -> None:
    assert needed_files(names) == sorted(needed)


@pytest.mark.parametrize("name", ["gpt2", NAME, "Qwen/Qwen2.5-0.5B-Instruct", "a/b_c.d-e"])
def test_names_of_the_hub(name: str) -> None:
    assert is_hub_name(name)
    assert not is_hub_name(f"./{name}")
    assert not is_hub_name(f"warmed:{name}")
    assert not is_hub_name(f"/{name}")


def made(target: Path, name: str = NAME, revision: str = "", show: Show = print) -> Path:
    """Makes a model folder in this process, as the child of a run does."""
    make_model(name, 0, target, show, "torch", revision)
    return target


async def test_runs_trials_and_scorers_share_one_download(hub: Hub, tmp_path: Path) -> None:
    lines: list[str] = []
    target = tmp_path / "first" / "model"
    assert await prepare(config(), target, lines.append) == target
    for run in ("second", "trial"):
        made(tmp_path / run / "model", show=lines.append)
    for run in ("first", "second", "trial"):
        assert (tmp_path / run / "model").resolve() == cached_folder(NAME)
        assert json.loads((tmp_path / run / "hub.json").read_text()) == {NAME: FIRST}
    assert hub.downloads[f"{NAME}/model.safetensors"] == 1
    assert sum("downloading" in line for line in lines) == 1
    assert set(hub.downloads.values()) == {1}
    for other in ("pytorch_model.bin", "model.fp16.safetensors", "tiny.gguf", "onnx/model.safetensors", "README.md"):
        assert hub.downloads[f"{NAME}/{other}"] == 0
    chosen = config(algorithm={"preset": "ppo"}, critic={"model": NAME})
    noted = tmp_path / "first" / "hub.json"
    assert scoring_model_folders(chosen, tmp_path / "first" / "model", noted)["critic"] == cached_folder(NAME)
    assert hub.downloads[f"{NAME}/model.safetensors"] == 1


def test_what_other_programs_have_in_the_cache_is_not_fetched_again(hub: Hub, tmp_path: Path) -> None:
    """Nor taken while it is no whole model."""
    for file in ("config.json", "model.safetensors"):
        hf_hub_download(NAME, file)
    sent = hub.downloads[f"{NAME}/model.safetensors"]
    assert cached_folder(NAME) is None, "it has no tokenizer yet"
    whole = made(tmp_path / "model").resolve()
    assert hub.downloads[f"{NAME}/model.safetensors"] == sent
    assert cached_folder(NAME) == whole
    for missing in ("model.safetensors", "config.json"):
        (whole / missing).rename(tmp_path / missing)
        assert cached_folder(NAME) is None
        (tmp_path / missing).rename(whole / missing)
    assert cached_folder("not a name of the hub!") is None


async def test_a_filled_cache_needs_no_network(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "first" / "model")
    go_offline(monkeypatch)
    assert await prepare(config(), tmp_path / "second" / "model", print) == tmp_path / "second" / "model"
    for revision in ("", "main", FIRST):
        chosen = config(model={"revision": revision})
        assert made(tmp_path / f"at{revision}", revision=revision).resolve() == cached_folder(NAME, revision)
        assert here(chosen.model) == cached_folder(NAME, revision)
        assert not [problem for problem in preflight(chosen) if problem.key == "model.name"]


async def test_a_hub_that_is_not_there_leaves_the_cache(hub: Hub, tmp_path: Path) -> None:
    """Children ask: this process is still connected."""
    made(tmp_path / "first" / "model")
    lines: list[str] = []
    hub.shutdown()
    hub.server_close()
    await prepare(config(), tmp_path / "second" / "model", lines.append)
    assert any("is taken from the cache" in line for line in lines)
    said = r"^model\.name: owner/other .* could not be downloaded .*hf download owner/oth"
    with pytest.raises(ConfigError, match=said):
        await prepare(config("owner/other"), tmp_path / "other" / "model", print)


async def test_offline_without_the_model_is_refused_before_the_start(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_offline(monkeypatch)
    chosen = config(reward={"model": "owner/judge"})
    for key in ("model.name", "reward.model"):
        (found,) = [problem for problem in preflight(chosen) if problem.key == key]
        assert "HF_HUB_OFFLINE is set" in found.text
        assert "hf download owner/" in found.text
    with pytest.raises(ConfigError, match=r"owner/tiny .* not whole in the cache .*HF_HUB_OFFLINE is set"):
        await prepare(config(), tmp_path / "model", print)


def test_a_resume_takes_the_commit_that_the_run_began_with(hub: Hub, tmp_path: Path, tiny: Path) -> None:
    target = made(tmp_path / "run" / "model")
    changed = tmp_path / "changed"
    shutil.copytree(tiny, changed)
    (changed / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    hub.put(NAME, changed, SECOND)
    target.unlink()  # As in a copy of the run directory on another machine.
    shutil.rmtree(tmp_path / "home")
    assert made(target).resolve().name == FIRST
    assert made(tmp_path / "new" / "model").resolve().name == SECOND
    folders = scoring_model_folders(config(critic={"model": NAME}), target, target.with_name("hub.json"))
    assert folders["critic"].name == FIRST


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: Hub, tmp_path: Path, tiny: Path) -> None:
    hub.put(NAME, tiny, SECOND, "v2")
    for revision, commit in (("v2", SECOND), ("", FIRST), (SECOND, SECOND)):
        assert made(tmp_path / f"at{revision}" / "model", revision=revision).resolve().name == commit
    with golden.raises(ConfigError, match=r"v9"):
        made(tmp_path / "v9" / "model", revision="v9")


def test_what_the_hub_refuses_is_explained(hub: Hub, tmp_path: Path, tiny: Path) -> None:
    hub.put("owner/gated", tiny)
    hub.gated.add("owner/gated")
    (tmp_path / "files").mkdir()
    for name in ("model.gguf", "config.json"):
        (tmp_path / "files" / name).write_text("{}")
    hub.put("owner/packed", tmp_path / "files")
    for name, said in {
        "owner/gated": "is gated: accept its terms .*hf auth login",
        "owner/none": "the hub has no model owner/none that may be read",
        "owner/packed": "on the hub has no weights that transformers loads",
    }.items():
        with pytest.raises(ConfigError, match=rf"^model\.name: .*{said}"):
            made(tmp_path / "made", name)
    assert not [name for name in os.listdir(tmp_path) if "making" in name]

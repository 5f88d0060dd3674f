"""Commands that use the adapters of a run refuse a base model that was changed since."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.config.schema import Config
from asyncrl.deploy import cli
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from tests.unit.deploy.commands.committed_run import committed_run
from tests.unit.engines.generation.conftest import model_folder as model_folder


@pytest.fixture
def base(model_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    return shutil.copytree(model_folder("llama"), tmp_path / "base")


@pytest.fixture
async def run_dir(base: Path, tmp_path: Path) -> Path:
    """A run whose trainer saved one checkpoint."""
    sections = {
        "model": {"name": str(base), "lora": {"rank": 2}},
        "task": {"prompts": "asyncrl.tasks.builtin.reverse:training", "max_prompt_tokens": 8},
        "evaluate": {"prompts": "asyncrl.tasks.builtin.reverse:held_out", "size": 2},
        "reward": {"functions": ["exact_match"]},
    }
    config = Config.model_validate(sections)
    return await committed_run(tmp_path / "run", config, lambda folder: PolicyTrainer(config, base).save(folder, {}))


def change(base: Path) -> None:
    """Changes one number of the model so little that no log-prob shows it."""
    path = base / "model.safetensors"
    weights = load_file(path)
    name = sorted(weights)[0]
    weights[name].view(-1)[0] += 1e-4
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize("command", [["export", "{run}", "{tmp}/out", "--merge"], ["evaluate", "{run}"]])
def test_a_changed_base_model_is_refused(
    command: list[str], run_dir: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    change(base)
    assert cli.main([part.format(run=run_dir, tmp=tmp_path) for part in command]) == 2
    said = capsys.readouterr().err
    assert f"model.name: {base} holds another model than the one on which the adapters in {run_dir}" in said
    assert "put back the model that the run began with" in said
    assert not (tmp_path / "out").exists()


def test_the_same_base_model_is_merged(run_dir: Path, tmp_path: Path) -> None:
    assert cli.main(["export", str(run_dir), str(tmp_path / "out"), "--merge"]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_adapters_without_their_model_are_not_evaluated(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", str(run_dir), str(tmp_path / "out")]) == 0
    assert cli.main(["evaluate", str(tmp_path / "out"), "--task", "quickstart"]) == 2
    assert f"{tmp_path}/out holds adapters, and not the model that they belong to" in capsys.readouterr().err

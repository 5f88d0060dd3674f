"""asyncrl audit and export, on a run directory with a checkpoint."""

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.config.schema import Config
from asyncrl.controller.journal.checkpoints import newest_model
from asyncrl.controller.journal.run_storage import FileStore
from asyncrl.deploy import cli
from asyncrl.engines.models.model_folder import existing_folder, exported_version
from asyncrl.engines.models.tensor_parts import TensorPart, part_file, write_parts
from asyncrl.errors import ConfigError
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.source_copies import INDEX, keep, look_at
from tests import golden
from tests.unit.deploy.commands.committed_run import committed_run

WEIGHTS = b"weights of version 0"
HALVES = (torch.arange(2.0), torch.arange(2.0, 4.0))
"""Slices of the weights of a critic that each of two ranks has."""


@pytest.fixture
async def run_dir(tmp_path: Path) -> Path:
    config = Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p"}})
    path = await committed_run(tmp_path / "run", config, write_models)
    keep(RunDirectory(path).sources, [])
    return path


def write_models(checkpoint: Path) -> None:
    """Writes a policy and a critic in parts."""
    for folder in ("model", "critic/model", "critic/parts"):
        (checkpoint / folder).mkdir(parents=True)
    (checkpoint / "model" / "model.safetensors").write_bytes(WEIGHTS)
    for rank, values in enumerate(HALVES):
        with (checkpoint / "critic" / "parts" / part_file(rank, "weights")).open("wb") as file:
            write_parts(file, {"score.weight": TensorPart(values, (rank * len(values),))}, len(HALVES))


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[10] ^= 0xFF
    path.write_bytes(content)


def test_a_run_that_can_only_be_read_is_audited_and_exported(
    run_dir: Path,
    readable_folder: Path,
    only_reading: Callable[..., AbstractContextManager[None]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(run_dir, readable_folder / "run")
    with only_reading(readable_folder / "run"):
        with pytest.raises(PermissionError):
            FileStore(readable_folder / "run")
        assert cli.main(["audit", str(readable_folder / "run")]) == 0
        assert newest_model(readable_folder / "run")[1] == 0
    assert "the audit holds" in capsys.readouterr().out


def test_looking_at_a_run_makes_nothing_in_it(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "journal").unlink()
    shutil.rmtree(run_dir / "checkpoints")
    assert cli.main(["export", str(run_dir), str(tmp_path / "model")]) == 2
    assert cli.main(["audit", str(run_dir)]) == 2
    assert sorted(path.name for path in run_dir.iterdir()) == ["config.toml", "sources"]


def gone(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def holding(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("journal", damage),
        (f"sources/{INDEX}", gone),
        ("sources", gone),
        (f"sources/{INDEX}", holding("[{")),
        (f"sources/{INDEX}", holding('[{"key": 1}]')),
    ],
    ids=["journal", "no index", "no copies", "index cut short", "index of something else"],
)
def test_an_audit_that_fails_says_so_with_its_exit_status(
    name: str, spoil: Callable[[Path], object], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cause comes before what follows from it."""
    keep(RunDirectory(run_dir).sources, look_at([("reward.functions", Path(__file__))]))
    assert cli.main(["audit", str(run_dir)]) == 0
    assert capsys.readouterr().out.endswith("(1 compared)\nthe audit holds\n")
    spoil(run_dir / name)
    assert cli.main(["audit", str(run_dir)]) == 1
    golden.says(said := capsys.readouterr().out)
    assert said.endswith("the audit FAILS\n")


def test_export_copies_the_model_and_nothing_else(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "model"
    assert cli.main(["export", str(run_dir), str(target)]) == 0
    assert "version 0" in capsys.readouterr().out
    found = {path.name: path.read_bytes() for path in target.iterdir()}
    assert json.loads(found.pop("asyncrl_export.json")) == {"model": "policy", "version": 0}
    assert "asyncrl" in found.pop("README.md").decode()
    assert found == {"model.safetensors": WEIGHTS}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run"]


def test_a_critic_in_parts_is_exported_whole(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "critic"
    assert cli.main(["export", str(run_dir), str(target), "--model", "critic"]) == 0
    assert capsys.readouterr().out == f"version 0 is in {target}: critic.model = {str(target)!r}\n"
    assert torch.equal(load_file(target / "model.safetensors")["score.weight"], torch.cat(HALVES))
    assert exported_version(target) == 0
    with pytest.raises(ConfigError, match=r"with `asyncrl export RUN FOLDER --model critic`$"):
        existing_folder(str(run_dir / "checkpoints" / "0" / "critic" / "model"), "critic.model")


@pytest.mark.parametrize("spoil", [damage, Path.unlink])
def test_the_model_of_a_run_is_found_whatever_its_journal_holds(
    run_dir: Path, tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    spoil(run_dir / "journal")
    assert newest_model(run_dir) == (run_dir / "checkpoints" / "0" / "model", 0), "evaluate takes it"
    assert cli.main(["export", str(run_dir), str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("{run} {tmp}/full", 2),
        ("{run} /proc/model", 2),
        ("{run} {tmp}/model --step 4", 2),
        ("{run} {tmp}/model --model cost_critic", 2),
        ("{run} {tmp}/model --model critic --merge", 2),
        ("{damaged} {tmp}/model", 1),
        ("{damaged} {tmp}/model --step 0", 1),
    ],
)
def test_what_cannot_be_exported_is_refused_and_nothing_is_written(
    arguments: str, code: int, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = shutil.copytree(run_dir, tmp_path / "damaged")
    damage(damaged / "checkpoints" / "0" / "model" / "model.safetensors")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("kept")
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["export", *arguments.format(run=run_dir, damaged=damaged, tmp=tmp_path).split()]) == code
    golden.says(capsys.readouterr().err)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_checkpoint_that_is_passed_over_is_named(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = shutil.copytree(run_dir / "checkpoints" / "0", run_dir / "checkpoints" / "7")
    damage(newer / "model" / "model.safetensors")
    assert cli.main(["export", str(run_dir), str(tmp_path / "model")]) == 0
    said = capsys.readouterr()
    assert "version 0 is in" in said.out
    golden.says(said.err, "checkpoint 7")


def test_the_checkpoint_of_a_step_or_the_best_one_is_exported(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "best.json").write_text('{"version": 0}')
    for step in ("0", "best"):
        assert cli.main(["export", str(run_dir), str(tmp_path / step), "--step", step]) == 0
        assert (tmp_path / step / "model.safetensors").read_bytes() == WEIGHTS

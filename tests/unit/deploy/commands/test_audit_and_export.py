"""asyncrl audit and export, on a run directory with a checkpoint."""

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.config.schema import Config
from asyncrl.config.toml_writer import dump
from asyncrl.controller.journal.checkpoints import commit, newest_model
from asyncrl.controller.journal.journal import Journal
from asyncrl.controller.journal.run_storage import FileStore
from asyncrl.deploy import cli
from asyncrl.engines.models.model_folder import existing_folder, exported_version
from asyncrl.engines.models.tensor_parts import TensorPart, part_file, write_parts
from asyncrl.errors import ConfigError
from asyncrl.protocols.messages import Checkpointed
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.source_copies import INDEX, keep, look_at

WEIGHTS = b"weights of version 0"
HALVES = (torch.arange(2.0), torch.arange(2.0, 4.0))
"""Slices of the weights of a critic that each of two ranks has."""


@pytest.fixture
async def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    config = Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p"}})
    (path / "config.toml").write_text(dump(config))
    keep(RunDirectory(path).sources, [])
    with closing(FileStore(path)) as store:
        journal = Journal(store)

        async def write(directory: str) -> Checkpointed:
            digests = write_models(Path(directory))
            return Checkpointed(0, journal.ledger.chain.hex(), digests)

        await commit(journal, write, keep=1)
    return path


def write_models(checkpoint: Path) -> dict[str, str]:
    """Writes a policy and a critic in parts; returns the sha256 of each file."""
    for folder in ("model", "critic/model", "critic/parts"):
        (checkpoint / folder).mkdir(parents=True)
    (checkpoint / "model" / "model.safetensors").write_bytes(WEIGHTS)
    for rank, values in enumerate(HALVES):
        with (checkpoint / "critic" / "parts" / part_file(rank, "weights")).open("wb") as file:
            write_parts(file, {"score.weight": TensorPart(values, (rank * len(values),))}, len(HALVES))
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    return {str(path.relative_to(checkpoint)): sha256(path.read_bytes()).hexdigest() for path in files}


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[10] ^= 0xFF
    path.write_bytes(content)


def test_the_audit_holds(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", str(run_dir)]) == 0
    assert "the audit holds" in capsys.readouterr().out


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


def test_an_audit_that_fails_says_so_with_its_exit_status(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run_dir / "journal")
    assert cli.main(["audit", str(run_dir)]) == 1
    said = capsys.readouterr().out
    assert said.endswith("the audit FAILS\n")
    assert "first: record 1 of the journal, at byte 0, is damaged" in said, (
        "the cause comes before what follows from it"
    )


@pytest.mark.parametrize("gone", [INDEX, ""])
def test_an_audit_fails_where_the_copies_of_prompts_and_code_are_gone(
    run_dir: Path, gone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunDirectory(run_dir).sources
    keep(folder, look_at([("reward.functions", Path(__file__))]))
    (folder / INDEX).unlink() if gone else shutil.rmtree(folder)
    assert cli.main(["audit", str(run_dir)]) == 1
    said = capsys.readouterr().out
    assert f"FAILS, 1 times; first: {folder / INDEX} is gone, so that nothing tells" in said
    assert said.endswith("the audit FAILS\n")


@pytest.mark.parametrize("spoil", [lambda file: file.write_text("[{"), lambda file: file.write_text('[{"key": 1}]')])
def test_a_damaged_index_of_the_copies_fails_the_audit(
    run_dir: Path, spoil: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunDirectory(run_dir).sources
    keep(folder, look_at([("reward.functions", Path(__file__))]))
    assert cli.main(["audit", str(run_dir)]) == 0
    assert capsys.readouterr().out.endswith("(1 compared)\nthe audit holds\n")
    spoil(folder / INDEX)
    assert cli.main(["audit", str(run_dir)]) == 1
    said = capsys.readouterr().out
    assert f"first: {folder / INDEX} is damaged (" in said
    assert said.endswith("the audit FAILS\n")
    assert "the audit holds" not in said


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
    for arguments, reason in (
        (["--model", "cost_critic"], "checkpoints/0 holds no cost_critic: the algorithm of its run trains none"),
        (["--model", "critic", "--merge"], "--merge is for adapters of the policy, and a critic has none"),
    ):
        assert cli.main(["export", str(run_dir), str(tmp_path / "other"), *arguments]) == 2
        assert reason in capsys.readouterr().err
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


def test_export_overwrites_nothing(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("kept")
    assert cli.main(["export", str(run_dir), str(tmp_path / "model")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["mine"]


def test_export_of_a_damaged_checkpoint_is_refused(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run_dir / "checkpoints" / "0" / "model" / "model.safetensors")
    assert cli.main(["export", str(run_dir), str(tmp_path / "model")]) == 1
    assert "changed or damaged" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_a_damaged_checkpoint_that_is_passed_over_is_named(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = shutil.copytree(run_dir / "checkpoints" / "0", run_dir / "checkpoints" / "7")
    damage(newer / "model" / "model.safetensors")
    assert cli.main(["export", str(run_dir), str(tmp_path / "model")]) == 0
    said = capsys.readouterr()
    assert "version 0 is in" in said.out
    assert said.err.startswith("asyncrl: checkpoint 7: ")
    assert said.err.endswith("; an older one is used\n")


def test_export_to_where_nothing_can_be_made(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", str(run_dir), "/proc/model"]) == 2
    assert "/proc/model cannot be written: " in capsys.readouterr().err


def test_the_checkpoint_of_a_step_is_exported(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", str(run_dir), str(tmp_path / "model"), "--step", "0"]) == 0
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == WEIGHTS
    assert cli.main(["export", str(run_dir), str(tmp_path / "other"), "--step", "4"]) == 2
    assert "has no checkpoint of step 4; there are 0 (training.checkpoint_every" in capsys.readouterr().err
    (run_dir / "best.json").write_text('{"version": 0}')
    assert cli.main(["export", str(run_dir), str(tmp_path / "best"), "--step", "best"]) == 0
    damage(run_dir / "checkpoints" / "0" / "model" / "model.safetensors")
    assert cli.main(["export", str(run_dir), str(tmp_path / "damaged"), "--step", "0"]) == 1
    assert "checkpoint 0: model/model.safetensors was changed or damaged" in capsys.readouterr().err

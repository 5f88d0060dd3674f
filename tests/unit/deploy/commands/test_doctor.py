"""asyncrl doctor: what an experiment needs."""

import gzip
import json
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from asyncrl.config import install_hints
from asyncrl.config.install_hints import program
from asyncrl.config.problems import Problem
from asyncrl.deploy import cli, preflight
from asyncrl.deploy.checks import machine
from asyncrl.deploy.checks.machine import Check
from asyncrl.deploy.commands import doctor
from tests.unit.letter_model import write_letter_model

GOOD = """\
[model]
name = "pypi:smollm2"
[task]
prompts = "p.jsonl"
[reward]
functions = ["exact_match"]
"""


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(doctor, "machine_checks", lambda: [Check("python", "ok", "3.11")])
    monkeypatch.setattr(doctor, "fork_check", lambda: Check("forked workers", "ok", ""))
    monkeypatch.setattr(doctor, "available_memory", lambda: 64 * 2**30)
    monkeypatch.setattr(
        install_hints, "find_spec", lambda module: ModuleSpec(module, None)
    )  # whatever is installed here
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    return path


def test_prompts_are_read_and_their_columns_named(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = experiment.parent / "daten"
    folder.mkdir()
    (folder / "teil1.jsonl.gz").write_bytes(gzip.compress(b'{"frage": "a", "antwrt": "b"}\n' * 3))
    pyarrow.parquet.write_table(pyarrow.table({"frage": ["c"], "antwrt": ["d"]}), folder / "teil2.parquet")
    flags = ["--task.prompts", str(folder), "--task.columns", '{ prompt = "frage" }']
    assert cli.main(["doctor", str(experiment), *flags]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert f"{folder}: 4 rows, columns frage, antwrt, prompt" in text
    assert "teil1.jsonl.gz 3, teil2.parquet 1" in text
    assert "exact_match needs the column answer: the row has no column answer; found are frage, antwrt, prompt" in text
    assert 'write task.columns = { answer = "COLUMN OF YOURS" }' in text
    columns = '{ prompt = "frage", answer = "antwrt" }'
    assert cli.main(["doctor", str(experiment), *flags[:3], columns, "--model.name", "warmed:reverse"]) == 0
    assert "at most 1, by" in capsys.readouterr().out


def test_messages_for_a_model_without_a_template_are_refused(
    experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_letter_model(experiment.parent / "model")
    (experiment.parent / "p.jsonl").write_text('{"prompt": [{"role": "user", "content": "a"}], "answer": "b"}\n')
    assert cli.main(["doctor", str(experiment), "--model.name", str(experiment.parent / "model")]) == 1
    assert "chat template" in capsys.readouterr().out


def test_packages_and_extras_have_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"": ["torch", "numpy"], "otel": ["opentelemetry"], "wandb": ["wandb"], "acting": ["gymnasium", "pygame"]}
    monkeypatch.setattr(machine, "requirements", lambda: dict(wanted))
    there = {"asyncrl": "0.1", "torch": "2.13", "opentelemetry": "1", "gymnasium": "1.2"}
    monkeypatch.setattr(machine, "installed", there.get)
    monkeypatch.setattr(machine, "install_extra", "pip install -e '.[{}]'".format)
    assert [str(each) for each in machine.package_checks() if each.status == "ok"] == [
        "ok    packages            torch 2.13",
        "ok    extras              otel; not installed wandb, acting\n"
        f"{'':26}-> an experiment that needs one says so; by hand: pip install -e '.[NAME]'",
    ]
    assert [each.name for each in machine.package_checks() if each.status == "bad"] == ["numpy"]


def test_prompts_that_code_makes_are_not_read_and_that_is_said(
    experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (experiment.parent / "mine.py").write_text("def rows():\n    raise AssertionError('this is not run')\n")
    assert cli.main(["doctor", str(experiment), "--task.prompts", f"{experiment.parent}/mine.py:rows"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "mine.py:rows is not read yet" in text
    assert "unknown before the prompts are read: each is taken for 512" in text


def test_a_good_experiment_gets_its_bytes_by_service(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(experiment)]) == 0
    text = capsys.readouterr().out
    for expected in (
        "134.5M parameters",
        "generation",
        "training",
        "reward",
        "services on the CPU",
        "shared memory",
        "ready",
    ):
        assert expected in text


def test_ranks_that_sample_themselves_have_no_transport(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(experiment), "--generation.colocate", "training", "--staleness.limit", "0"]) == 0
    said = capsys.readouterr().out
    assert "the trainer's ranks sample, and nothing is published" in said
    assert "transport" not in said


def test_an_experiment_too_large_for_the_machine(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(experiment), "--generation.slots", "1000000"]) == 1
    text = capsys.readouterr().out
    assert "BAD   services on the CPU" in text
    assert "lower training.micro_batch_tokens or generation.slots" in text
    assert "to repair" in text


def test_shared_memory_that_is_too_small_is_said_once(
    experiment: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "free_shared_memory", lambda: 2**20)
    assert cli.main(["doctor", str(experiment)]) == 1
    said = capsys.readouterr().out
    assert said.count("BAD") == 1
    assert "of shared memory (/dev/shm) are free, and two versions of the weights take 1.0 GB" in said
    assert said.endswith("1 to repair\n")


def test_a_model_that_is_not_whole(experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"hidden')
    assert cli.main(["doctor", str(experiment), "--model.name", str(tmp_path)]) == 1
    assert f"BAD   config              --model.name: {tmp_path / 'config.json'} is cut short" in capsys.readouterr().out


def test_a_device_that_is_not_there(
    experiment: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Mapping[str, str]] = []

    def mistakes(devices: Mapping[str, str]) -> list[Problem]:
        asked.append(devices)
        return [Problem("training.device", "", "there is none")]

    monkeypatch.setattr(preflight, "device_mistakes", mistakes)
    assert cli.main(["doctor", str(experiment), "--training.device", "cuda", "--algorithm.kl", "0.1"]) == 1
    assert asked == [{"generation.device": "cpu", "training.device": "cuda", "reference.device": "cpu"}]
    said = capsys.readouterr().out
    assert "BAD   config              --training.device: there is none" in said
    assert "ok    devices" not in said


def test_devices_and_functions_of_costs_are_looked_at(
    experiment: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def mistakes(devices: Mapping[str, str]) -> list[Problem]:
        asked.extend(devices)
        return []

    monkeypatch.setattr(preflight, "device_mistakes", mistakes)
    flags = [
        "--algorithm.preset",
        "safe_rlhf",
        "--cost.functions",
        "lenght",
        "--cost.limit",
        "1",
        "--reward.model",
        "m",
    ]
    assert cli.main(["doctor", str(experiment), *flags]) == 1
    assert asked == ["generation.device", "reward.device", "training.device", "critic.device", "cost_critic.device"]
    said = capsys.readouterr().out
    assert "cost.functions: there is no template lenght; did you mean length?" in said
    assert "cost_critic" in said


def test_mistakes_in_the_experiment_are_shown(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(experiment), "--stpes", "3"]) == 1
    assert "did you mean steps?" in capsys.readouterr().out


def test_a_layout_that_the_model_does_not_allow(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(experiment), "--training.layout.tp", "9"]) == 1
    text = capsys.readouterr().out
    assert "--training.layout.tp: pypi:smollm2: tp = 9 does not divide num_key_value_heads = 3" in text
    assert "write 1 or 3" in text


def test_rewards_that_are_not_there(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(experiment), "--reward.functions", "exact_mach"]) == 1
    assert "did you mean exact_match?" in capsys.readouterr().out


def test_an_algorithm_that_is_not_there(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(experiment), "--algorithm.custom", "nofile.py:ALGORITHM"]) == 1
    assert "nofile.py" in capsys.readouterr().out


def test_what_was_asked_about_is_what_to_run(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(experiment), "--steps", "3"]) == 0
    assert capsys.readouterr().out.endswith(f"ready: {program()} run {experiment} --steps 3\n")


def test_a_model_that_must_be_downloaded_is_not_guessed(
    experiment: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert cli.main(["doctor", str(experiment), "--model.name", "someone/theirs"]) == 0
    assert "note  model" in capsys.readouterr().out
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert cli.main(["doctor", str(experiment), "--model.name", "someone/theirs"]) == 1
    assert "hf download someone/theirs" in capsys.readouterr().out


def test_packages_that_are_missing_are_bad(
    experiment: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    away = ("gguf", "accelerate", "reasoning_gym")
    monkeypatch.setattr(install_hints, "find_spec", lambda module: None if module in away else ModuleSpec(module, None))
    assert cli.main(["doctor", str(experiment), "--task.prompts", "reasoning_gym:products"]) == 1
    text = capsys.readouterr().out
    assert "BAD   config              task.prompts = reasoning_gym:products: reasoning_gym is not installed" in text
    assert "gguf and accelerate are not installed" in text
    assert "2 to repair" in text


@pytest.mark.parametrize("bound", [128, 5000])
@pytest.mark.parametrize("length", [300, 250])
def test_a_prompt_without_room_before_its_answer_is_bad(
    experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], bound: int, length: int
) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "a" * length, "answer": "a"}) + "\n")
    flags = ["--task.prompts", str(tmp_path / "long.jsonl"), "--task.max_prompt_tokens", str(bound)]
    made = ["--model.name", "warmed:reverse", "--generation.max_new_tokens", "32"]
    assert cli.main(["doctor", str(experiment), *flags, *made]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert f"long.jsonl, line 1: the prompt has {length} tokens, and with generation.max_new_tokens = 32" in printed
    assert "beyond the 256 positions" in printed

"""asyncrl doctor: what an experiment needs."""

import gzip
import json
import shlex
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
from tests import golden
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
    """The current folder with an experiment, on a machine of four cores where all packages are installed."""
    monkeypatch.setattr(doctor, "machine_checks", lambda: [Check("python", "ok", "3.11")])
    monkeypatch.setattr(doctor, "fork_check", lambda: Check("forked workers", "ok", ""))
    for module in (doctor, preflight):
        monkeypatch.setattr(module, "available_memory", lambda: 64 * 2**30)
    monkeypatch.setattr(doctor, "usable_cores", lambda: 4.0)
    monkeypatch.setattr(preflight, "free_shared_memory", lambda: 2**36)
    monkeypatch.setattr(install_hints, "find_spec", lambda module: ModuleSpec(module, None))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(GOOD)
    Path("p.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    Path("long.jsonl").write_text(json.dumps({"prompt": "a" * 250, "answer": "a"}) + "\n")
    Path("mine.py").write_text("def rows():\n    raise AssertionError('this is not run')\n")
    folder = Path("daten")
    folder.mkdir()
    (folder / "teil1.jsonl.gz").write_bytes(gzip.compress(b'{"frage": "a", "antwrt": "b"}\n' * 3, mtime=0))
    pyarrow.parquet.write_table(pyarrow.table({"frage": ["c"], "antwrt": ["d"]}), folder / "teil2.parquet")
    return tmp_path


def examined(flags: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = cli.main(["doctor", "mine.toml", *shlex.split(flags)])
    return code, capsys.readouterr().out.replace(f"{program()} ", "asyncrl ")


MADE = "--model.name warmed:reverse"
COLUMNS = "--task.prompts daten --task.columns"


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ("--steps 3", 0),
        (f"""{COLUMNS} '{{ prompt = "frage" }}' {MADE}""", 1),
        (f"""{COLUMNS} '{{ prompt = "frage", answer = "antwrt" }}' {MADE}""", 0),
        ("--task.prompts mine.py:rows", 0),
        ("--generation.colocate training --staleness.limit 0", 0),
        ("--model.name someone/theirs", 0),
        (f"--task.prompts long.jsonl --generation.max_new_tokens 32 {MADE}", 1),
        (f"--task.prompts long.jsonl --generation.max_new_tokens 32 --task.max_prompt_tokens 5000 {MADE}", 1),
    ],
    ids=[
        *("all is well", "a column is missing", "all columns", "rows of code", "ranks that sample", "not here yet"),
        *("no room for an answer", "no room in the model"),
    ],
)
def test_each_thing_that_an_experiment_needs_has_a_line(
    flags: str, code: int, experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, shown = examined(flags, capsys)
    golden.says(shown)
    assert (found, "BAD" in shown) == (code, bool(code))


def test_messages_for_a_model_without_a_template_are_refused(
    experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_letter_model(experiment / "model")
    Path("p.jsonl").write_text('{"prompt": [{"role": "user", "content": "a"}], "answer": "b"}\n')
    code, shown = examined("--model.name ./model", capsys)
    assert (code, "chat template" in shown) == (1, True)


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


def test_an_experiment_too_large_for_the_machine(
    experiment: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, shown = examined("--generation.slots 1000000", capsys)
    assert (code, "BAD   services on the CPU" in shown) == (1, True)
    assert "lower training.micro_batch_tokens or generation.slots" in shown
    monkeypatch.setattr(preflight, "free_shared_memory", lambda: 2**20)
    code, shown = examined("", capsys)
    assert (code, shown.count("BAD")) == (1, 1), "what is too small is said once"
    assert "of shared memory (/dev/shm) are free, and two versions of the weights take 1.0 GB" in shown


def test_devices_and_functions_of_all_services_are_looked_at(
    experiment: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Mapping[str, str]] = []

    def mistakes(devices: Mapping[str, str]) -> list[Problem]:
        asked.append(devices)
        return [Problem("training.device", "", "there is none")]

    monkeypatch.setattr(preflight, "device_mistakes", mistakes)
    costs = "--algorithm.preset safe_rlhf --cost.functions lenght --cost.limit 1 --reward.model m"
    code, shown = examined(f"--training.device cuda --algorithm.kl 0.1 {costs}", capsys)
    services = ("generation", "reward", "training", "reference", "critic", "cost_critic")
    assert (code, asked) == (1, [{f"{name}.device": "cuda" if name == "training" else "cpu" for name in services}])
    assert "BAD   config              --training.device: there is none" in shown
    assert "ok    devices" not in shown
    assert "cost.functions: there is no template lenght; did you mean length?" in shown


def test_a_model_that_cannot_be_downloaded_is_bad(
    experiment: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, shown = examined("--model.name someone/theirs", capsys)
    assert (code, "hf download someone/theirs" in shown) == (1, True)

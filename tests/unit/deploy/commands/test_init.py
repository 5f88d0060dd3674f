"""`asyncrl init` writes a file that can be run as it is, explained key by key."""

import io
import re
import sys
import tomllib
from pathlib import Path

import pytest

from asyncrl.config.sources import load
from asyncrl.config.sources.keys import all_keys
from asyncrl.deploy import cli
from asyncrl.deploy.commands.init import OTHER_KEYS, OWN, learning_rate, speaks
from asyncrl.rewards.functions import function_problems
from asyncrl.tasks import load_prompts
from tests import golden


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    return tmp_path


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("".join(f"{line}\n" for line in lines)))


@pytest.mark.parametrize(
    ("arguments", "files"),
    [
        ("", {"mine.toml"}),
        ("gsm8k", {"gsm8k.toml"}),
        ("a --task compared --device cuda:0 --adapters yes", {"a.toml", "prompts.jsonl"}),
        ("a --task own --question frage", {"a.toml", "a_rewards.py", "prompts.jsonl"}),
    ],
)
def test_what_is_written_without_a_terminal(
    arguments: str, files: set[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every key in the file is explained and right, also those that stand there as comments."""
    assert cli.main(["init", *arguments.split()]) == 0
    golden.says(capsys.readouterr().out)
    assert {path.name for path in here.iterdir()} == files
    (path,) = here.glob("*.toml")
    golden.says(text := path.read_text())
    written = {
        f"{table}.{key}" for table, keys in tomllib.loads(text).items() if isinstance(keys, dict) for key in keys
    }
    assert written <= set(all_keys())
    assert all(f"{name.rpartition('.')[2]} = " in text for name in OTHER_KEYS)
    path.with_name("b.toml").write_text(re.sub(r"^# (?=[a-z_]+ = )", "", text, flags=re.MULTILINE))
    found = load(path).config
    assert load(here / "b.toml").config.model_copy(update={"name": found.name}) == found
    assert not list(function_problems(found, "reward"))


def test_a_terminal_is_asked_until_the_answer_is_one(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What answers are compared with is not asked where a function scores them."""
    typed(monkeypatch, "sing", OWN, "some/model", "", "", "32", "", "yes")
    assert cli.main(["init", "songs"]) == 0
    golden.says(capsys.readouterr().out)
    config = load(here / "songs.toml").config
    assert (config.model.name, config.generation.max_new_tokens) == ("some/model", 32)
    assert config.model.lora is not None


def test_answers_that_end_leave_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, OWN)
    assert cli.main(["init"]) == 2
    assert "nothing was written" in capsys.readouterr().err
    assert not list(here.iterdir())


def test_columns_of_own_rows_are_asked_for(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--model", "m", "--reward", "exact_match", "--tokens", "8"]
    typed(monkeypatch, "daten.jsonl", "frage", "loesung", "", "")
    assert cli.main(["init", "mine", "--task", "compared", *flags]) == 0
    config = load(here / "mine.toml").config
    assert config.task.columns == {"prompt": "frage", "answer": "loesung"}
    prompts = load_prompts(config.task.prompts, columns=config.task.columns)
    assert prompts.row(0).columns["answer"] == prompts.rows[0]["loesung"] == "7"


@pytest.mark.parametrize(
    ("model", "rate", "is_asked"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 1e-5, True),
        ("HuggingFaceTB/SmolLM2-360M", 1e-5, False),
        ("Qwen/Qwen3-0.6B", 1e-6, True),
        ("Qwen/Qwen3-0.6B-Base", 1e-6, False),
        ("google/gemma-3-1b-it", 1e-6, True),
        ("meta-llama/Llama-3.1-8B-Instruct", 1e-6, True),
        ("warmed:reverse", 2e-4, False),
        ("pypi:smollm2", 1e-5, True),
        ("some/model", 1e-6, False),
    ],
)
def test_the_learning_rate_follows_size_and_text_the_kind_of_model(model: str, rate: float, is_asked: bool) -> None:
    assert (learning_rate(model), speaks(model)) == (rate, is_asked)


@pytest.mark.parametrize("name", ["typo.jsonl", "typo.csv", "typo.parquet"])
def test_prompts_that_are_named_and_not_there_are_refused(
    here: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", "--task", "compared", "--prompts", name, "--yes"]) == 2
    assert f"there is no file {name}" in capsys.readouterr().err
    assert not list(here.iterdir())


@pytest.mark.parametrize("flags", [[], ["--answer", "Label"]])
def test_rows_without_the_answer_are_refused_with_their_columns(
    here: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "own.jsonl").write_text('{"question": "1 + 1?", "label": "2"}\n')
    asked = ["init", "--task", "compared", "--prompts", "own.jsonl", "--question", "question", "--yes"]
    assert cli.main([*asked, *flags]) == 2
    golden.says(capsys.readouterr().err, "label, question")
    assert not (here / "mine.toml").exists()
    assert cli.main([*asked, "--answer", "label"]) == 0

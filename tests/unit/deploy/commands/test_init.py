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
from asyncrl.deploy.commands.init import OTHER_KEYS, OWN, QUESTIONS, learning_rate, speaks
from asyncrl.rewards.functions import function_problems
from asyncrl.tasks import load_prompts


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


def test_without_a_terminal_it_takes_the_defaults(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init"]) == 0
    config = load(here / "mine.toml").config
    quickstart = load("quickstart").config
    assert (config.model.name, config.task.prompts) == (quickstart.model.name, quickstart.task.prompts)
    printed = capsys.readouterr().out
    assert "wrote mine.toml\n" in printed
    assert "run mine.toml`" in printed


@pytest.mark.parametrize("task", ["example", "compared", "own"])
@pytest.mark.parametrize("others", [[], ["--device", "cuda:0", "--adapters", "yes"]], ids=["cpu", "cuda"])
def test_every_key_in_the_file_is_explained_and_right(here: Path, task: str, others: list[str]) -> None:
    assert cli.main(["init", "a", "--task", task, *(others if task != "example" else [])]) == 0
    text = (here / "a.toml").read_text()
    written = {
        name
        for table, keys in tomllib.loads(text).items()
        if isinstance(keys, dict)
        for name in (f"{table}.{key}" for key in keys)
    }
    assert written <= set(all_keys())
    assert all(
        all_keys()[name].doc.split(".")[0][:60] in " ".join(text.replace("\n# ", " ").split()) for name in written
    )
    for name in OTHER_KEYS:
        assert f"{name.rpartition('.')[2]} = " in text
    (here / "b.toml").write_text(re.sub(r"^# (?=[a-z_]+ = )", "", text, flags=re.MULTILINE))
    assert load(here / "b.toml").config.model_copy(update={"name": "a"}) == load(here / "a.toml").config
    assert not list(function_problems(load(here / "a.toml").config, "reward"))


def test_a_terminal_is_asked_until_the_answer_is_one(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "sing", OWN, "some/model", "", "", "32", "", "yes")
    assert cli.main(["init", "songs"]) == 0
    printed = capsys.readouterr().out
    assert "write one of example, compared, own" in printed
    config = load(here / "songs.toml").config
    assert (config.model.name, config.generation.max_new_tokens) == ("some/model", 32)
    assert config.model.lora is not None
    assert [path.name for path in sorted(here.iterdir())] == ["prompts.jsonl", "songs.toml", "songs_rewards.py"]
    asked = [question.text for question in QUESTIONS if question.text in printed]
    assert len(asked) == len(QUESTIONS) - 2, "what answers are compared with is not asked where a function scores them"


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["--task", "example", "--device", "cpu"], "--device means nothing with --task example"),
        (["--task", "own", "--reward", "numeric"], "--reward means nothing with --task own"),
        (["--task", "own", "--tokens", "many"], "--tokens must be a whole number"),
    ],
)
def test_a_flag_that_does_not_fit_is_refused(
    here: Path, arguments: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", *arguments]) == 2
    assert answer in capsys.readouterr().err
    assert not list(here.iterdir())


def test_nothing_is_overwritten(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine.toml").write_text("seed = 1\n")
    assert cli.main(["init"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (here / "mine.toml").read_text() == "seed = 1\n"


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
    assert cli.main(["init", "own", "--task", "own", "--question", "frage", "--yes"]) == 0
    assert load(here / "own.toml").config.task.columns == {"prompt": "frage"}
    assert '"frage": ' in (here / "prompts.jsonl").read_text()


def test_the_name_of_the_first_guide_writes_its_task(here: Path) -> None:
    assert cli.main(["init", "gsm8k", "--yes"]) == 0
    config = load(here / "gsm8k.toml").config
    assert (config.task.prompts, config.evaluate.prompts) == (
        "hub:openai/gsm8k:main#train",
        "hub:openai/gsm8k:main#test",
    )
    assert (config.task.text_prompts, config.steps, config.model.name) == ("chat", 200, "Qwen/Qwen3-0.6B")


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


@pytest.mark.parametrize("name", ["typo.jsonl", "rows/typo.jsonl", "typo.csv", "typo.parquet", "typo.json"])
@pytest.mark.parametrize("task", ["own", "compared"])
def test_prompts_that_are_named_and_not_there_are_refused(
    here: Path, name: str, task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", "--task", task, "--prompts", name, "--yes"]) == 2
    assert f"there is no file {name}" in capsys.readouterr().err
    assert not list(here.iterdir())


@pytest.mark.parametrize("flags", [[], ["--answer", "solution"], ["--answer", "Label"]])
def test_rows_without_the_answer_are_refused_with_their_columns(
    here: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "own.jsonl").write_text('{"question": "1 + 1?", "label": "2"}\n')
    asked = ["init", "--task", "compared", "--prompts", "own.jsonl", "--question", "question", "--yes"]
    assert cli.main([*asked, *flags]) == 2
    assert "own.jsonl has no column" in (said := capsys.readouterr().err)
    assert "there are label, question" in said
    assert not (here / "mine.toml").exists()
    assert cli.main([*asked, "--answer", "label"]) == 0


def test_without_a_terminal_too_the_name_of_a_known_task_is_that_task(here: Path) -> None:
    assert cli.main(["init", "gsm8k"]) == 0
    config = load(here / "gsm8k.toml").config
    assert (config.generation.max_new_tokens, config.task.prompts) == (400, "hub:openai/gsm8k:main#train")

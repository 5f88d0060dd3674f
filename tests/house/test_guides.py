"""The guides: files load, commands and keys exist, none is long; tests/system/test_guides.py runs their programs."""

import re
import tomllib
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.bench.cli import BENCHMARKS
from asyncrl.config.sources import load
from asyncrl.config.sources.keys import all_keys, sections
from asyncrl.deploy import cli

GUIDES = {path.name: path.read_text() for path in sorted((Path(__file__).parents[2] / "docs/guides").glob("*.md"))}
FILES = {
    "questions.jsonl": '{"prompt": "1+1?", "answer": "2"}\n',
    "train.parquet": "",
    "my_rewards.py": "def right(prompts, completions, **columns):\n    return [0.0 for _ in completions]\n",
    "score.py": "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n",
}
"""Files that the experiments of the guides name."""
COMMAND = re.compile(r"(?<![\w/.-])(asyncrl(?:-bench)?) ([a-z-]+)([^`\n#]*)")


def blocks(language: str) -> list[tuple[str, str]]:
    found = [(name, re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)) for name, text in GUIDES.items()]
    return [(name, block) for name, each in found for block in each]


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_is_short(name: str) -> None:
    assert len(GUIDES[name].split()) <= 1500


@pytest.mark.parametrize(("name", "block"), blocks("toml"))
def test_files_of_guides_load(name: str, block: str, tmp_path: Path) -> None:
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    values = tomllib.loads(block)
    if "task" in values:
        (tmp_path / "experiment.toml").write_text(block)
        assert load(tmp_path / "experiment.toml", environ={}).config.name in block
    else:
        load("quickstart", environ={}, values=values)


def commands() -> list[tuple[str, str, str]]:
    code = [block for _, block in blocks("sh")] + re.findall(r"`([^`\n]+)`", "\n".join(GUIDES.values()))
    return sorted({found for text in code for found in COMMAND.findall(text)})


@pytest.mark.parametrize(("program", "command", "flags"), commands())
def test_commands_of_guides_exist(program: str, command: str, flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    if program == "asyncrl-bench":
        assert command in BENCHMARKS
        return
    assert command in cli.commands()
    with suppress(SystemExit):
        cli.main([command, "--help"])
    shown = capsys.readouterr().out
    for flag in re.findall(r"--[a-z-]+(?![\w.])", flags):
        assert flag in shown, f"{command} has no {flag}"


@pytest.mark.parametrize("name", GUIDES)
def test_keys_of_guides_exist(name: str) -> None:
    named = set(re.findall(r"`([a-z_]+\.[a-z_]+)(?: = [^`]*)?`", GUIDES[name]))
    keys = {key for key in named if key.partition(".")[0] in sections()}
    foreign = {"actor.lr", "reward_model.ground_truth"} | {key for key in keys if key.startswith("algorithm.adv_")}
    foreign |= {"algorithm.rollout_correction", "algorithm.use_kl_in_reward"}
    assert keys - foreign <= set(all_keys())


@pytest.mark.parametrize(
    ("text", "reward"), [("It is 1,042.", 1.0), ("1042 apples, so 1042", 1.0), ("1042, or 7", 0.0), ("many", 0.0)]
)
def test_the_reward_of_the_first_task_compares_last_numbers(text: str, reward: float) -> None:
    (program,) = [block for name, block in blocks("python") if name == "first-task.md"]
    names: dict[str, Any] = {}
    exec(program, names)
    assert names["right"](SimpleNamespace(text=text, row={"answer": "500 + 542 = 1042\n#### 1,042"})) == reward

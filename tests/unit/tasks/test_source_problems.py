"""Rows without tests are found before a run starts, where programs are tested."""

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.sources import load
from asyncrl.tasks.source_problems import prompt_problems

GOOD = {"prompt": "p", "tests": ["assert f(1) == 1"]}
PASSES = '[reward]\nfunctions = [{ use = "passes_tests" }]\n'
REPAIR = '[environment]\nuse = "repair"\noptions = { column = "checks" }\n'


def problems(folder: Path, rows: list[dict[str, Any]], more: str) -> list[str]:
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "e.toml").write_text(f'[model]\nname = "warmed:repair"\n[task]\nprompts = "{folder}/p.jsonl"\n{more}')
    return [str(problem) for problem in prompt_problems(load(str(folder / "e.toml")).config)]


@pytest.mark.parametrize(
    ("rows", "more", "said"),
    [
        ([GOOD, {"prompt": "q"}], PASSES, "line 2: the row has no column tests with tests; found are prompt"),
        ([{**GOOD, "tests": []}], PASSES, "line 1: the row's tests are no list of tests, but []"),
        ([GOOD], REPAIR, "line 1: the row has no column checks with tests; found are prompt, tests"),
    ],
)
def test_a_row_without_tests_is_named(tmp_path: Path, rows: list[dict[str, Any]], more: str, said: str) -> None:
    (problem,) = problems(tmp_path, rows, more)
    assert "task.prompts: " in problem
    assert said in problem


def test_only_programs_need_tests(tmp_path: Path) -> None:
    assert problems(tmp_path, [GOOD], PASSES) == []
    assert problems(tmp_path, [{"prompt": "q", "answer": "a"}], '[reward]\nfunctions = ["exact_match"]\n') == []

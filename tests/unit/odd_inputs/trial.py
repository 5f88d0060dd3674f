"""Takes a run up to where its fleet would start, and through the check of prompts that the first worker makes."""

import asyncio
import os
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.config.problems import refuse
from asyncrl.config.sources import load
from asyncrl.deploy.checks.run_prompts import prompt_tokenizer, questions_of, read_prompts, with_steps_of_epochs
from asyncrl.deploy.preflight import model_problems, preflight
from asyncrl.engines.models.model_folder import context_of_folder
from asyncrl.engines.models.model_preparation import prepare
from asyncrl.errors import ConfigError, TaskError
from asyncrl.tasks.chat_messages import TOOLS
from asyncrl.tasks.prompt_lengths import TokenBudget, refuse_what_has_no_room

TOML = """
[model]
name = "model"
[task]
prompts = "rows.jsonl"
shuffle = false
[generation]
max_new_tokens = 8
[reward]
functions = ["repetition"]
"""
Content = bytes | str | None
"""Content of a file; None makes a folder."""


@dataclass(frozen=True)
class Trains:
    """The run trains. prompts: of the first groups, as the model gets them. columns: of the first row beside its
    prompt, if they matter. says: parts of the lines for the user."""

    prompts: Sequence[str]
    columns: dict[str, Any] | None = None
    says: Sequence[str] = ()


@dataclass(frozen=True)
class Refused:
    """The run is refused. says: parts of the text, such as file, row and remedy. lines: of the text, at most.
    by_worker: only the first worker can tell."""

    says: Sequence[str]
    lines: int = 1
    by_worker: bool = False


@dataclass
class Answer:
    """Holds the text that refuses a run, or the prompts and columns of its first groups."""

    refusal: str = ""
    by_worker: bool = False
    prompts: list[str] = field(default_factory=list)
    columns: list[dict[str, Any]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


def write(folder: Path, files: dict[str, Content]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


def answer(folder: Path, flags: Sequence[str], groups: int) -> Answer:
    """Runs in `folder`, which holds `model` and files of rows; any other error than a refusal is a failure of ours."""
    found = Answer()
    (folder / "odd.toml").write_text(TOML)
    with chdir(folder):
        try:
            _prepare(found, flags, groups)
        except (ConfigError, TaskError) as error:
            found.refusal = str(error).replace(f"{folder}{os.sep}", "")
    return found


def _prepare(found: Answer, flags: Sequence[str], groups: int) -> None:
    loaded = load("odd.toml", list(flags))
    config = with_steps_of_epochs(loaded.config)
    problems = list(preflight(config, places=loaded.sources))
    refuse(problems)
    sets = read_prompts(config)
    model = asyncio.run(prepare(config, Path("made"), found.said.append))
    refuse(model_problems(config, model))
    questions = questions_of(config, sets, model, Path("longest"), loaded.sources, found.said.append)
    tokenizer = prompt_tokenizer(config, model)
    context = context_of_folder(model)
    found.by_worker = True
    budget = TokenBudget(config.task.max_prompt_tokens, config.response_tokens, context)
    refuse_what_has_no_room(Path("longest"), tokenizer.prompt_ids, budget)
    for group in range(groups):
        row = questions.training(group)
        assert row.columns.packed.data.size, "a row that cannot be sent is refused before"
        ids = tokenizer.prompt_ids(row.prompt, row.columns.get(TOOLS) or ())
        found.prompts.append(tokenizer.decode(ids, skip_special_tokens=False))
        found.columns.append({name: value for name, value in row.columns.items() if name != "prompt"})


def check(folder: Path, flags: Sequence[str], expected: Trains | Refused) -> None:
    """Asserts that a run in `folder` is answered as expected."""
    if isinstance(expected, Trains):
        found = answer(folder, flags, len(expected.prompts))
        assert found.refusal == ""
        assert found.prompts == list(expected.prompts)
        assert expected.columns in (None, found.columns[0])
        assert [each for each in expected.says if each not in "\n".join(found.said)] == [], found.said
        return
    found = answer(folder, flags, 0)
    assert [each for each in expected.says if each not in found.refusal] == [], found.refusal or "it trains"
    assert len(found.refusal.splitlines()) <= expected.lines, found.refusal
    assert found.by_worker == expected.by_worker

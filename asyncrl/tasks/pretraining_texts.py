"""Reads the texts that the policy learns besides its samples; the trainer tokenizes them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.schema import TaskConfig
from asyncrl.errors import TaskError
from asyncrl.tasks.prompt_rows import Prompts
from asyncrl.tasks.prompt_sources import TRAINING_SEED, read_rows

KEY = "task.pretrain"


def write_texts(path: Path, task: TaskConfig) -> None:
    """Writes the rows of `task.pretrain` to `path`, one JSON object a line: {text}, or {prompt, answer}; raises
    TaskError if there is no such source, or no row, or a row has other columns."""
    source = task.pretrain
    rows = read_rows(source, {"size": task.size, "seed": TRAINING_SEED}, KEY)
    if len(rows) == 0:
        raise TaskError(f"{KEY}: {source}: there are no rows")
    with path.open("w", encoding="utf-8") as lines:
        for number in range(len(rows)):
            lines.write(json.dumps(_text(rows[number], f"{KEY}: {source}, row {number}", task.system)) + "\n")


def _text(row: Mapping[str, Any], where: str, system: str) -> dict[str, Any]:
    match dict(row):
        case {"text": str(text)} if text:
            return {"text": text}
        case {"prompt": _, "answer": str(answer)} if answer:
            return {"prompt": Prompts([row], where, system).row(0).prompt, "answer": answer}
        case {"text": ""}:
            raise TaskError(f"{where}: its `text` is empty, so there is nothing to learn; remove the row")
        case {"prompt": _, "answer": ""}:
            raise TaskError(f"{where}: its `answer` is empty, so there is nothing to learn; remove the row")
    raise TaskError(f"{where}: a row has a `text`, or a `prompt` and an `answer`; found are {', '.join(map(str, row))}")

"""Keeps the results of evaluations: a file of JSON lines for each, the newest ones of each set."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

SaveResults: TypeAlias = Callable[[str, int, Sequence[Any]], None]
"""Takes what is kept of an evaluation: the name of its set, the version, and dataclasses of answers or episodes."""


@dataclass(frozen=True, slots=True)
class HeldOutAnswer:
    """One answer. set: name of its set, "" for that of `[evaluate]`. question: number of the prompt. turns: of an
    episode. terms: each function's own value. row: the other columns of the prompt's row."""

    version: int
    set: str
    question: int
    member: int
    prompt: str
    text: str
    turns: list[dict[str, Any]]
    finish: str
    tokens: int
    reward: float | None
    cost: float | None
    terms: Mapping[str, float]
    row: Mapping[str, Any]


def write_answers(path: Path, answers: Sequence[Any]) -> None:
    """Writes one object a line; the file appears at once. Raises OSError."""
    unfinished = path.with_name(f"{path.name}.part")
    with unfinished.open("w", encoding="utf-8") as file:
        for answer in answers:
            file.write(json.dumps(asdict(answer), ensure_ascii=False, default=str) + "\n")
    os.replace(unfinished, path)


@dataclass(frozen=True, slots=True)
class AnswersFolder:
    """The folder `evaluations` of a run: VERSION.jsonl, NAME/VERSION.jsonl of other sets, and VERSION.gif of a policy
    that acts. keep: files of each set that stay."""

    path: Path
    keep: int

    def save(self, name: str, version: int, answers: Sequence[Any]) -> None:
        """Writes the answers of one evaluation, and removes old ones. Raises OSError."""
        folder = self.path / name
        folder.mkdir(parents=True, exist_ok=True)
        write_answers(folder / f"{version}.jsonl", answers)
        versions = sorted(int(each.stem) for each in folder.glob("*.jsonl") if each.stem.isdecimal())
        for old in versions[: -self.keep]:
            (folder / f"{old}.jsonl").unlink()
            (folder / f"{old}.gif").unlink(missing_ok=True)

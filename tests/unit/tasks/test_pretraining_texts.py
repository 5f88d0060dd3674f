"""Rows of `task.pretrain`, as the controller writes them down for the trainer."""

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import TaskConfig
from asyncrl.errors import TaskError
from asyncrl.tasks.prompt_sources import write_texts
from tests import golden


def written(tmp_path: Path, *rows: dict[str, Any], **task: Any) -> list[dict[str, Any]]:
    source = tmp_path / "texts.jsonl"
    target = tmp_path / "pretrain.jsonl"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    write_texts(target, TaskConfig(prompts="none", pretrain=str(source), **task))
    return [json.loads(line) for line in target.read_text().splitlines()]


def test_texts_and_answers_with_their_prompts(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"text": "a b", "source": 3}, {"prompt": "a?", "answer": "b", "more": None}]
    assert written(tmp_path, *rows) == [{"text": "a b"}, {"prompt": "a?", "answer": "b"}]
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "a?"}]
    assert written(tmp_path, *rows, system="s")[1] == {"prompt": asked, "answer": "b"}


@pytest.mark.parametrize(
    "row",
    [
        *({"text": 3}, {"prompt": "a"}, {"prompt": "a", "answer": 3}, {"body": "a"}),
        *({"text": ""}, {"prompt": "a", "answer": ""}, {"prompt": "a", "completion": ""}),
    ],
)
def test_a_row_with_other_columns_is_named(tmp_path: Path, row: dict[str, Any]) -> None:
    with golden.raises(TaskError, match=r"task\.pretrain.*texts\.jsonl, line 2"):
        written(tmp_path, {"text": "fine"}, row)


def test_mistakes_name_the_key(tmp_path: Path) -> None:
    with golden.raises(TaskError, match=r"task\.pretrain"):
        write_texts(tmp_path / "out", TaskConfig(prompts="none", pretrain=str(tmp_path / "nowhere.jsonl")))
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "fine"}\n{"text\n')
    with pytest.raises(TaskError, match=r"^task\.pretrain: .*broken\.jsonl, line 2: not JSON"):
        write_texts(tmp_path / "out", TaskConfig(prompts="none", pretrain=str(broken)))
    with golden.raises(TaskError):
        written(tmp_path)
    with golden.raises(TaskError, match="line 1"):
        written(tmp_path, {"prompt": "", "answer": "b"})


def test_a_generator_without_an_end_is_read_up_to_the_size(tmp_path: Path) -> None:
    source = tmp_path / "endless.py"
    source.write_text("def texts():\n    while True:\n        yield {'text': 'again'}\n")
    target = tmp_path / "out"
    write_texts(target, TaskConfig(prompts="none", pretrain=f"{source}:texts", size=12))
    assert len(target.read_text().splitlines()) == 12


def test_messages_that_are_texts_are_no_texts_to_learn(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "a?"}]
    said = [{"role": "assistant", "content": "b"}]
    rows: list[dict[str, Any]] = [
        {"prompt": json.dumps(asked), "completion": json.dumps(said, indent=1)},
        {"prompt": repr(asked), "completion": repr(said)},
        {"messages": json.dumps([*asked, *said])},
        {"messages": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]},
    ]
    assert written(tmp_path, *rows) == [{"prompt": asked, "answer": "b"}] * 4

"""The examples of docs/prompts.md read prompts as the page says."""

import json
from collections import Counter
from pathlib import Path

from asyncrl.tasks import Draw, training_prompts
from tests.unit.documents import DOCS, config_of

PAGE = "prompts.md"


def write(path: Path, *rows: dict[str, object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_columns(tmp_path: Path) -> None:
    write(tmp_path / "questions.jsonl", {"question": "How many?", "reward_model": {"ground_truth": "72"}})
    row = training_prompts(config_of(PAGE, "ground_truth", tmp_path)).row(0)
    assert (row.prompt, row.columns["answer"]) == ("How many?", "72")


def test_several_sources(tmp_path: Path) -> None:
    write(tmp_path / "easy.jsonl", {"prompt": "e"})
    write(tmp_path / "hard.jsonl", *({"problem": f"h{number}"} for number in range(9)))
    draw = Draw(training_prompts(config_of(PAGE, "hard.jsonl", tmp_path)), seed=0)
    drawn = [str(draw(group).prompt)[0] for group in range(8)]
    assert [Counter(drawn[:4]), Counter(drawn[4:])] == [{"e": 3, "h": 1}] * 2


def test_chat(tmp_path: Path) -> None:
    write(tmp_path / "questions.jsonl", {"question": "How many?"})
    config = config_of(PAGE, "text_prompts", tmp_path)
    assert training_prompts(config).row(0).prompt == [{"role": "user", "content": "How many?"}]
    assert config.task.chat_template_kwargs == {"enable_thinking": False}


def test_the_page_is_short() -> None:
    assert len((DOCS / PAGE).read_text().split()) < 1500

"""The examples of docs/prompts.md read prompts as the page says."""

import json
from collections import Counter
from pathlib import Path

from asyncrl.deploy.checks.run_prompts import shared_prompts
from asyncrl.tasks import Draw, held_out_prompts, load_prompts, training_prompts
from tests import golden
from tests.unit.documents import DOCS, config_of, files_of

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


def test_order_and_rows_to_hold_out(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = [{"question": f"Question {number}?", "level": (7 * number) % 5} for number in range(40)]
    write(tmp_path / "data" / "a.jsonl", *rows[:20])
    write(tmp_path / "data" / "b.jsonl", *rows[20:])
    files_of(PAGE, tmp_path)
    config = config_of(PAGE, "held_out", tmp_path)
    training = training_prompts(config)
    held_out = held_out_prompts(config)
    assert held_out is not None
    assert len(training) + len(held_out) == len(rows)
    assert 4 <= len(held_out) <= 16
    asked = [[str(prompts.row(number).prompt) for number in range(len(prompts))] for prompts in (training, held_out)]
    assert not set(asked[0]) & set(asked[1])
    draw = Draw(training, config.seed, config.task.shuffle)
    levels = [draw(group).columns["level"] for group in range(len(training))]
    assert levels == sorted(levels)
    assert shared_prompts(config, training, {"": held_out}) == []
    leaking = {"": load_prompts([{"prompt": asked[0][3]}, {"prompt": "another"}])}
    (said,) = shared_prompts(config, training, leaking)
    golden.says(said, "evaluate.prompts: 1", "2 prompts")


def test_chat(tmp_path: Path) -> None:
    write(tmp_path / "questions.jsonl", {"question": "How many?"})
    config = config_of(PAGE, "text_prompts", tmp_path)
    assert training_prompts(config).row(0).prompt == [{"role": "user", "content": "How many?"}]
    assert config.task.chat_template_kwargs == {"enable_thinking": False}


def test_the_page_is_short() -> None:
    assert len((DOCS / PAGE).read_text().split()) < 1500

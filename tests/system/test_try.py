"""`asyncrl try`: a few rows through prompt, template, model and rewards, and no training."""

import json
import sys
from pathlib import Path

import pytest

from asyncrl.engines.models.warmed_up_model import build_model, build_tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from programs import finished
from watching import PATIENCE

pytestmark = [pytest.mark.fleet, pytest.mark.usefixtures("programs")]

REWARDS = """
def right(sample):
    assert sample.row["answer"] == "b"
    return {"parts": 0.5, "ends": -0.25}

def half_the_group(samples):
    return [len(samples) / 2] * len(samples)
"""
EXPERIMENT = """
[model]
name = "model"
[task]
prompts = "questions.jsonl"
columns = { prompt = "question" }
text_prompts = "chat"
shuffle = false
[generation]
max_new_tokens = 4
slots = 8
top_k = 5
[training]
keep_best = "eval/reward/mean"
[evaluate]
prompts = "questions.jsonl"
[children]
sandbox = "none"
[reward]
functions = [
    { use = "mine.py:right", weight = 2.0 },
    { use = "length", options = { maximum = 9, slack = 1 } },
    { use = "mine.py:half_the_group", group = true },
]
"""
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)


def test_each_row_is_shown_with_its_prompt_answer_and_rewards(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(())
    tokenizer.chat_template = TEMPLATE
    build_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"question": f"is it {letter}?", "answer": "b"} for letter in "abc"]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(REWARDS)
    (tmp_path / "e.toml").write_text(EXPERIMENT)
    before = sorted(path.name for path in tmp_path.iterdir())
    command = [sys.executable, "-m", "asyncrl.deploy.cli", "try", "e.toml", "--rows", "2"]
    done = finished(command, cwd=tmp_path, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    _, first, second = done.stdout.split("\ntask.prompts: ")
    for shown, line, letter in ((first, 1, "a"), (second, 2, "b")):
        heading, prompt, text, column, answer, *_ = shown.splitlines()
        assert column == "column answer: 'b'"
        assert heading == f"{tmp_path}/questions.jsonl, line {line}"
        assert prompt.startswith("prompt, ")
        assert text == f"  <user>is it {letter}?<answer>"
        assert answer.startswith("answer, ")
        rewards, _, group = shown.rstrip().partition("\ngroup of 8 samples: ")
        assert rewards.endswith(
            "reward: 4.5\n  right/parts = 0.5 (weight 2)\n  right/ends = -0.25 (weight 2)\n  length = 0 (weight 1)"
            "\n  half_the_group = 4 (weight 1)"
        )
        assert rewards.count("reward: 4.5") == 8
        assert "different texts, rewards 4.5 to 4.5 (mean 4.5)" in group
        assert group.endswith("  all equal: under a group baseline such rewards teach nothing")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == before

"""Characters that a tokenizer has no token for are named, with the row."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from asyncrl.config.schema import Config
from asyncrl.deploy.checks.run_prompts import PromptSets, lost_characters, questions_of
from asyncrl.engines.models.warmed_up_model import build_tokenizer
from asyncrl.tasks import load_prompts

ROWS = [
    {"prompt": "drei und zwei?", "answer": "fünf"},
    {"prompt": [{"role": "user", "content": "größer\nals 4?"}], "answer": 5},
]
SAID = (
    'task.prompts: the tokenizer of the model has no token for "\\n", "ß", "ö", "ü", and the model reads texts without '
    "them, first in the rows given as prompts, row 1: write"
)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    build_tokenizer(("und ",)).save_pretrained(tmp_path)
    return tmp_path


def test_characters_without_a_token_are_named_with_the_first_row(tiny: Path) -> None:
    (said,) = lost_characters(tiny, {"task.prompts": load_prompts(ROWS)})
    assert said.startswith(SAID)
    build_tokenizer(tuple("\nößü")).save_pretrained(tiny)
    assert list(lost_characters(tiny, {"task.prompts": load_prompts(ROWS)})) == []


def test_many_characters_are_counted(tiny: Path) -> None:
    rows = [{"prompt": "".join(map(chr, range(0x4E00, 0x4E20)))}]
    (said,) = lost_characters(tiny, {"evaluate.prompts": load_prompts(rows)})
    assert '"一", "丁"' in said
    assert "and 12 others" in said


def test_a_tokenizer_of_bytes_loses_nothing(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert list(lost_characters(tmp_path, {"task.prompts": load_prompts(ROWS)})) == []
    assert list(lost_characters(tmp_path / "none", {"task.prompts": load_prompts(ROWS)})) == []


def test_a_run_says_what_is_lost_and_that_a_tiny_model_has_no_roles(tiny: Path) -> None:
    task = {"prompts": "r.jsonl", "system": "Antworte."}
    config = Config.model_validate({"model": {"name": "warmed:reverse"}, "task": task})
    said = list[str]()
    sets = PromptSets(load_prompts(ROWS, system="Antworte."), {})
    questions_of(config, sets, tiny, tiny / "longest", {}, said.append)
    assert said[0].startswith(f"warning: {SAID}")
    assert said[1].startswith("a model of warmed: knows no roles of a chat")


def test_a_system_message_is_set_apart_from_the_prompt(tiny: Path) -> None:
    messages = [{"role": "system", "content": "Antworte."}, {"role": "user", "content": "drei?"}]
    assert build_tokenizer(()).apply_chat_template(messages, tokenize=False) == "Antworte. drei?"

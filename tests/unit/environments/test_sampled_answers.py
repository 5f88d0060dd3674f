"""Environments are told the tokens and log-probs of answers, turn by turn."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from asyncrl.environments.sampled_answers import sampled_answers, token_texts
from asyncrl.environments.transcript import transcript_column

TURNS = [{"role": role, "content": "x"} for role in ("assistant", "user", "assistant", "user", "assistant")]


def test_each_turn_has_its_tokens_and_the_size_of_what_was_before_it() -> None:
    """A context that begins after the second turn has its own size."""
    columns = {
        "prompt_ids": np.arange(5, dtype=np.int32),
        "response_ids": np.arange(10, 21, dtype=np.int32),
        "logprobs": -np.arange(6, dtype=np.float32),
        "spans": np.array([2, 1, 1, -4, 3, 0], np.int32),
        "transcript": transcript_column(TURNS),
    }
    own = [{**each, "finish": end} for each, end in zip(TURNS[::2], ("length", "deadline"), strict=False)]
    cut = transcript_column([own[0], TURNS[1], own[1], *TURNS[3:]])
    first, second, third = sampled_answers(columns, "length", str)
    assert first == {"tokens": ["10", "11"], "logprobs": [0.0, -1.0], "finish": "stop", "context": 5}
    assert second == {"tokens": ["13"], "logprobs": [-2.0], "finish": "stop", "context": 8}
    assert [each["finish"] for each in sampled_answers(columns | {"transcript": cut}, "stop", str)] == [
        "length",
        "length",
        "stop",
    ]
    assert third == {"tokens": ["18", "19", "20"], "logprobs": [-3.0, -4.0, -5.0], "finish": "length", "context": 4}


@pytest.mark.parametrize("saved", [True, False])
def test_tokens_have_texts(saved: bool, tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"two": 0, "words": 1, "[UNK]": 2}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if saved:
        tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert token_texts(tmp_path)(1) == ("words" if saved else "token_id:1")

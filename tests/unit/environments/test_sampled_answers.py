"""Environments are told the tokens and log-probs of answers, turn by turn."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from asyncrl.environments.transcript import (
    SampledAnswer,
    sampled_answers,
    token_pieces,
    token_texts,
    transcript_column,
)

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


def byte_level() -> Tokenizer:
    vocabulary = {token: number for number, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "é!"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "a": 257, "▁a": 258, "▁": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", ["é", "a é a", "日本 語", "👍🏽 a", "\x00\x7f\xad\xa0", "Ġ▁", " a"])
def test_bytes_of_tokens_join_to_the_text_where_a_token_is_a_part_of_a_character(
    make: Callable[[], Tokenizer], text: str, tmp_path: Path
) -> None:
    tokenizer = make()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    if make is byte_fallback and "▁" in text:
        text = text.replace("▁", " ")  # This vocabulary has no other way to write either.
    pieces_of = token_pieces(tmp_path)
    assert pieces_of is not None
    pieces = [pieces_of(token) for token in ids]
    assert "".join(pieces).encode("latin-1").decode() == text
    columns = {
        "prompt_ids": np.arange(5, dtype=np.int32),
        "response_ids": np.array(ids, np.int32),
        "logprobs": -np.arange(len(ids), dtype=np.float32),
        "spans": np.array([len(ids), 0], np.int32),
        "transcript": transcript_column(TURNS[:1]),
    }
    (fields,) = sampled_answers(columns, "stop", token_texts(tmp_path), pieces_of)
    assert SampledAnswer(**fields).token_bytes == [piece.encode("latin-1") for piece in pieces]


def test_added_tokens_are_their_text_whatever_they_are_made_of(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    pieces_of = token_pieces(tmp_path)
    assert pieces_of is not None
    assert [pieces_of(token).encode("latin-1") for token in (256, 257)] == [b"<eos>", "é!".encode()]


def test_without_a_file_of_the_tokenizer_bytes_are_those_of_the_text(tmp_path: Path) -> None:
    assert token_pieces(tmp_path) is None
    assert SampledAnswer(("é", "token_id:7"), (0.0, 0.0), "stop", 1).token_bytes == ["é".encode(), b"token_id:7"]

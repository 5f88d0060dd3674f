"""Prompts, end-of-sequence ids, stop strings and finish reasons."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.engines.generation.tokenization import TokenizerWithStops, end_ids
from tests.unit.engines.generation.conftest import Lab, drain, requests

EOS = 2
IM_END = 3


def ids(tokenizer: PreTrainedTokenizerFast, text: str) -> np.ndarray:
    return np.array(tokenizer(text)["input_ids"], np.int32)


@pytest.mark.parametrize(
    ("configured", "own", "expected"),
    [([5, 9], 2, [2, 5, 9]), (7, 7, [7]), (None, 2, [2]), ([4], None, [4]), (None, None, [])],
)
@pytest.mark.trap("several_ends")
def test_end_ids_are_a_union(configured: Any, own: Any, expected: list[int]) -> None:
    found = end_ids(SimpleNamespace(eos_token_id=configured, temperature=0.1), SimpleNamespace(eos_token_id=own))
    assert found.tolist() == expected


def test_special_tokens_that_mark_thoughts_stay_in_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    """Those of Magistral, Command A and gpt-oss are special; decoding would leave no end of the thoughts."""
    marks = ["[THINK]", "[/THINK]", "<|channel|>", "<|message|>", "<|end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    texts = TokenizerWithStops(tokenizer, ())
    assert texts.decode(ids(tokenizer, "[THINK]so[/THINK]six<|end|><|im_end|>")) == "[THINK]so[/THINK]six"
    spoken = "<|channel|>analysis<|message|>so<|end|><|channel|>final<|message|>six"
    assert texts.decode(ids(tokenizer, spoken)) == spoken.replace("<|end|>", "")


def test_a_prompt_opens_thoughts_where_its_template_or_its_begun_answer_does(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    texts = TokenizerWithStops(tokenizer, ())
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>let me"}]
    cases = {"a<think>\n": True, "a<think></think>": False, "do you <think>?": False}
    assert {text: texts.opens_thoughts(ids(tokenizer, text), text) for text in cases} == cases
    assert texts.opens_thoughts(ids(tokenizer, "hi<think>let me"), begun)
    assert not texts.opens_thoughts(ids(tokenizer, "hi<think>let me"), begun[:1])


@pytest.mark.parametrize(
    ("stop", "text", "before"),
    [
        (("\n\n", "END"), "a" * 200 + "END", "a" * 200),
        (("終わり🙂",), "はい、終わり🙂", "はい、"),
        (("!<|im_end|>",), "yes!<|im_end|>", "yes"),
        ((), "anything", None),
    ],
)
def test_a_stop_string_is_seen_the_moment_it_is_complete(
    tokenizer: PreTrainedTokenizerFast, stop: tuple[str, ...], text: str, before: str | None
) -> None:
    """Also one of characters of many bytes, and of special tokens."""
    texts = TokenizerWithStops(tokenizer, stop)
    tokens = ids(tokenizer, text)
    assert not any(texts.stops(tokens[:count]) for count in range(1, len(tokens)))
    assert texts.stops(tokens) == bool(stop)
    assert texts.before_stop(tokens) == (text if before is None else before)
    assert TokenizerWithStops(tokenizer, ("\n\n", "END")).before_stop(ids(tokenizer, "x\n\nyEND")) == "x"


@pytest.mark.parametrize("stop", [("ab",), ("\n\n", "b "), ("é", "り🙂"), ("a<|im_end|>",)])
def test_tokens_that_cannot_end_a_stop_string_are_not_decoded(
    tokenizer: PreTrainedTokenizerFast, stop: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over random texts the answer is that of decoding at every token."""
    texts = TokenizerWithStops(tokenizer, stop)
    decoded = list[int]()
    contains = TokenizerWithStops._contains
    monkeypatch.setattr(texts, "_contains", lambda tokens: decoded.append(1) or contains(texts, tokens))
    random = np.random.default_rng(0)
    found = 0
    pieces = [*"abé りxyz\n", "🙂", "り🙂", "ab", "b ", "\n\n", "a<|im_end|>", "the other words of a longer text"]
    for _ in range(60):
        tokens = ids(tokenizer, "".join(random.choice(pieces, 20)))
        for end in range(1, len(tokens) + 1):
            expected = any(each in tokenizer.decode(tokens[:end]) for each in stop)
            assert texts.stops(tokens[:end]) == expected
            found += expected
            if expected:
                break
    assert found > 20
    decoded.clear()
    assert not any(texts.stops(ids(tokenizer, "wxyz" * 9)[:end]) for end in range(1, 37))
    assert not decoded


def test_a_space_that_only_the_next_word_brings_ends_a_stop_string() -> None:
    """Decoders of words write spaces between tokens."""
    words = Tokenizer(models.WordLevel({"?": 0, "one": 1, "two": 2}, unk_token="?"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece(prefix="##")
    texts = TokenizerWithStops(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?"), ("one ",))
    assert [texts.stops(np.array([1, 2], np.int32)[:end]) for end in (1, 2)] == [False, True]


def test_no_token_decodes_to_more_bytes_than_is_reserved(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = TokenizerWithStops(tokenizer, ())
    alone = [len(texts.decode(np.array([token], np.int32)).encode()) for token in range(len(tokenizer))]
    assert max(alone) <= texts.longest_token_bytes()


@pytest.mark.trap("several_ends")
def test_end_tokens_finish_and_stay_in_the_sample(lab: Lab) -> None:
    """Both ids: the model's generation config says 3, the tokenizer 2."""
    done = list(drain(lab.engine(slots=32), requests(400, max_new_tokens=24, temperature=3.0)).values())
    stopped = [completion for completion in done if completion.finish == "stop"]
    assert {int(completion.tokens[-1]) for completion in stopped} == {EOS, IM_END}
    for completion in done:
        ends = np.isin(completion.tokens, [EOS, IM_END])
        assert not ends[:-1].any()
        assert ends[-1] == (completion.finish == "stop")
        assert completion.finish in ("stop", "length")
        assert completion.finish == "length" or "<eos>" not in completion.text


@pytest.mark.trap("stop_strings")
def test_stop_strings_cut_the_text_but_not_the_tokens(lab: Lab) -> None:
    plain = drain(lab.engine(deterministic=True), requests(8, max_new_tokens=24))
    stop = next(c.text[5:7] for c in plain.values() if len(c.text) > 10 and c.text[5:7].isascii())
    cut = drain(lab.engine(deterministic=True, stop=(stop,)), requests(8, max_new_tokens=24))
    assert any(completion.finish == "stop_string" for completion in cut.values())
    for completion in cut.values():
        whole = plain[completion.request.key]
        assert completion.tokens.tolist() == whole.tokens[: len(completion.tokens)].tolist()
        assert completion.text == whole.text.partition(stop)[0]

"""The tokens of a sample: their text, what is masked of them, and their colours."""

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from asyncrl.deploy.report.report_page import SHOWN_SAMPLES, SHOWN_TOKENS, report_html, shown_samples
from asyncrl.deploy.report.run_record import RunRecord, read_run
from asyncrl.deploy.report.sample_tokens import MAX_TOKENS, Decode, shown_tokens, signed_colour, token_decoder
from tests.unit.deploy.report.recorded_runs import SAMPLE, recorded_run, step

WORDS = ["\u2581two", "\u2581words", "<eos>", "</b>"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose tokenizer writes a space at the begin of each word, but not at the begin of a text."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    (tmp_path / "run" / "model").mkdir(parents=True)
    tokenizer.save(str(tmp_path / "run" / "model" / "tokenizer.json"))
    tokens = replace(SAMPLE, step=5, token_ids=[0, 1, 2], token_logprobs=[-0.5, -5.0, 0.0], token_versions=[1, 2, 4])
    return recorded_run(tmp_path / "run", [step(5, 1.0)], [tokens])


def read(run: Path) -> tuple[RunRecord, Decode]:
    decode = token_decoder([run / "none", run / "model"])
    assert decode is not None
    return read_run(run), decode


def test_tokens_say_their_text_number_and_age_and_stale_ones_are_masked(run: Path) -> None:
    record, decode = read(run)
    first, second, third = shown_tokens(record.samples[0], decode, record.config)
    assert "".join(token.text for token in (first, second, third)) == " two words<eos>"
    assert [token.masked for token in (first, second, third)] == [True, False, False]
    assert first.about == '" two" (0), log-prob -0.500, version 1, advantage +0.500, masked: too old'
    assert second.by_logprob == "rgba(209,73,91,0.60)"
    assert third.by_logprob == "transparent"
    assert [token.by_age for token in (second, third)] == ["rgba(59,125,216,0.60)", "rgba(59,125,216,0.00)"]


def test_tokens_have_advantages_and_rewards_of_their_own_where_they_are_recorded(run: Path) -> None:
    record, decode = read(run)
    plain = shown_tokens(record.samples[0], decode, record.config)
    assert [token.by_advantage for token in plain] == ["rgba(42,157,85,0.15)"] * 3
    assert [token.by_reward != "transparent" for token in plain] == [False, False, bool(record.samples[0].reward)]
    by_token = replace(record.samples[0], token_advantages=[1.0, -2.0, 0.0], token_rewards=[0.0, -1.0, 0.5])
    first, second, third = shown_tokens(by_token, decode, record.config)
    assert [token.by_advantage for token in (first, second, third)] == [
        "rgba(42,157,85,0.30)",
        "rgba(209,73,91,0.60)",
        "transparent",
    ]
    assert [token.by_reward for token in (first, second, third)] == [
        "transparent",
        "rgba(209,73,91,0.60)",
        "rgba(42,157,85,0.30)",
    ]
    assert second.about.endswith("advantage -2.000, reward -1.000")


def test_no_token_is_too_old_where_all_are_admitted(run: Path) -> None:
    record, decode = read(run)
    staleness = record.config.staleness.model_copy(update={"policy": "admit"})
    config = record.config.model_copy(update={"staleness": staleness})
    assert not any(token.masked for token in shown_tokens(record.samples[0], decode, config))


def test_the_middle_of_a_long_answer_is_left_out(run: Path) -> None:
    record, decode = read(run)
    many = replace(SAMPLE, token_ids=[1] * 1000, token_logprobs=[-1.0] * 1000, token_versions=[0] * 1000)
    tokens = shown_tokens(many, decode, record.config)
    assert len(tokens) == MAX_TOKENS + 1
    assert tokens[MAX_TOKENS // 2].text == " [700 tokens] "


def test_the_page_shows_tokens_as_text_and_whole_groups(run: Path) -> None:
    record = read_run(run)
    sample = replace(record.samples[0], token_ids=[3, 3, 3])
    groups = [replace(sample, group=group, member=member) for group in range(60) for member in range(4)]
    record = replace(record, samples=groups)
    shown = shown_samples(record)
    members = [each.record.member for each in shown]
    assert members == [0, 1, 2, 3] * 30
    page = report_html([record])
    assert ">&lt;/b&gt;</span>" in page
    assert page.count('class="token masked"') == 120


def test_the_page_bounds_its_samples_and_the_tokens_that_have_colours(run: Path) -> None:
    record = read_run(run)
    long = replace(SAMPLE, token_ids=[1] * 250, token_logprobs=[-1.0] * 250, token_versions=[0] * 250)
    groups = [
        replace(long, group=group, member=member) for group, size in enumerate((100, 1, 100)) for member in range(size)
    ]
    shown = shown_samples(replace(record, samples=groups))
    assert len(shown) == SHOWN_SAMPLES
    coloured = sum(len(each.tokens) for each in shown)
    assert SHOWN_TOKENS <= coloured < SHOWN_TOKENS + 250
    assert shown[-1].tokens == []
    assert shown[-1].text == SAMPLE.text


def test_colours_grow_with_the_number_up_to_a_limit() -> None:
    assert signed_colour(0.0, 2.0) == "transparent"
    assert signed_colour(1.0, 2.0) == "rgba(42,157,85,0.30)"
    assert signed_colour(-9.0, 2.0) == "rgba(209,73,91,0.60)"

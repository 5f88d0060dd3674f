"""What a person sees: one live picture on a terminal, one line a step when piped."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from asyncrl.telemetry.display import LineDisplay, LiveDisplay, open_display, sample_panel, shown
from asyncrl.telemetry.samples_file import SampleRecord

SAMPLE = SampleRecord(
    step=3, incarnation=0, group=5, member=2, attempt=0, prompt="Reverse abc", text="cba [bold]", finish="stop",
    tokens=4,
    reward=0.75, terms={"exact": 1.0, "brief": 0.5}, advantage=0.25, first=1, last=2, trained=3, masked=1,
    reason="stale",
)  # fmt: skip
METRICS = {
    "step": 3,
    "version": 3,
    "reward/mean": 0.5,
    "perf/tokens_per_s": 1234.5,
    "staleness/max": 2.0,
    "grad_norm": None,
}


def rendered(sample: SampleRecord, characters: int | None = None) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(sample_panel(sample, characters))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_piped_there_is_one_line_a_step() -> None:
    stream = io.StringIO()
    with open_display(10, stream=stream) as display:
        assert isinstance(display, LineDisplay)
        display.say("resuming at step 2")
        display.step(METRICS, SAMPLE)
        display.step({**METRICS, "step": 4}, None)
    said, third, fourth = stream.getvalue().splitlines()
    assert said == "resuming at step 2"
    assert third.startswith("step 3/10  reward 0.500  trained tokens/s 1,23")
    assert "left" not in third
    assert fourth.startswith("step 4/10")
    assert fourth.endswith("s left")
    assert "\x1b" not in stream.getvalue()


def test_a_step_that_trained_nothing_is_told_so() -> None:
    stream, console = io.StringIO(), Console(file=io.StringIO(), force_terminal=True, width=120, height=40)
    with open_display(10, stream=stream) as lines, LiveDisplay(console, 10) as picture:
        for display in (lines, picture):
            display.step({**METRICS, "skipped/not finite": 1.0}, None)
    told = "trained nothing (not finite): it is tried again with other samples"
    assert stream.getvalue() == f"step 3/10  {told}\n"
    assert isinstance(console.file, io.StringIO)
    assert told in console.file.getvalue()


def test_on_a_terminal_the_picture_shows_numbers_and_a_sample() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=40)
    with LiveDisplay(console, 10) as display:
        display.say("resuming at step 2")
        display.step(METRICS, SAMPLE)
    assert isinstance(console.file, io.StringIO)
    drawn = console.file.getvalue()
    for expected in ("resuming at step 2", "3/10", "reward", "0.500", "Reverse abc", "cba [bold]"):
        assert expected in drawn


def test_numbers_that_are_missing_or_none_are_left_out() -> None:
    assert [name for name, _ in shown(METRICS)] == ["reward", "trained tokens/s", "oldest"]


def test_a_sample_says_its_reward_by_term_and_why_tokens_were_masked() -> None:
    text = rendered(SAMPLE)
    for expected in (
        "reward 0.75 (exact 1, brief 0.5)",
        "advantage +0.25",
        "ended by stop",
        "versions 1 to 2",
        "3 tokens trained",
        "(stale)",
    ):
        assert expected in text


@pytest.mark.parametrize(("reward", "says"), [(None, "no reward"), (0.0, "reward 0")])
def test_a_sample_without_a_reward_is_told_from_one_with_none_at_all(reward: float | None, says: str) -> None:
    assert says in rendered(replace(SAMPLE, reward=reward))


def test_long_texts_keep_their_ends() -> None:
    text = rendered(replace(SAMPLE, text="a" * 500 + "b" * 500), 40)
    assert "a" * 20 + " … " + "b" * 20 in text
    assert "(nothing)" in rendered(replace(SAMPLE, text=""))


def test_escape_sequences_of_a_model_do_not_reach_the_terminal() -> None:
    text = rendered(replace(SAMPLE, text="a\x1b[2Jb\rc\nd"))
    assert "\x1b" not in text
    assert "a\ufffd[2Jb\ufffdc" in text


def test_a_reader_that_goes_away_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with LineDisplay(Gone(), 2) as display:
        display.say("one")
        display.say("two")

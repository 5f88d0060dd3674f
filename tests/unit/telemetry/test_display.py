"""What a person sees: one live picture on a terminal, a table with one line a step when piped."""

import io
import os
import pty
import re
import sys
import termios
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from asyncrl.config.schema import Config
from asyncrl.telemetry.display import (
    SHOWN,
    LineDisplay,
    LiveDisplay,
    LoggedDisplay,
    NotebookDisplay,
    open_cell_or_terminal,
    open_display,
    shown,
)
from asyncrl.telemetry.jsonl import read_lines
from asyncrl.telemetry.logs import open_log
from asyncrl.telemetry.sample_panel import NO_TEXT, SpecialTokens, group_panel, sample_panel
from asyncrl.telemetry.samples_file import SampleRecord

SAMPLE = SampleRecord(
    step=3, incarnation=0, group=5, member=2, attempt=0, prompt="Reverse abc", text="cba [bold]", finish="stop",
    tokens=4,
    reward=0.75, terms={"exact": 1.0, "brief": 0.5}, advantage=0.25, first=1, last=2, trained=3, masked=1,
    reason="stale",
)  # fmt: skip
METRICS: dict[str, Any] = {
    "step": 3,
    "version": 3,
    "reward/mean": 0.5,
    "perf/tokens_per_s": 1234.5,
    "staleness/max": 2.0,
}
METRICS |= {"grad_norm": None}


def terminal(width: int = 120, **options: Any) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=40, **options)


def printed_on(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def rendered(what: Any, width: int = 160) -> str:
    """Returns what a console without colours prints."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(what)
    return printed_on(console)


def picture(display: LiveDisplay) -> str:
    """Returns the words of the picture in one line."""
    return " ".join(rendered(display._live.renderable, 100).split())


def piped(lines: list[dict[str, float]], steps: int = 10, print_every: int = 1) -> list[str]:
    """Returns the lines that are printed for steps with these metrics besides those of METRICS."""
    stream = io.StringIO()
    with open_display(steps, stream, print_every=print_every) as display:
        for line in lines:
            display.step({**METRICS, **line}, SAMPLE)
    return stream.getvalue().splitlines()


def test_piped_there_is_a_heading_and_one_line_a_step() -> None:
    stream = io.StringIO()
    with open_display(10, stream=stream) as display:
        assert isinstance(display, LineDisplay)
        display.say("resuming at step 2")
        display.step({**METRICS, "reward/std": 0.25, "completions/length_mean": 4.6}, SAMPLE)
        display.step({**METRICS, "step": 4, "eval/reward/mean": 0.75}, None)
    said, heading, third, fourth = stream.getvalue().splitlines()
    assert said == "resuming at step 2"
    assert heading.split() == ["step", "reward", "±", "spread", "held", "out", "length", "seconds", "left"]
    assert third.split() == ["step", "3/10", "0.500", "±", "0.250", "-", "4.6", "-", "-"]
    assert fourth.split()[:7] == ["step", "4/10", "0.500", "±", "-", "0.750", "-"]
    assert re.search(r" \d+ s$", fourth)
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize(
    ("steps", "value", "headings"),
    [
        (10, {"reward/mean": 0.5, "reward/std": 0.1}, "reward ± spread"),
        (250_000, {"reward/mean": -123_456.789, "reward/std": 1e29, "cost/mean": -1e-9}, "cost"),
        (10**6, {"reward/mean": float("nan"), "completions/length_mean": 131_072.0}, "length"),
        (
            20,
            {"acting/transitions": 64.0, "acting/return_last20": -1234.5, "acting/length_mean": 1e6},
            "steps an episode",
        ),
        (20, {"acting/transitions": 64.0, "eval/return/mean": 487.25}, "evaluated"),
    ],
)
def test_columns_are_aligned_within_100_characters(steps: int, value: dict[str, float], headings: str) -> None:
    heading, *lines = piped([{**value, "step": step} for step in (1, 2, steps)], steps)
    assert {len(line) for line in (heading, *lines)} == {len(heading)}
    assert len(heading) <= 100
    assert headings in heading


def test_a_hundred_slow_steps_are_ten_kilobytes_of_output() -> None:
    """Three minutes a step: what the run waits for is told 18 times in each of them, and seldom printed."""
    stream = io.StringIO()
    with open_display(100, stream) as display:
        for step in range(1, 101):
            for second in range(10, 180, 10):
                display.progress(f"the last step was {step - 1}; in the {second} s since: 4 groups drawn" + "." * 60)
            display.step({**METRICS, **dict.fromkeys((metric for metric, *_ in SHOWN), 0.5), "step": step}, SAMPLE)
    assert len(stream.getvalue()) < 10_000
    shown_waits = [line for line in stream.getvalue().splitlines() if line.startswith("the last")]
    seconds = [int(re.findall(r"in the (\d+) s", line)[0]) for line in shown_waits]
    assert seconds == [10, 30, 70, 150, 160]


def test_a_run_that_waits_for_hours_is_heard_of_every_ten_minutes() -> None:
    stream = io.StringIO()
    display = LineDisplay(stream, 10)
    for _ in range(6 * 60 * 2):
        display.progress("waiting")
    assert 10 < stream.getvalue().count("waiting") < 20


@pytest.mark.parametrize(
    ("print_every", "steps"), [(1, range(1, 11)), (3, (3, 6, 9, 10)), (5, (5, 10)), (10, (10,)), (99, (10,)), (0, ())]
)
def test_a_line_is_printed_for_so_many_steps_and_for_the_last(print_every: int, steps: Sequence[int]) -> None:
    heading = 1 if print_every else 0
    lines = piped([{"step": step} for step in range(1, 11)], print_every=print_every)
    assert [int(line.split()[1].partition("/")[0]) for line in lines[heading:]] == list(steps)


def test_what_was_evaluated_between_two_lines_is_in_the_next_one() -> None:
    evaluated = [{"step": step, **({"eval/reward/mean": 0.25} if step == 4 else {})} for step in range(1, 11)]
    assert [line.split()[5] for line in piped(evaluated, print_every=5)[1:]] == ["0.250", "-"]


def test_a_quiet_run_prints_warnings_and_steps_that_trained_nothing() -> None:
    stream = io.StringIO()
    with open_display(10, stream, print_every=0) as display:
        display.say("guards.truncation: 70% were cut off")
        display.progress("the last step was 2")
        display.step(METRICS, SAMPLE)
        display.step({**METRICS, "skipped/not finite": 1.0}, None)
    assert stream.getvalue().splitlines() == [
        "guards.truncation: 70% were cut off",
        "step 3/10  trained nothing (not finite): it is tried again with other samples",
    ]


def test_on_a_terminal_the_picture_shows_numbers_and_a_sample_above_what_is_said_at_the_end() -> None:
    console = terminal()
    with LiveDisplay(console, 10) as display:
        display.say("resuming at step 2")
        display.step(METRICS, SAMPLE)
        display.settle()
        display.progress("waiting")
        display.step({**METRICS, "step": 4}, SAMPLE)
        display.say("stopped at step 3 of 10; go on with: asyncrl run")
    drawn = printed_on(console)
    for expected in ("resuming at step 2", "3/10", "reward", "0.500", "Reverse abc", "cba [bold]"):
        assert expected in drawn
    assert drawn.rstrip().endswith("go on with: asyncrl run")


def test_a_step_that_trained_nothing_is_told_so() -> None:
    stream = io.StringIO()
    console = terminal()
    with open_display(10, stream=stream) as lines, LiveDisplay(console, 10) as picture:
        for display in (lines, picture):
            display.step({**METRICS, "skipped/not finite": 1.0}, None)
    told = "trained nothing (not finite): it is tried again with other samples"
    assert stream.getvalue() == f"step 3/10  {told}\n"
    assert told in printed_on(console)


def test_both_kinds_of_kl_are_named() -> None:
    both = {"policy/kl_rollout_train": 0.01, "policy/kl_reference": 0.2}
    assert shown(both) == [("kl to engine (k1)", "0.01"), ("kl to reference", "0.2")]
    assert not [name for _, name, _ in SHOWN if name == "kl"]
    assert [name for name, _ in shown(METRICS)] == ["reward", "trained tokens/s", "oldest"], "and no missing number"


def test_a_terminal_does_not_echo_ctrl_c_into_the_live_picture_and_is_as_before_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An echoed ^C shifts the picture by a line, and what is drawn next leaves a second progress bar."""
    ours, theirs = pty.openpty()

    def echoes() -> bool:
        return bool(termios.tcgetattr(theirs)[3] & termios.ECHOCTL)

    with os.fdopen(ours), os.fdopen(theirs, closefd=True) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        assert echoes()
        with LiveDisplay(Console(file=io.StringIO(), force_terminal=True), 10):
            assert not echoes()
        assert echoes()


def test_a_sample_says_its_reward_by_term_and_why_tokens_were_masked() -> None:
    text = rendered(sample_panel(SAMPLE))
    says = ("reward 0.75 (exact 1, brief 0.5)", "advantage +0.25", "ended by stop", "versions 1 to 2", "(stale)")
    for expected in (*says, "3 tokens trained"):
        assert expected in text

    assert "reward 0 " in rendered(sample_panel(replace(SAMPLE, reward=0.0)))
    assert "no reward" in rendered(sample_panel(replace(SAMPLE, reward=None)))


def test_long_texts_keep_their_ends() -> None:
    text = rendered(sample_panel(replace(SAMPLE, text="a" * 500 + "b" * 500), 40))
    assert "a" * 20 + " … " + "b" * 20 in text
    assert "(no text: the answer ended at once, or" in rendered(sample_panel(replace(SAMPLE, text="")))


def test_an_episode_shows_who_said_what_and_what_each_turn_earned() -> None:
    said = [("assistant", "5"), ("user", "more\x1b[2J"), ("tool", "12"), ("assistant", "")]
    turns = [{"role": role, "content": text} for role, text in said]
    panel = sample_panel(replace(SAMPLE, turns=turns, turn_rewards=[0.0, 0.75]))
    lines = [line.strip("│ ") for line in rendered(panel).splitlines()]
    assert lines[1:6] == [
        "Reverse abc▶",
        "assistant: 5  [reward 0]",
        "user: more\N{REPLACEMENT CHARACTER}[2J",
        "tool: 12",
        f"assistant: {NO_TEXT}  [reward 0.75]",
    ]
    assert "· 2 turns ·" in lines[6]


def test_escape_sequences_of_a_model_do_not_reach_the_terminal() -> None:
    text = rendered(sample_panel(replace(SAMPLE, text="a\x1b[2Jb\rc\nd")))
    assert "\x1b" not in text
    assert "a\ufffd[2Jb\ufffdc" in text


def test_a_printed_command_is_not_broken_into_lines_of_a_narrow_terminal() -> None:
    console = terminal(60)
    command = "go on with: asyncrl run " + "--section.key value " * 6 + "--run-dir runs/one"
    with LiveDisplay(console, 10) as display:
        display.say(command)
    assert command in printed_on(console)


def test_what_is_said_is_logged_and_so_is_what_is_only_noted(tmp_path: Path) -> None:
    stream = io.StringIO()
    with open_log(tmp_path / "controller.jsonl", service="controller") as log:
        display = LoggedDisplay(LineDisplay(stream, 10), log)
        display.say("lost generation0.0")
        display.note("WorkerStarted", instance="generation0.0-1")
        display.progress("starting")
    said, started = read_lines(tmp_path / "controller.jsonl")
    assert (said["event"], said["text"], said["service"]) == ("said", "lost generation0.0", "controller")
    assert (started["event"], started["instance"]) == ("WorkerStarted", "generation0.0-1")
    assert stream.getvalue() == "lost generation0.0\nstarting\n"


class Gone(io.StringIO):
    """A terminal that was closed."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


class GonePipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("gone", [Gone, GonePipe])
def test_a_reader_that_goes_away_does_not_end_the_run(gone: type[io.StringIO]) -> None:
    with LineDisplay(gone(), 2) as display:
        display.say("one")
        display.say("two")


def test_a_terminal_that_was_closed_does_not_end_the_run() -> None:
    with (picture := LiveDisplay(terminal(60), 10)):
        picture._live.console.file = Gone()
        picture.say("one")
        picture.step(METRICS, SAMPLE)


def test_no_line_of_the_live_view_is_broken_at_80_columns() -> None:
    display = LiveDisplay(terminal(80, color_system=None), 250_000)
    numbers = {metric: -123_456.789 for metric, *_ in SHOWN}
    sample = replace(
        SAMPLE,
        prompt="Reverse abc",
        finish="length",
        reward=-123.456,
        terms={"numeric_equality": 123.456, "length_penalty": -123.456},
        turn_rewards=[1.0] * 4,
        first=123_455,
        last=123_456,
        masked=1234,
        rejected=1234,
    )
    between = (
        "the last step was 123,456; in the 123 s since: 12,345 groups drawn, 12,345 samples generated, "
        "12,345 begun again, 12,345 scored, 12,345 dropped (12,345 as no_signal, 123 as stale); 12,345 in flight"
    )
    with display:
        display.step({"step": 123_457, "version": 123_456, **numbers}, sample)
        display.progress(between)
    printed = rendered(display._live.renderable, 80)
    assert max(map(len, printed.splitlines())) <= 80
    items = [f"{name} {number}" for name, number in shown(numbers)]
    items += ["reward -123 (numeric_equality 123, length_penalty -123)", "versions 123455 to 123456", "ended by length"]
    items += ["3 tokens trained", "1234 masked (stale)", "1234 rejected by the correction", "12,345 samples generated"]
    items += ["the last step was 123,456; in the 123 s since: 12,345 groups drawn", "123 as stale); 12,345 in flight"]
    assert [item for item in items if not any(item in line for line in printed.splitlines())] == []
    assert "step " in printed
    assert "123456/250000" in printed.splitlines()[0]


def test_the_picture_says_what_the_run_waits_for_and_draws_the_reward() -> None:
    shares = {"time/reward/busy": 0.96, "time/training/busy": 0.2, "time/training/starved": 0.75}
    display = LiveDisplay(terminal(100, color_system=None), 10, {"reward.workers": 2})
    with display:
        for step in (1, 2, 3):
            display.step({**METRICS, **shares, "step": step, "reward/mean": step / 4}, SAMPLE)
    drawn = picture(display)
    assert "reward 0.250 ▁▅█ 0.750" in drawn
    assert "reward 96% busy, training 20% busy training 75% waits for work" in drawn
    assert (
        "reward is the slowest: it is busy 96% of the time, and training waits 75% for samples; reward.workers" in drawn
    )


def test_a_policy_that_acts_is_shown_in_its_own_words() -> None:
    acted = {**METRICS, "acting/transitions": 64.0, "acting/length_mean": 20.0, "eval/return/mean": 487.25}
    moves = [{"observation": [0.5, 1.0], "action": n, "reward": 1.0} for n in range(16)]
    moves[1]["ended"] = "terminated"
    moved = replace(
        SAMPLE, prompt="CartPole-v1", text="16 transitions", finish="transitions", turns=[], transitions=moves
    )
    display = LiveDisplay(terminal(100, color_system=None), 10)
    with display:
        for step in (1, 2, 3):
            display.step({**acted, "step": step, "acting/return_last20": 100.0 * step}, moved)
    drawn = picture(display)
    items = ["return 300", "steps an episode 20.0", "evaluated 487.25", "transitions/s 1,23", "return 100.000 ▁▅█ 300"]
    items += ["3 transitions trained", "1: in [0.5, 1.0] action 1, reward 1.0, terminated"]
    for item in (*items, "12 more transitions in samples.jsonl"):
        assert item in drawn
    assert not [word for word in ("token", "reward 0.5", "held out", "ended by") if word in drawn]


def test_the_end_of_the_prompt_is_marked_and_special_tokens_stand_out() -> None:
    texts = {(1, 2): "cba<|end|>", (0, 3): "<s>Reverse abc: "}
    tokens = SpecialTokens(lambda ids: texts[tuple(ids)], ("<|end|>", "<s>"))
    sample = replace(SAMPLE, prompt="Reverse abc: ", prompt_ids=[0, 3], token_ids=[1, 2])
    console = terminal(160, color_system="standard")
    console.print(sample_panel(sample, tokens=tokens))
    drawn = printed_on(console)
    assert "\x1b[7m<|end|>\x1b[0m" in drawn
    assert "\x1b[7m<s>\x1b[0m" in drawn
    assert "Reverse abc: \x1b[0m\x1b[35m▶" in drawn
    assert "cba [bold]" not in drawn, "the whole answer is shown, and not what rewards see"


def test_siblings_stand_below_their_prompt_the_best_first() -> None:
    group = [
        replace(SAMPLE, member=member, text=text, reward=reward)
        for member, text, reward in ((0, "cbx", 0.0), (1, "cba", 1.0), (2, "z", None))
    ]
    console = terminal(160, color_system="standard")
    console.print(group_panel(group))
    drawn = printed_on(console)
    assert drawn.count("Reverse abc") == 1
    assert re.findall(r"member (\d)", drawn) == ["1", "0", "2"]
    assert "\x1b[2mcb\x1b[0m\x1b[1mx" in drawn, "what an answer shares with the best one is dimmed"


@pytest.mark.parametrize(
    ("texts", "empty"), [(("uvac", "uvac"), 0), (("uvac", "uv"), 0), (("", "uv"), 1), (("", ""), 2)]
)
def test_only_empty_answers_are_called_so_beside_their_siblings(texts: tuple[str, ...], empty: int) -> None:
    group = [replace(SAMPLE, member=member, text=text) for member, text in enumerate(texts)]
    assert rendered(group_panel(group)).count(NO_TEXT) == empty


CONFIG = Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p"}, "steps": 10})
STEP = {"step": 4, "version": 4, "reward/mean": 0.5, "time/training/busy": 0.9}


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Takes the place of a notebook; returns what its output held, the newest last."""
    found: list[str] = []
    handle = SimpleNamespace(update=lambda html: found.append(html.data))

    def display(html: Any, display_id: bool) -> Any:
        assert display_id
        found.append(html.data)
        return handle

    shell = SimpleNamespace(config={"IPKernelApp": {}})
    shown = SimpleNamespace(HTML=lambda text: SimpleNamespace(data=text), display=display)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "IPython.display", shown)  # type: ignore[arg-type]
    return found


def test_a_cell_has_one_bar_which_each_step_moves(outputs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with open_cell_or_terminal(CONFIG) as display:
        assert isinstance(display, NotebookDisplay)
        display.say("run directory: runs/a<b")
        display.progress("starting the workers")
        display.step({**STEP, "step": 3, "version": 3, "reward/mean": 0.25}, None)
        display.step(STEP, None)
    first, starting, _, last = outputs
    assert first == ""
    assert "starting the workers" in starting
    assert 'value="4" max="10"' in last
    assert "step 4 of 10\nreward 0.500\nreward 0.250 ▁█ 0.500\ntraining is the slowest: it is busy 90%" in last
    assert capsys.readouterr().out == "run directory: runs/a<b\n", "what stays is printed, and nothing else"


def test_what_is_shown_is_text_and_no_markup(outputs: list[str]) -> None:
    display = open_cell_or_terminal(CONFIG)
    display.progress("<script>")
    assert "&lt;script&gt;" in outputs[-1]


def test_without_a_notebook_it_is_the_display_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_cell_or_terminal(CONFIG), LineDisplay)
    shell = SimpleNamespace(config={"TerminalIPythonApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    assert isinstance(open_cell_or_terminal(CONFIG), LineDisplay)

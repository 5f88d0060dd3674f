"""The report of a policy that acts: returns and not tokens, and the picture of its last evaluation."""

import re
from dataclasses import replace
from pathlib import Path

from asyncrl.deploy.report.report_page import report_html
from asyncrl.deploy.report.run_record import MOST_BYTES, RunRecord, newest_picture, read_run
from asyncrl.telemetry.samples_file import TRANSITIONS
from tests import golden
from tests.unit.deploy.report.recorded_runs import SAMPLE, recorded_run, step
from tests.unit.deploy.report.test_report_page import shown_facts

ACTING = {"acting": {"env": "CartPole-v1"}, "task": {"prompts": "acting", "samples_per_prompt": 8}}
EVALUATION = {"prompts": 3, "stderr": 1.0, "unscorable": 1, "seconds": 0.5, "length": 20.0, "cut_off": 0}
EVALUATIONS = (
    {**EVALUATION, "version": 0, "mean": 9.5, "low": 8.0, "high": 11.0},
    {**EVALUATION, "version": 10, "mean": None, "low": None, "high": None},
    {**EVALUATION, "version": 20, "mean": 487.25, "low": 470.0, "high": 500.0},
)
MOVED = replace(SAMPLE, prompt="CartPole-v1", text="32 transitions with a reward of 32", finish=TRANSITIONS, tokens=32)


def run_of(path: Path) -> RunRecord:
    numbers = {"tokens/trained": 256.0, "acting/return_mean": 20.0, "acting/length_mean": 20.0, "staleness/max": 1.0}
    lines = [
        step(n, 2.0 * n, **numbers, **{"acting/return_last20": float(n), "acting/transitions": 256.0 * n})
        for n in range(1, 21)
    ]
    run_dir = recorded_run(path, lines, [MOVED], EVALUATIONS, reward={}, **ACTING)
    (run_dir / "evaluations").mkdir()
    for version in (0, 10):
        (run_dir / "evaluations" / f"{version}.gif").write_bytes(b"GIF89a" + bytes([version]))
    return read_run(run_dir)


def test_the_table_has_returns_and_transitions(tmp_path: Path) -> None:
    golden.says(shown_facts(run_of(tmp_path / "run")), "487.25 [470 - 500]", "5,120", "128")


def test_the_page_has_no_word_of_language_and_no_empty_panel(tmp_path: Path) -> None:
    page = report_html([run_of(tmp_path / "run")])
    body = re.sub(r"<script.*?</script>", "", page[page.index("<h1>") : page.index('<h2 id="audit">')], flags=re.DOTALL)
    words = " ".join(re.sub(r"<[^>]+>", " ", body).split())
    assert not re.findall(r"[Tt]oken|[Pp]rompt|answer|held.out|completion", words)
    assert "32 transitions with a reward of 32" in words
    assert "10 - - 3 20.0 1 0 0.50 20 487.25 470 to 500 3 20.0 1 0 0.50" in words, "a version without a mean is shown"
    titles = set(re.findall(r'"text":"([^"]+)"', page))
    assert {"Return of evaluated versions", "Return of episodes", "Length of episodes"} <= titles
    assert not titles & {
        "Reward",
        "Length of completions",
        "Trained tokens",
        "Age of the first token of trained samples",
    }
    assert "Temperature" not in titles, "PPO has none"
    assert 'src="data:image/gif;base64,R0lGODlhCg=="' in page, "the newest picture, of version 10"


def test_several_runs_are_compared_by_their_returns(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / "one"), run_of(tmp_path / "other")]
    page = report_html(runs)
    assert "Return of evaluated versions" in page
    assert page.count("data:image/gif;base64,") == 2


def test_a_picture_that_is_too_large_is_left_out(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    (run.path / "evaluations" / "20.gif").write_bytes(bytes(MOST_BYTES + 1))
    assert newest_picture(run) is None

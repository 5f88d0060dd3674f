"""Warnings of a run are kept, and each kind is repeated in one line."""

from pathlib import Path

import pytest

from asyncrl.telemetry.logs import WarningFile, repeated


def test_each_kind_is_one_line_with_its_count_and_steps(tmp_path: Path) -> None:
    said: list[str] = []
    steps = iter((4, 9, 9, 12))
    file = WarningFile(tmp_path / "warnings.jsonl", said.append, lambda: next(steps))
    texts = [
        "guards.poison: group 1 is given up\n  prompt: 'a'",
        "step 9: mismatch/kl is 2; a smaller limit",
        "guards.poison: group 8 is given up\n  prompt: 'b'",
        "the trainer could not prefetch rows",
    ]
    for text in texts:
        file.warn(text)
    assert said == texts
    assert list(repeated(file.path)) == [
        "guards.poison (2 times, after steps 4 to 9): group 8 is given up",
        "mismatch (once, after step 9): step 9: mismatch/kl is 2; a smaller limit",
        "warning (once, after step 12): the trainer could not prefetch rows",
    ]
    assert list(repeated(tmp_path / "none.jsonl")) == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "guards.first_failure: a reward failed; logs:\nf: it raised ValueError\n  at line 3",
            "logs: f: it raised ValueError",
        ),
        (
            "guards.unscored: the last one:\nf: it hung (guards.unscored = ...)",
            "the last one: f: it hung (guards.unscored = ...)",
        ),
        ("row 3: left out:\nthere is no column x", "row 3: left out: there is no column x"),
        ("nothing follows:", "nothing follows:"),
        ("guards.poison: group 1\n  prompt: 'a'", "group 1"),
    ],
)
def test_what_the_first_line_announces_is_told(tmp_path: Path, text: str, line: str) -> None:
    file = WarningFile(tmp_path / "warnings.jsonl", lambda text: None, lambda: 1)
    file.warn(text)
    (found,) = repeated(file.path)
    assert found.endswith(line)

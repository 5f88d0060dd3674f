"""Warnings of a run are kept, and each kind is repeated in one line."""

from pathlib import Path

from asyncrl.telemetry.screen.warning_recap import WarningFile, repeated


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

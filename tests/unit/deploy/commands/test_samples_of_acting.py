"""`asyncrl samples` of a policy that acts: transitions, and the episodes of the newest evaluation."""

import json
from pathlib import Path

import pytest

from asyncrl.deploy import cli
from asyncrl.telemetry.jsonl import LineFile
from asyncrl.telemetry.samples_file import TRANSITIONS, SampleRecord


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    record = SampleRecord(
        *(1, 0, 0, 0, 0),
        prompt="Walk",
        text="16 transitions with a reward of 3",
        finish=TRANSITIONS,
        tokens=16,
        reward=3.0,
        terms={},
        advantage=3.0,
        first=0,
        last=0,
        trained=16,
        masked=0,
    )
    file = LineFile(tmp_path / "samples.jsonl")
    file.append(record.fields())
    file.close()
    return tmp_path


def shown(run_dir: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert cli.main(["samples", str(run_dir), *flags]) == 0
    return capsys.readouterr().out


def test_a_sample_has_transitions_and_no_advantage_of_its_own(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(run_dir, capsys)
    assert "reward 3 · version 0 · 16 transitions trained" in text
    assert "no episode was evaluated: evaluate.episodes says how many" in text


def test_episodes_of_the_newest_evaluation_are_shown_with_their_picture(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_dir / "evaluations"
    folder.mkdir()
    for version, returns in ((9, [1.0]), (10, [475.25, None, 12.0])):
        episodes = [
            {"version": version, "episode": number, "reward": each, "steps": 7, "finish": "truncated"}
            for number, each in enumerate(returns)
        ]
        (folder / f"{version}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in episodes))
    (folder / "10.gif").write_bytes(b"GIF89a")
    lines = shown(run_dir, capsys, "-n", "2").splitlines()[-5:]
    assert lines == [
        f"episodes of the evaluation of version 10 ({folder / '10.jsonl'}):",
        "    0  return 475.25 after 7 steps, truncated",
        "    1  lost by its environment after 7 steps, truncated",
        "  and 1 more",
        f"the first of them as an animation: {folder / '10.gif'}",
    ]


def test_no_file_of_tokens_is_written(run_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["samples", str(run_dir), "--parquet", str(tmp_path / "x.parquet")]) == 2
    said = capsys.readouterr()
    assert "a policy that acts has no tokens; samples.jsonl has its transitions" in said.err + said.out
    assert not (tmp_path / "x.parquet").exists()

"""`asyncrl monitor` on the files of a run."""

import time
from pathlib import Path

import pytest

from asyncrl.deploy.cli import main
from asyncrl.telemetry.jsonl import LineFile
from asyncrl.telemetry.run_status import RunStatus, WorkerStatus, write_status

WORKERS = (
    WorkerStatus("generation0[0]", "a", "", ("x", "y", "z"), 3, {"busy": 0.5}, 0.93, 512 * 10**6, 2, {}),
    WorkerStatus("reward0[0]", "b", "killed by SIGKILL", (), 0, {}, 0.0, 0, 1, {}),
)


def write(folder: Path, age: float) -> None:
    write_status(folder / "status.json", RunStatus(time.time() - age, 7, 25, {"running": 1234, "ready": 5}, WORKERS))
    metrics = LineFile(folder / "metrics.jsonl")
    for step in (6, 7):
        metrics.append({"step": step, "reward/mean": step / 10})
    metrics.close()


def test_it_shows_workers_and_the_newest_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    write(tmp_path, 0.0)
    assert main(["monitor", str(tmp_path), "--once"]) == 0
    printed = capsys.readouterr().out
    first, second, _, _, generation, reward = printed.rstrip("\n").split("\n")
    assert first == "version 7 of 25 steps; samples: 1,234 running, 5 ready"
    assert second.split() == ["step", "7:", "reward", "0.700"]
    cells = ["generation0[0]", "serves", "50%", "-", "-", "-", "0.93", "512", "MB", "3", "2", "x;", "y", "and", "1"]
    assert generation.split() == [*cells, "more"]
    assert reward.split()[:4] == ["reward0[0]", "killed", "by", "SIGKILL"]


def test_an_old_state_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 3600.0)
    assert main(["monitor", str(tmp_path), "--once"]) == 0
    assert "This state is 3600 s old: the run has ended" in capsys.readouterr().out


def test_a_run_that_has_ended_has_no_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_status(tmp_path / "status.json", RunStatus(time.time(), 25, 25, {}, WORKERS, ended=True))
    assert main(["monitor", str(tmp_path), "--once"]) == 0
    printed = capsys.readouterr().out
    assert "The run has ended" in printed
    assert "generation0" not in printed


def test_a_damaged_line_of_metrics_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0.0)
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": \xff\n')
    assert main(["monitor", str(tmp_path), "--once"]) == 2
    assert "metrics.jsonl is damaged" in capsys.readouterr().err


def test_without_a_run_it_says_what_to_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", str(tmp_path)]) == 2
    assert "status.json does not exist: name the directory of a run" in capsys.readouterr().err

"""`asyncrl monitor` on the files of a run."""

import time
from collections.abc import Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncrl.deploy.cli import main
from asyncrl.deploy.commands.monitor import view
from asyncrl.telemetry.display import SHOWN
from asyncrl.telemetry.jsonl import LineFile
from asyncrl.telemetry.run_status import RunStatus, WorkerStatus, write_status
from tests import golden

WORKERS = (
    WorkerStatus(
        *("generation0[0]", "a", "", ("x", "y", "z"), 3, {"busy": 0.5}, 0.93, 512 * 10**6, 2, {}),
        *({"samples": 12.34, "tokens": 1234.5}, 5, {"own": 20e9, "memory": 30e9, "total": 80e9}, "generation"),
    ),
    WorkerStatus("reward0[0]", "b", "killed by SIGKILL", (), 0, {}, 0.0, 0, 1, {}),
)


def write(folder: Path, age: float = 0.0, **metrics: float) -> None:
    write_status(folder / "status.json", RunStatus(time.time() - age, 7, 25, {"running": 1234, "ready": 5}, WORKERS))
    file = LineFile(folder / "metrics.jsonl")
    for step in (6, 7):
        file.append({"step": step, "reward/mean": step / 10, **metrics})
    file.close()


def monitor(folder: Path) -> int:
    return main(["monitor", str(folder), "--once"])


@pytest.mark.parametrize("metrics", [{}, {"acting/transitions": 64.0, "acting/return_last20": 12.5}])
@pytest.mark.parametrize("columns", ["200", "80"])
def test_it_shows_workers_and_the_newest_step(
    columns: str, metrics: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """A policy that acts has transitions and returns."""
    monkeypatch.setenv("COLUMNS", columns)
    write(tmp_path, **metrics)
    assert monitor(tmp_path) == 0
    golden.says(shown := capsys.readouterr().out, "reward0[0]: killed by SIGKILL")
    assert ("transitions per s" in shown, "token" in shown) == (bool(metrics), not metrics)


WIDE = WorkerStatus(
    *("environment10[0]", "a", "killed by SIGKILL; it is started again in 3.5 s, the fourth time in a minute, as its"),
    *(("generate for 12.0 s", "generate for 7.0 s"), 1234, dict.fromkeys(("busy", "starved", "blocked", "sync"), 1.0)),
    *(12.34, 512 * 10**9, 10, {}, {"samples": 1234.5, "tokens": 1234567.0}, 99_999),
    *({"own": 120e9, "memory": 130e9, "total": 141.4e9}, "environment"),
)
NUMBERS = {metric: -123.456 for metric, *_ in SHOWN}


def viewed(status: RunStatus, metrics: Mapping[str, float], now: float = 1e9, width: int = 80) -> str:
    """Returns the view of a width as a screen shows it."""
    console = Console(width=width, file=(shown := StringIO()))
    console.print(view(status, metrics, now, 80))
    return shown.getvalue()


@pytest.mark.parametrize("working", [WIDE, replace(WIDE, problem="")])
def test_no_line_is_longer_than_a_terminal_of_80_columns(working: WorkerStatus) -> None:
    samples = {stage: 1_234_567 for stage in ("running", "scoring", "ready", "training", "trained", "dropped")}
    status = RunStatus(1e9, 123_456, 250_000, samples, (working,), incarnation=1)
    printed, wide = (viewed(status, {"step": 123_457, **NUMBERS}, 2e9, width) for width in (80, 1000))
    assert printed.count("\n") == wide.count("\n"), f"a line was wrapped:\n{printed}"
    golden.says(printed)


@pytest.mark.parametrize(
    "metrics",
    [
        {"step": 8, "version": 7, "skipped/not finite": 1},
        {"step": 7, "reward/mean": 0.7},
        {"step": 8, "incarnation": 1, "reward/mean": 0.7},
        {"step": 8, "incarnation": 2, "reward/mean": 0.7},
    ],
    ids=["skipped", "last", "before the resume", "newer"],
)
def test_the_last_step_is_shown_as_what_it_was(metrics: dict[str, float]) -> None:
    golden.says(viewed(RunStatus(1e9, 7, 25, {}, (), incarnation=2), metrics))


def test_an_old_state_and_a_paused_run_say_so() -> None:
    for now in (1e9 + 1, 1e9 + 100):
        golden.says(viewed(RunStatus(1e9, 7, 25, {}, WORKERS, paused=True), {}, now))


def test_a_run_that_has_ended_has_no_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_status(tmp_path / "status.json", RunStatus(time.time(), 25, 25, {}, WORKERS, ended=True))
    assert monitor(tmp_path) == 0
    golden.says(capsys.readouterr().out)


def test_a_damaged_line_of_metrics_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": \xff\n')
    assert monitor(tmp_path) == 2
    assert "metrics.jsonl is damaged" in capsys.readouterr().err

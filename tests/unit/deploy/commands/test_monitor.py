"""`asyncrl monitor` on the files of a run."""

import time
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from asyncrl.deploy.cli import main
from asyncrl.deploy.commands.monitor import view
from asyncrl.telemetry.display import SHOWN
from asyncrl.telemetry.jsonl import LineFile
from asyncrl.telemetry.run_status import RunStatus, WorkerStatus, write_status

WORKERS = (
    WorkerStatus(
        *("generation0[0]", "a", "", ("x", "y", "z"), 3, {"busy": 0.5}, 0.93, 512 * 10**6, 2, {}),
        *({"samples": 12.34, "tokens": 1234.5}, 5, {"own": 20e9, "memory": 30e9, "total": 80e9}, "generation"),
    ),
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
    first, second, third, _, _, generation, reward, problem = printed.rstrip("\n").split("\n")
    assert first == "version 7 of 25 steps"
    assert second == "samples: 1,234 running  5 ready"
    assert third.split() == ["step", "7:", "reward", "0.700"]
    cells = ["generation0[0]", "50%", "-", "-", "-", "0.93", "0.512", "GB", "3", "2", "5", "(-2)", "12.34", "1,234"]
    assert generation.split() == [*cells, "20", "of", "80", "GB", "x;", "y", "and", "1", "more"]
    assert reward.split()[-1] == "down"
    assert problem.rstrip() == "reward0[0]: killed by SIGKILL"


def test_a_policy_that_acts_has_transitions_and_returns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0.0)
    metrics = LineFile(tmp_path / "metrics.jsonl")
    metrics.append({"step": 7, "reward/mean": 0.7, "acting/transitions": 64.0, "acting/return_last20": 12.5})
    metrics.close()
    assert main(["monitor", str(tmp_path), "--once"]) == 0
    printed = capsys.readouterr().out
    assert "step 7: return 12.5\n" in printed
    assert "transitions per s" in printed
    assert "token" not in printed


WIDE = WorkerStatus(
    *("environment10[0]", "a", "killed by SIGKILL; it is started again in 3.5 s, the fourth time in a minute, as its"),
    *(("generate for 12.0 s", "generate for 7.0 s"), 1234, dict.fromkeys(("busy", "starved", "blocked", "sync"), 1.0)),
    *(12.34, 512 * 10**9, 10, {}, {"samples": 1234.5, "tokens": 1234567.0}, 99_999),
    *({"own": 120e9, "memory": 130e9, "total": 141.4e9}, "environment"),
)
NUMBERS = {metric: -123.456 for metric, *_ in SHOWN}


@pytest.mark.parametrize("working", [WIDE, replace(WIDE, problem="")])
def test_no_line_is_longer_than_a_terminal_of_80_columns(working: WorkerStatus) -> None:
    samples = {stage: 1_234_567 for stage in ("running", "scoring", "ready", "training", "trained", "dropped")}
    status = RunStatus(1e9, 123_456, 250_000, samples, (working,), incarnation=1)
    console = Console(width=80, file=StringIO())
    console.print(view(status, {"step": 123_457, **NUMBERS}, 2e9, 80))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    wide = Console(width=1000, file=StringIO())
    wide.print(view(status, {"step": 123_457, **NUMBERS}, 2e9, 80))
    lines = wide.file.getvalue().count("\n")  # type: ignore[attr-defined]
    assert printed.count("\n") == lines, f"a line was wrapped:\n{printed}"
    for expected in (
        *("1,234,567 dropped", "gradient -1.2e+02", " 12.34 512 GB 1234 ", "since the run was resumed"),
        *("99999 (-23457) 1,234         1.235e+06    120 of 141 GB",),
    ):
        assert expected in printed


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ({"step": 8, "version": 7, "skipped/not finite": 1}, "step 8: trained nothing (not finite): it is tried again"),
        ({"step": 7, "reward/mean": 0.7}, "step 7: reward 0.700"),
        (
            {"step": 8, "incarnation": 1, "reward/mean": 0.7},
            "step 8 before the resume, to be trained again: reward 0.700",
        ),
        ({"step": 8, "incarnation": 2, "reward/mean": 0.7}, "step 8: reward 0.700"),
    ],
)
def test_the_last_step_is_shown_as_what_it_was(metrics: dict[str, float], says: str) -> None:
    console = Console(width=80, file=StringIO())
    console.print(view(RunStatus(1e9, 7, 25, {}, (), incarnation=2), metrics, 1e9, 80))
    assert says in console.file.getvalue()  # type: ignore[attr-defined]


def test_an_old_state_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 3600.0)
    assert main(["monitor", str(tmp_path), "--once"]) == 0
    assert "This state is 3600 s old: the run has ended" in capsys.readouterr().out


def test_a_paused_run_says_how_it_goes_on_and_an_old_state_of_one_that_it_is_old() -> None:
    status = RunStatus(1e9, 7, 25, {}, WORKERS, paused=True)
    for now, says in ((1e9 + 1, "The run is paused until `asyncrl unpause`"), (1e9 + 100, "the run has ended, or")):
        console = Console(width=80, file=StringIO())
        console.print(view(status, {}, now, 80))
        assert says in console.file.getvalue()  # type: ignore[attr-defined]


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
    assert "holds no run: name a run directory" in capsys.readouterr().err

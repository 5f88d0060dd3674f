"""A sink may hang, fail or be slow: no step waits for it."""

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config.problems import refuse
from asyncrl.errors import ConfigError
from asyncrl.telemetry.samples_file import SampleRecord
from asyncrl.telemetry.sinks import (
    CELL_CHARACTERS,
    CLOSE_DEADLINE,
    QUEUED_STEPS,
    TABLE_ROWS,
    SinkWorker,
    open_sinks,
    sink_problems,
)

SAMPLE = SampleRecord(
    step=1, incarnation=0, group=5, member=2, attempt=0, prompt="1+1?", text="two", finish="stop", tokens=4,
    reward=0.5, terms={"numeric": 0.5}, advantage=None, first=0, last=0, trained=4, masked=0,
)  # fmt: skip


class Notes:
    """A sink that keeps what it gets, behind a gate that a test opens."""

    def __init__(self, *, open_gate: bool = True, fails_at: int = -1) -> None:
        self.written: list[tuple[int, Mapping[str, float]]] = []
        self.closed = False
        self.gate = threading.Event()
        self._fails_at = fails_at
        if open_gate:
            self.gate.set()

    def write(self, step: int, metrics: Mapping[str, float], samples: Sequence[SampleRecord]) -> None:
        assert self.gate.wait(30)
        if step == self._fails_at:
            raise OSError("no network")
        self.written.append((step, metrics))

    def close(self) -> None:
        self.closed = True


def opened(notes: Notes) -> tuple[SinkWorker, list[str]]:
    """A worker for the sink, and what it says."""
    said: list[str] = []
    return SinkWorker("notes", lambda: notes, said.append), said


def test_everything_arrives_in_order_and_the_sink_is_closed() -> None:
    sink, said = opened(notes := Notes())
    for step in range(10):
        sink.write(step, {"reward/mean": 0.5, "name": "x", "none": None})
    sink.close()
    assert notes.written == [(step, {"reward/mean": 0.5}) for step in range(10)]
    assert notes.closed
    assert said == []


def test_a_sink_that_hangs_delays_nothing_and_is_left_out_with_one_warning() -> None:
    sink, said = opened(notes := Notes(open_gate=False))
    for step in range(10 * QUEUED_STEPS):
        sink.write(step, {})
    assert sink.left_out
    sink.close(deadline=3600)  # It waits for none of that, or this test would run into its own deadline.
    assert len(said) == 1
    assert f"{QUEUED_STEPS} steps behind" in said[0]
    notes.gate.set()


def test_a_sink_that_fails_is_left_out_with_one_warning() -> None:
    sink, said = opened(notes := Notes(fails_at=2))
    for step in range(10):
        sink.write(step, {})
    sink.close()
    assert [step for step, _ in notes.written] == [0, 1]
    assert said == ["the sink notes failed with OSError: no network: it is left out; metrics.jsonl has everything"]


def test_a_sink_that_cannot_be_opened_is_left_out() -> None:
    def fail() -> Notes:
        raise RuntimeError("not logged in")

    said: list[str] = []
    sink = SinkWorker("notes", fail, said.append)
    sink.close()
    assert "not logged in" in said[0]


def test_the_end_of_a_run_waits_for_a_sink_only_so_long() -> None:
    sink, said = opened(notes := Notes(open_gate=False))
    sink.write(1, {})
    sink.close(deadline=0.05)
    assert "did not close within 0.05 s" in said[0]
    assert len(said) == 1
    notes.gate.set()


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.telemetry.sinks.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"-m pip install .*\[wandb\]'$"):
        refuse(sink_problems(["wandb"]))


def test_the_close_deadline_leaves_room_in_the_ten_seconds_of_a_ctrl_c() -> None:
    assert CLOSE_DEADLINE <= 5


def test_scalars_come_back_from_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    said: list[str] = []
    (sink,) = open_sinks(["tensorboard"], tmp_path, "run", {}, said.append)
    sink.write(1, {"reward/mean": 0.25})
    sink.write(2, {"reward/mean": 0.5})
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert said == []


def test_an_offline_run_of_wandb_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    said: list[str] = []
    (sink,) = open_sinks(["wandb"], tmp_path, "run", {"seed": 1}, said.append)
    sink.write(1, {"reward/mean": 0.25}, [SAMPLE])
    sink.close(deadline=60)
    wandb.teardown()  # its own process serves all runs of this one
    assert said == []
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/samples_*.table.json")
    read = json.loads(table.read_text())
    row = dict(zip(read["columns"], read["data"][0], strict=True))
    assert (row["prompt"], row["text"], row["reward"], row["advantage"]) == ("1+1?", "two", 0.5, None)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Takes the place of wandb, and returns what it logs: tables as lists of rows, each a dict."""
    found: list[dict[str, Any]] = []

    def opened(given: dict[str, Any], run: Any) -> Any:
        run.given = given
        found.append({"given": given}) if given["tags"] else None
        return run

    def table(columns: list[str], data: list[list[Any]]) -> list[dict[str, Any]]:
        return [dict(zip(columns, row, strict=True)) for row in data]

    run = SimpleNamespace(log=found.append, define_metric=lambda *_, **__: None, finish=lambda: found.append({}))
    fake = SimpleNamespace(init=lambda **given: opened(given, run), Table=table)
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    return found


def test_wandb_gets_a_table_of_samples_a_minute_and_the_last_one(
    logged: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("asyncrl.telemetry.sinks.time", SimpleNamespace(monotonic=lambda: now))
    said: list[str] = []
    (sink,) = open_sinks(["wandb"], tmp_path, "run", {}, said.append)
    for step in range(1, 4):
        sink.write(step, {"reward/mean": 0.5}, [replace(SAMPLE, step=step)])
    sink.write(3, {"eval/reward/mean": 0.25})
    sink.close()
    assert said == []
    tables = [(line["step"], [row["step"] for row in line["samples"]]) for line in logged if "samples" in line]
    assert tables == [(1, [1]), (3, [3])]
    assert [line.get("reward/mean") for line in logged[:3]] == [0.5] * 3
    assert logged[-1] == {}, "the run is finished"


def test_a_table_is_bounded_and_an_episode_is_one_text(logged: list[dict[str, Any]], tmp_path: Path) -> None:
    turns = [{"role": "assistant", "content": "left"}, {"role": "user", "content": "wall"}]
    long = replace(SAMPLE, prompt="p" * (2 * CELL_CHARACTERS))
    (sink,) = open_sinks(["wandb"], tmp_path, "run", {}, print)
    sink.write(1, {}, [replace(SAMPLE, turns=turns), *[long] * (2 * TABLE_ROWS)])
    sink.close()
    rows = logged[0]["samples"]
    assert len(rows) == TABLE_ROWS
    assert rows[0]["text"] == "assistant: left\nuser: wall"
    assert len(rows[1]["prompt"]) == CELL_CHARACTERS + len(" ... ")
    assert json.loads(rows[1]["terms"]) == {"numeric": 0.5}


def test_project_and_tags_of_the_config_reach_wandb(
    logged: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "of-the-shell")
    telemetry = {"wandb_project": "sums", "wandb_tags": ["tiny", "second try"]}
    for settings in (telemetry, {"wandb_tags": ["tiny"]}):
        (sink,) = open_sinks(["wandb"], tmp_path, "run", {"telemetry": settings}, print)
        sink.close()
    first, second = [line["given"] for line in logged if "given" in line]
    assert (first["project"], first["tags"]) == ("sums", ["tiny", "second try"])
    assert second["project"] == "of-the-shell"

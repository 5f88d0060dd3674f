"""Slices and arrows that a report draws, read from files that the tracer itself wrote."""

import threading
from pathlib import Path
from typing import Any

import pytest

from asyncrl.deploy.report import worker_trace
from asyncrl.deploy.report.worker_trace import read_trace
from asyncrl.telemetry.trace import Tracer


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class TracedFleet:
    """A generator and a trainer that trace on one clock."""

    def __init__(self, logs: Path) -> None:
        self.clock = Clock()
        self.generator = Tracer(logs / "generation0.0-0-ab.trace.jsonl", "generation0.0", self.clock, self._since_1970)
        self.trainer = Tracer(logs / "training0.0-0-cd.trace.jsonl", "training0.0", self.clock, self._since_1970)

    def _since_1970(self) -> float:
        return 1e9 + self.clock.seconds

    def span(self, tracer: Tracer, name: str, seconds: float, flow: str = "", **args: Any) -> None:
        with tracer.span(name, **args):
            if flow and tracer is self.trainer:
                tracer.flow_end(flow)
            self.clock.seconds += seconds
            if flow and tracer is self.generator:
                tracer.flow_start(flow)

    def close(self) -> None:
        self.generator.close()
        self.trainer.close()


@pytest.fixture
def fleet(tmp_path: Path) -> TracedFleet:
    return TracedFleet(tmp_path)


def train(fleet: TracedFleet, step: int) -> None:
    fleet.span(fleet.generator, "generate", 1.0, f"sample {step}.0.0", group=step)
    fleet.span(fleet.trainer, "step", 2.0, f"sample {step}.0.0", rows=1)
    fleet.span(fleet.generator, "flip", 0.1, version=step + 1)


def test_an_arrow_leads_from_the_sample_to_its_step_and_from_the_step_to_its_version(
    fleet: TracedFleet, tmp_path: Path
) -> None:
    train(fleet, 0)
    fleet.close()
    trace = read_trace(tmp_path)
    assert [(each.worker, each.name) for each in trace.slices] == [
        ("generation0.0", "generate"),
        ("training0.0", "step"),
        ("generation0.0", "flip"),
    ]
    assert [round(each.end - each.begin, 3) for each in trace.slices] == [1.0, 2.0, 0.1]
    arrows = [(arrow.what, arrow.begin.name, arrow.end.name, arrow.end.version) for arrow in trace.arrows]
    assert arrows == [("samples", "generate", "step", None), ("weights", "step", "flip", 1)]
    assert trace.workers == ["generation0.0", "training0.0"]


def test_a_version_comes_from_the_step_that_had_ended_when_it_was_taken_over(
    fleet: TracedFleet, tmp_path: Path
) -> None:
    fleet.span(fleet.trainer, "step", 2.0, rows=1)
    begun = fleet.trainer.span("step", rows=2)
    begun.__enter__()
    fleet.span(fleet.generator, "flip", 0.1, version=1)
    fleet.clock.seconds += 1.0
    begun.__exit__(None, None, None)
    fleet.close()
    (arrow,) = read_trace(tmp_path).arrows
    assert round(arrow.begin.end - arrow.begin.begin, 3) == 2.0


def test_only_the_time_is_shown_of_which_every_file_is_read(
    fleet: TracedFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_trace, "TAIL", 3_000)
    for step in range(40):
        train(fleet, step)
    fleet.close()
    trace = read_trace(tmp_path)
    begins = {worker: min(each.begin for each in trace.slices if each.worker == worker) for worker in trace.workers}
    assert max(begins.values()) - min(begins.values()) < 4.0
    assert 4 <= len(trace.slices) < 60
    assert trace.slices[-1].version == 40
    assert len([arrow for arrow in trace.arrows if arrow.what == "samples"]) >= 2


def test_the_newest_slices_are_kept(fleet: TracedFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_trace, "MAX_SLICES", 6)
    monkeypatch.setattr(worker_trace, "MAX_ARROWS", 1)
    for step in range(10):
        train(fleet, step)
    fleet.close()
    trace = read_trace(tmp_path)
    assert [each.version for each in trace.slices if each.name == "flip"] == [9, 10]
    assert [arrow.what for arrow in trace.arrows] == ["samples", "weights", "weights"]


def test_calls_beside_too_many_others_are_counted(
    fleet: TracedFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_trace, "MAX_ROWS", 1)
    outer = fleet.generator.span("generate")
    outer.__enter__()
    fleet.generator.flow_start("sample 0.0.0")
    other = threading.Thread(target=fleet.span, args=(fleet.generator, "score", 1.0))
    other.start()
    other.join(10)
    outer.__exit__(None, None, None)
    fleet.close()
    trace = read_trace(tmp_path)
    assert len({each.row for each in trace.slices}) == 1
    assert trace.left_out == 1


def test_a_torn_line_and_a_folder_without_traces_are_no_errors(fleet: TracedFleet, tmp_path: Path) -> None:
    assert read_trace(tmp_path / "none").slices == []
    train(fleet, 0)
    fleet.close()
    with (tmp_path / "training0.0-0-cd.trace.jsonl").open("ab") as file:
        file.write(b'{"ph":"X","pid":1,"ti')
    assert len(read_trace(tmp_path).slices) == 3

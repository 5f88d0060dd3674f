"""Spans on disk, and all processes' spans in one file for Perfetto."""

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.telemetry import trace
from asyncrl.telemetry.trace import Tracer
from asyncrl.telemetry.trace_merge import merge

Event = dict[str, Any]


class Ticks:
    def __init__(self, time: float = 10.0) -> None:
        self.time = time

    def __call__(self) -> float:
        self.time += 0.001
        return self.time


def merged(run_dir: Path) -> list[Event]:
    with gzip.open(merge(run_dir), "rt") as file:
        content = json.load(file)
    events: list[Event] = content["traceEvents"]
    return events


def file_of(run_dir: Path, process: str) -> Path:
    return run_dir / "logs" / f"{process}.trace.jsonl"


def slices_by_track(events: list[Event]) -> dict[tuple[int, int], list[tuple[float, float]]]:
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    return tracks


def test_without_a_path_nothing_is_written(tmp_path: Path) -> None:
    tracer = Tracer(None, "nobody")
    with tracer.span("work"):
        tracer.flow_start("3/1")
        tracer.counter("queue", length=3)
    tracer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_flow_leads_from_the_slice_it_left_to_the_slice_it_enters(tmp_path: Path) -> None:
    now = Ticks()
    generation, training = (Tracer(file_of(tmp_path, name), name, now) for name in ("generation0.0", "training0.0"))
    with generation.span("sample", group=3):
        generation.flow_start("3/1")
    with training.span("step"):
        training.flow_end("3/1")
    for tracer in (generation, training):
        tracer.close()
    events = merged(tmp_path)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["generation0.0", "training0.0"]
    (start,) = (event for event in events if event["ph"] == "s")
    (end,) = (event for event in events if event["ph"] == "f")
    assert start["id"] == end["id"] == "3/1"
    assert start["name"] == end["name"]
    assert start["ts"] < end["ts"]
    for arrow, process, name in ((start, "generation0.0", "sample"), (end, "training0.0", "step")):
        assert names[arrow["pid"]] == process
        assert holder_of(events, arrow)["name"] == name


def holder_of(events: list[Event], arrow: Event) -> Event:
    (holder,) = (
        event
        for event in events
        if event["ph"] == "X"
        and (event["pid"], event["tid"]) == (arrow["pid"], arrow["tid"])
        and event["ts"] <= arrow["ts"] <= event["ts"] + event["dur"]
    )
    return holder


def test_an_arrow_outside_any_span_gets_a_slice_to_sit_in(tmp_path: Path) -> None:
    tracer = Tracer(file_of(tmp_path, "controller"), "controller", Ticks())
    tracer.flow_start("3/1", "sample 3/1")
    tracer.close()
    events = merged(tmp_path)
    (start,) = (event for event in events if event["ph"] == "s")
    assert holder_of(events, start)["name"] == "sample 3/1"


async def test_overlapping_spans_of_tasks_get_tracks_of_their_own(tmp_path: Path) -> None:
    tracer = Tracer(file_of(tmp_path, "controller"), "controller", Ticks())
    first_open, second_open = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        with tracer.span("first"):
            first_open.set()
            await second_open.wait()

    async def second() -> None:
        await first_open.wait()
        with tracer.span("second"), tracer.span("inside second"):
            second_open.set()
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(first())
        tasks.create_task(second())
    tracer.close()
    tracks = slices_by_track(merged(tmp_path))
    assert len(tracks) == 2
    for slices in tracks.values():
        for start, end in slices:
            assert not any(start < other < end < other_end for other, other_end in slices)


def test_the_torn_tail_of_a_killed_process_is_left_out(tmp_path: Path) -> None:
    path = file_of(tmp_path, "reward0.0")
    tracer = Tracer(path, "reward0.0", Ticks())
    with tracer.span("score"):
        pass
    tracer.close()
    path.write_text(path.read_text() + '{"span":2,"name":"sco')
    assert [event["name"] for event in merged(tmp_path) if event["ph"] == "X"] == ["score"]


def test_events_over_the_bound_are_counted_in_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_EVENTS", 3)
    tracer = Tracer(file_of(tmp_path, "reward0.0"), "reward0.0", Ticks())
    for _ in range(10):
        with tracer.span("score"):
            pass
    tracer.close()
    events = merged(tmp_path)
    assert sum(event["ph"] == "X" for event in events) == 2
    assert any("8 events left out" in str(event.get("args")) for event in events)


def test_a_full_buffer_is_written_without_close(tmp_path: Path) -> None:
    tracer = Tracer(file_of(tmp_path, "reward0.0"), "reward0.0", Ticks())
    for _ in range(trace.BUFFERED_EVENTS):
        tracer.counter("queue", length=1)
    assert len(file_of(tmp_path, "reward0.0").read_text().splitlines()) == trace.BUFFERED_EVENTS + 1


def test_an_empty_run_merges_to_an_empty_trace(tmp_path: Path) -> None:
    assert merged(tmp_path) == []

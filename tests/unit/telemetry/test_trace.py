"""Spans on disk, and all processes' spans in one file for Perfetto."""

import asyncio
import errno
import gzip
import json
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.telemetry import trace
from asyncrl.telemetry.state_clock import Occupancy, StateClock
from asyncrl.telemetry.trace import Tracer, merge_traces

Event = dict[str, Any]


class Ticks:
    def __init__(self, time: float = 10.0) -> None:
        self.time = time

    def __call__(self) -> float:
        self.time += 0.001
        return self.time


def merged(run_dir: Path) -> list[Event]:
    with gzip.open(merge_traces(run_dir), "rt") as file:
        content = json.load(file)
    events: list[Event] = content["traceEvents"]
    return events


def file_of(run_dir: Path, process: str) -> Path:
    return run_dir / "logs" / f"{process}.trace.jsonl"


@contextmanager
def traced(run_dir: Path, process: str = "reward0.0", now: Callable[[], float] | None = None) -> Iterator[Tracer]:
    """A tracer of a process, which is closed at the end of the block."""
    tracer = Tracer(file_of(run_dir, process), process, now or Ticks())
    yield tracer
    tracer.close()


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
    tracer.close()
    assert list(tmp_path.iterdir()) == []
    assert merged(tmp_path) == [], "an empty run merges to an empty trace"


def test_a_flow_leads_from_the_slice_it_left_to_the_slice_it_enters(tmp_path: Path) -> None:
    now = Ticks()
    with traced(tmp_path, "generation0.0", now) as tracer, tracer.span("sample", group=3):
        tracer.flow_start("3/1")
    with traced(tmp_path, "training0.0", now) as tracer, tracer.span("step"):
        tracer.flow_end("3/1")
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
    with traced(tmp_path, "controller") as tracer:
        tracer.flow_start("sample 3/1")
    events = merged(tmp_path)
    (start,) = (event for event in events if event["ph"] == "s")
    assert holder_of(events, start)["name"] == "sample 3/1"


def names_of_tracks(events: list[Event]) -> dict[int, str]:
    return {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}


def names_by_track(events: list[Event]) -> dict[str, list[str]]:
    tracks = names_of_tracks(events)
    found: dict[str, list[str]] = {name: [] for name in tracks.values()}
    for event in events:
        if event["ph"] == "X":
            found[tracks[event["tid"]]].append(event["name"])
    return found


async def test_calls_at_a_time_get_lanes_that_later_ones_take_again(tmp_path: Path) -> None:
    tracer = Tracer(file_of(tmp_path, "reward0.0"), "reward0.0", Ticks())
    for name in ("first", "second"):
        with tracer.span(name), tracer.span(f"inside {name}"):
            async with asyncio.TaskGroup() as tasks:
                for number in range(2):
                    tasks.create_task(beside(tracer, f"{name}, part {number}", asyncio.Barrier(1)))
    meeting = asyncio.Barrier(3)
    async with asyncio.TaskGroup() as tasks:
        for number in range(3):
            tasks.create_task(beside(tracer, f"at a time {number}", meeting))
    tracer.close()
    parts = [f"{name}, part {number}" for name in ("first", "second") for number in range(2)]
    assert names_by_track(merged(tmp_path)) == {
        "calls 1": ["inside first", "first", "inside second", "second", "at a time 0"],
        "calls 2": [*parts, "at a time 1"],
        "calls 3": ["at a time 2"],
    }


async def beside(tracer: Tracer, name: str, meeting: asyncio.Barrier) -> None:
    with tracer.span(name):
        await meeting.wait()


async def test_a_call_within_the_time_of_another_is_not_drawn_as_its_part(tmp_path: Path) -> None:
    tracer = Tracer(file_of(tmp_path, "reward0.0"), "reward0.0", Ticks())
    longer_runs = asyncio.Event()
    shorter_is_over = asyncio.Event()

    async def longer() -> None:
        with tracer.span("longer"):
            longer_runs.set()
            await shorter_is_over.wait()

    async def shorter() -> None:
        await longer_runs.wait()
        with tracer.span("shorter"):
            pass
        shorter_is_over.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(longer())
        tasks.create_task(shorter())
    tracer.close()
    assert names_by_track(merged(tmp_path)) == {"calls 1": ["longer"], "calls 2": ["shorter"]}


async def test_the_compute_thread_has_its_name(tmp_path: Path) -> None:
    compute = ThreadCompute(Occupancy(StateClock(Ticks())))
    with traced(tmp_path, now=time.monotonic) as tracer:

        def work() -> None:
            with tracer.span("update"):
                pass

        with tracer.span("step"):
            await compute.run(work)
    compute.close()
    assert names_by_track(merged(tmp_path)) == {"calls 1": ["step"], "compute": ["update"]}


async def test_an_arrow_of_a_task_that_outlives_its_call_leaves_from_where_it_is(tmp_path: Path) -> None:
    tracer = Tracer(file_of(tmp_path, "generation0.0"), "generation0.0", Ticks())
    over = asyncio.Event()

    async def later() -> None:
        await over.wait()
        tracer.flow_start("sample 3/1")

    async with asyncio.TaskGroup() as tasks:
        with tracer.span("started"):
            tasks.create_task(later())
        over.set()
    tracer.close()
    events = merged(tmp_path)
    (start,) = (event for event in events if event["ph"] == "s")
    assert holder_of(events, start)["name"] == "sample 3/1"


Call = tuple[int, int, int]
calls = st.tuples(st.integers(0, 50), st.integers(2, 20), st.integers(0, 2))


@given(st.lists(calls, min_size=1, max_size=30))
def test_lanes_are_as_few_as_calls_at_a_time_and_well_nested(made: list[Call]) -> None:
    """Calls (begin, length, how many spans lie in each other inside), in milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        play(Path(folder), made)
        events = merged(Path(folder))
    at_a_time = max(sum(begin <= now < begin + length for begin, length, _ in made) for now, _, _ in made)
    assert len(names_of_tracks(events)) == at_a_time
    assert sum(event["ph"] == "X" for event in events) == sum(1 + inside for _, _, inside in made)
    for slices in slices_by_track(events).values():
        for start, end in slices:
            assert not any(start < other - 1 < other + 1 < end < other_end - 1 for other, other_end in slices)


def play(folder: Path, made: list[Call]) -> None:
    """Each call in a context of its own, as each has a task of its own. What ends makes room for what begins then."""
    ticks = Ticks(0.0)
    tracer = Tracer(file_of(folder, "reward0.0"), "reward0.0", lambda: ticks.time)
    contexts = [copy_context() for _ in made]
    spans = [[tracer.span("call") for _ in range(1 + inside)] for _, _, inside in made]
    begins = [(begin, 1, number) for number, (begin, _, _) in enumerate(made)]
    ends = [(begin + length, 0, number) for number, (begin, length, _) in enumerate(made)]
    for ticks.time, begin, number in sorted(begins + ends):
        for span in spans[number] if begin else reversed(spans[number]):
            contexts[number].run(span.__enter__ if begin else partial(span.__exit__, None, None, None))
    tracer.close()


def test_the_torn_tail_of_a_killed_process_is_left_out(tmp_path: Path) -> None:
    path = file_of(tmp_path, "reward0.0")
    with traced(tmp_path) as tracer, tracer.span("score"):
        pass
    path.write_text(path.read_text() + '{"ph":"X","name":"sco')
    assert [event["name"] for event in merged(tmp_path) if event["ph"] == "X"] == ["score"]


def test_events_over_the_bound_are_counted_in_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_EVENTS", 3)
    with traced(tmp_path) as tracer:
        for _ in range(10):
            with tracer.span("score"):
                pass
    events = merged(tmp_path)
    assert sum(event["ph"] == "X" for event in events) == 3
    assert any("7 events left out" in str(event.get("args")) for event in events)


def test_a_full_buffer_is_written_without_close(tmp_path: Path) -> None:
    tracer = Tracer(file_of(tmp_path, "reward0.0"), "reward0.0", Ticks())
    for _ in range(trace.BUFFERED_EVENTS):
        with tracer.span("score"):
            pass
    assert len(file_of(tmp_path, "reward0.0").read_text().splitlines()) == trace.BUFFERED_EVENTS + 1


def test_a_full_disk_costs_events_and_no_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file_of(tmp_path, "a")
    tracer = Tracer(path, "a", Ticks())
    with tracer.span("before"):
        pass
    tracer.flush()

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(trace, "_append", full)
        for _ in range(3):
            with tracer.span("lost"):
                pass
        tracer.flush()
    with tracer.span("after"):
        pass
    tracer.close()
    names = [event["name"] for event in merged(tmp_path) if event["ph"] == "X"]
    assert names == ["before", "after"]
    assert any("3 events left out" in str(event.get("args")) for event in merged(tmp_path))


def test_nothing_is_left_of_events_of_which_a_part_fits(tmp_path: Path) -> None:
    path = tmp_path / "x.trace.jsonl"
    path.write_bytes(b"whole\n")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limit[1]))
        with pytest.raises(OSError, match="only a part of 8 bytes"):
            trace._append(path, b"tooLong\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert path.read_bytes() == b"whole\n"


def test_work_of_a_kind_has_a_track_of_its_own_and_numbers_are_curves(tmp_path: Path) -> None:
    tracer = Tracer(file_of(tmp_path, "generation0.0"), "generation0.0", now=Ticks(), since_1970=Ticks(1000.0))
    with tracer.span("step"), tracer.lane("forward"):
        pass
    with tracer.lane("forward", tokens=3):
        tracer.count("samples", running=4, waiting=2)
    tracer.close()
    events = merged(tmp_path)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    lanes = [names[event["tid"]] for event in events if event["ph"] == "X" and event["name"] == "forward"]
    assert lanes == ["forward", "forward"]
    assert next(names[event["tid"]] for event in events if event["name"] == "step") != "forward"
    (numbers,) = [event for event in events if event["ph"] == "C"]
    assert (numbers["name"], numbers["args"]) == ("samples", {"running": 4, "waiting": 2})
    Tracer(None, "nobody").count("samples", running=1)

"""Profiles of the compute thread: torch's own profiler in slices, and what is made of its events."""

import asyncio
import gzip
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import torch

from asyncrl.errors import Refused
from asyncrl.fleet.worker import compute_thread
from asyncrl.fleet.worker.compute_thread import ThreadCompute, TraceBook, own_times, record_profile
from asyncrl.telemetry.state_clock import Occupancy, StateClock


def multiply() -> None:
    torch.ones(8, 8) @ torch.ones(8, 8)


@asynccontextmanager
async def multiplying() -> AsyncIterator[ThreadCompute]:
    """A compute thread that multiplies matrices all the time."""
    compute = ThreadCompute(Occupancy(StateClock(time.monotonic)))

    async def work() -> None:
        while True:
            await compute.run(multiply)

    working = asyncio.create_task(work())
    yield compute
    working.cancel()
    with suppress(asyncio.CancelledError):
        await working
    compute.close()


def events_of(trace: bytes) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(trace))["traceEvents"]


async def test_the_operators_of_the_compute_thread_are_recorded() -> None:
    async with multiplying() as compute:
        found = await record_profile(compute, 0.8)
    names = {name: calls for name, calls, _ in found.operators}
    assert names["aten::mm"] > 3
    assert found.kernels == []
    assert 0.1 < found.recorded < 3.0
    events = events_of(found.trace)
    multiplied = [event for event in events if event["name"] == "aten::mm"]
    assert len(multiplied) == names["aten::mm"]
    assert len({event["tid"] for event in multiplied}) == 1
    assert any(event["ph"] == "M" for event in events)
    assert [own for _, _, own in found.operators] == sorted((own for _, _, own in found.operators), reverse=True)


LEAN = """
import asyncio, sys, time
from asyncrl.engines.models.lean_imports import import_less
import_less()
import torch
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.fleet.worker.compute_thread import record_profile
from asyncrl.telemetry.state_clock import Occupancy, StateClock

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())

def step() -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()

async def main() -> None:
    compute = ThreadCompute(Occupancy(StateClock(time.monotonic)))
    recording = asyncio.create_task(record_profile(compute, 0.3))
    while not recording.done():
        await compute.run(step)
    assert any("AdamW" in name or "aten::" in name for name, _, _ in recording.result().operators)
    await compute.run(step)
    compute.close()

asyncio.run(main())
assert type(sys.modules["torch._dynamo"]).__name__ == "_Deferred", "the compiler is not imported"
"""


def test_a_trainer_that_leaves_the_compiler_out_trains_on() -> None:
    done = subprocess.run([sys.executable, "-c", LEAN], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


async def test_a_trace_ends_at_its_bound_and_covers_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_thread, "MAX_EVENTS", 40)
    monkeypatch.setattr(compute_thread, "SLICE", 0.01)
    async with multiplying() as compute:
        began = time.monotonic()
        found = await record_profile(compute, 1.0)
        assert time.monotonic() - began > 0.9, "pauses spread what fits"
    assert sum(event["ph"] == "X" for event in events_of(found.trace)) <= 40


async def test_one_profile_at_a_time_and_one_that_is_given_up_ends() -> None:
    async with multiplying() as compute:
        first = asyncio.create_task(record_profile(compute, 60.0))
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="another profile is recorded in this process"):
            await record_profile(compute, 1.0)
        await compute.run(multiply)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert (await record_profile(compute, 0.3)).operators, "torch's profiler was stopped"


def event(name: str, ts: float, dur: float, tid: int = 1, cat: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": {"a": 1}}


def test_own_time_is_without_that_of_events_inside() -> None:
    events = [
        *(event("inner", 10, 20), event("outer", 0, 100), event("inner", 40, 10), event("innermost", 12, 5)),
        *(event("elsewhere", 0, 30, tid=2), event("later", 100, 7), event("gemm", 5, 9, tid=7, cat="kernel")),
    ]
    totals: dict[tuple[str, bool], float] = {}
    for name, on_gpu, own in own_times(events):
        totals[name, on_gpu] = totals.get((name, on_gpu), 0.0) + own
    assert {key: round(1e6 * own) for key, own in totals.items()} == {
        ("outer", False): 70,
        ("inner", False): 25,
        ("innermost", False): 5,
        ("elsewhere", False): 30,
        ("later", False): 7,
        ("gemm", True): 9,
    }


def test_events_of_slices_are_joined_and_flows_left_out() -> None:
    trace = TraceBook()
    name = {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "ts": 5.0, "args": {"name": "compute"}}
    whole = {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": 0, "ts": 0, "dur": 5e5}
    flow = {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": 1, "pid": 1, "tid": 1, "ts": 0}
    trace.add([name, whole, flow, event("a", 0, 10)])
    trace.add([name | {"ts": 9.0}, whole, event("a", 20, 10), event("gemm", 0, 3, cat="kernel")])
    found = trace.profile()
    assert [each["name"] for each in events_of(found.trace)] == ["thread_name", "a", "a", "gemm"]
    assert (found.recorded, found.operators, found.kernels) == (1.0, [("a", 2, 2e-05)], [("gemm", 1, 3e-06)])


def test_a_trace_without_events_is_whole() -> None:
    assert events_of(TraceBook().profile().trace) == []

"""The states that `asyncrl monitor` shows."""

import asyncio
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.controller.gate.group_state import Stage
from asyncrl.controller.observers import progress
from asyncrl.controller.observers.progress import StatusWriter
from asyncrl.fleet.health import HealthAnswer
from asyncrl.protocols.messages import Health
from asyncrl.telemetry.run_status import RunStatus, read_status, write_status


class Poller:
    """One worker of generation, which can die."""

    def __init__(self) -> None:
        self.worker = SimpleNamespace(name="generation0[0]", service="generation", instance="a", alive=True, status="")
        self.workers = (self.worker,)
        self.newest: dict[str, HealthAnswer] = {}

    async def poll(self) -> list[Health]:
        if self.worker.alive:
            health = Health(
                *("generation", 0, 0, self.worker.instance, ("generate",), 2, {"busy": 1.0}, 2.0, {"tokens": 6.0}),
                *(0.5, 5, 3, {"memory": 7.0}),
            )
            self.newest[self.worker.name] = HealthAnswer(health, 0.0)
        return []


def writer_of(path: Path, poller: Poller) -> StatusWriter:
    gate: Any = SimpleNamespace(counts=Counter({Stage.RUNNING: 3, Stage.TRAINED: 10}), version=4)
    journal: Any = SimpleNamespace(
        ledger=SimpleNamespace(trained=90, dropped=Counter({"stale": 2, "poison": 3}), incarnation=1)
    )
    return StatusWriter(path, gate, journal, poller, 25, now=lambda: 100.0)  # type: ignore[arg-type]


async def written(writer: StatusWriter) -> RunStatus:
    await writer.write()
    status = read_status(writer.path)
    assert status is not None
    return status


async def test_a_worker_that_dies_is_shown_with_its_reason_and_its_next_start(tmp_path: Path) -> None:
    poller = Poller()
    writer = writer_of(tmp_path / "status.json", poller)
    status = await written(writer)
    assert (status.written_at, status.version, status.steps, status.incarnation) == (100.0, 4, 25, 1)
    assert status.samples == {"running": 3, "trained": 90, "dropped": 5}, "those before the resume too"
    assert not status.paused
    assert replace(writer, is_paused=lambda: True).status().paused
    (worker,) = status.workers
    assert (worker.problem, worker.shares, worker.memory, worker.queued, worker.starts) == ("", {"busy": 0.5}, 5, 2, 1)
    assert (worker.service, worker.version, worker.gpu) == ("generation", 3, {"memory": 7.0})
    assert (worker.rates, worker.counters) == ({"tokens": 3.0}, {"tokens": 6.0})
    poller.worker.alive = False
    poller.worker.status = "killed by SIGKILL; starts again"
    (worker,) = (await written(writer)).workers
    assert (worker.problem, worker.starts) == ("killed by SIGKILL; starts again", 1)
    poller.worker.alive = True
    poller.worker.instance = "b"
    (worker,) = (await written(writer)).workers
    assert (worker.problem, worker.instance, worker.starts) == ("", "b", 2)


async def test_the_last_state_says_that_the_run_has_ended(tmp_path: Path) -> None:
    writer = writer_of(tmp_path / "status.json", Poller())
    running = asyncio.create_task(writer.run())
    async with asyncio.timeout(60):
        while not (status := read_status(writer.path)):
            await asyncio.to_thread(writer.path.exists)
    assert not status.ended
    running.cancel()
    await asyncio.wait([running])
    last = read_status(writer.path)
    assert last is not None
    assert last.ended


async def test_a_state_that_is_written_late_does_not_replace_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()
    go_on = threading.Event()
    loop = asyncio.get_running_loop()

    def slow(path: Path, status: RunStatus) -> None:
        if not status.ended:
            loop.call_soon_threadsafe(begun.set)
            assert go_on.wait(10)
        write_status(path, status)

    monkeypatch.setattr(progress, "write_status", slow)
    writer = writer_of(tmp_path / "status.json", Poller())
    running = asyncio.create_task(writer.run())
    async with asyncio.timeout(60):
        await begun.wait()
        running.cancel()
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.wait([running])
        await asyncio.to_thread(writer.path.exists)
    last = read_status(writer.path)
    assert last is not None
    assert last.ended


async def test_a_state_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    await writer_of(tmp_path / "gone" / "status.json", Poller()).write()

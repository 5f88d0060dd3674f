"""Checks a trainer's rank that samples too: the engine's memory is free in a step, and weights follow each step."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import LostRows
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.lanes.weights.handover import WeightHandover
from tests.unit.services import counting
from tests.unit.services.counting import CountingService, context_maker, cuts


class NotedHandover(WeightHandover):
    """Notes what a service does with it, beside the passes of its steps. noted: "free", "pass" and offered weights."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[object] = []

    async def offer(self, version: int, tensors: Any) -> None:
        self.noted.append((version, float(tensors["w"])))
        await super().offer(version, tensors)

    async def put_away(self) -> None:
        self.noted.append("free")
        await super().put_away()


async def test_memory_is_free_while_a_step_computes_and_weights_follow_it(
    tmp_path: Path, worker_context: Callable[..., WorkerContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    handover = NotedHandover()
    advance = counting.CountingRun.advance

    def noted(run: counting.CountingRun) -> bool:
        handover.noted.append("pass")
        return advance(run)

    monkeypatch.setattr(counting.CountingRun, "advance", noted)
    async with asyncio.TaskGroup() as tasks:
        service = CountingService(context_maker(worker_context)(tasks, tmp_path, handover=handover))
        await service.start()
        assert handover.noted == [(0, 0.0)]
        await service.step(cuts(service, 0, 4, 7))
        assert handover.noted[1:] == ["free", "pass", "pass", "pass", (1, 2.0)]

        handover.noted.clear()
        assert (await service.step(cuts(service, 1, 5, advantage=math.inf))).skipped
        assert handover.noted == ["free", "pass", "pass", "pass", (1, 2.0)], "the engine gets its weights back"

        handover.noted.clear()
        batch = cuts(service, 1, 6)
        service.context.open_rows(0, 0).free([batch.batch.rows[0].places[0]])
        with pytest.raises(LostRows):
            await service.step(batch)
        assert handover.noted == [], "no step began"
        await service.stop()

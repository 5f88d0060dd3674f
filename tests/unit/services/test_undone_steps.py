"""A trainer whose run ends in the middle of a step: the state of its version is copied, whatever the step computes."""

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from asyncrl.errors import LostRows, Refused
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.protocols.service_contracts import ENDED, RUNNING, UNDONE
from tests.unit.services.counting import (
    INCARNATION,
    CountingRun,
    CountingService,
    cuts,
    saved,
    served,
    waiting_for_samples,
)

Serving = Callable[..., AbstractAsyncContextManager[CountingService]]
Patch = pytest.MonkeyPatch


@pytest.fixture
def serving(worker_context: Callable[..., WorkerContext]) -> Serving:
    return partial(served, worker_context)


async def saved_weight(service: CountingService, folder: Path, version: int) -> float:
    async with asyncio.timeout(60):
        made = await saved(service, folder, version)
    assert made.version == version
    return float(json.loads((folder / "state").read_text())["weight"])


def block_in_pass(number: int, patch: Patch) -> tuple[asyncio.Event, threading.Event]:
    """Has each step stop in this pass until the second event is set. Returns what is set then, and that."""
    advance = CountingRun.advance
    loop = asyncio.get_running_loop()
    reached = asyncio.Event()
    goes_on = threading.Event()

    def advance_or_wait(run: CountingRun) -> bool:
        if run.passes + 1 == number:
            loop.call_soon_threadsafe(reached.set)
            assert goes_on.wait(60)
        return advance(run)

    patch.setattr(CountingRun, "advance", advance_or_wait)
    return reached, goes_on


@pytest.mark.parametrize("number", [1, 2])
async def test_a_pass_of_a_minute_holds_up_no_checkpoint(
    tmp_path: Path, serving: Serving, monkeypatch: Patch, number: int
) -> None:
    async with serving(tmp_path, make_compute=ThreadCompute) as service:
        await service.step(cuts(service, 0, 1))
        reached, goes_on = block_in_pass(number, monkeypatch)
        step = asyncio.ensure_future(service.step(cuts(service, 1, 2)))
        await reached.wait()
        assert await service.undo_step(INCARNATION, 1) == [UNDONE]
        assert await service.undo_step(INCARNATION, 1) == [UNDONE], "the call may be repeated"
        step.cancel()
        with suppress(asyncio.CancelledError):
            await step
        assert await saved_weight(service, tmp_path / "tmp-1", 1) == 1.0
        assert not goes_on.is_set()
        goes_on.set()
        with pytest.raises(Refused, match="the run ends, and its last checkpoint is of there"):
            await service.step(cuts(service, 1, 3))


async def test_random_numbers_that_an_undone_step_drew_are_drawn_again(
    tmp_path: Path, serving: Serving, monkeypatch: Patch
) -> None:
    copies: list[dict[str, torch.Tensor]] = []
    async with serving(tmp_path, make_compute=ThreadCompute) as service:
        before = torch.get_rng_state()
        reached, goes_on = block_in_pass(2, monkeypatch)
        step = asyncio.ensure_future(service.step(cuts(service, 0, 1)))
        await reached.wait()
        torch.rand(3)
        await service.undo_step(INCARNATION, 0)
        step.cancel()
        await service.copy_state(INCARNATION, 0)
        assert service._copy is not None
        assert service._copy.copy is not None
        copies.append(dict(service._copy.copy.state))
        goes_on.set()
    assert torch.equal(copies[0]["rng"], before)


async def test_a_step_that_has_changed_the_weights_is_finished(
    tmp_path: Path, serving: Serving, monkeypatch: Patch
) -> None:
    async with serving(tmp_path, make_compute=ThreadCompute) as service:
        reached, goes_on = block_in_pass(3, monkeypatch)
        step = asyncio.ensure_future(service.step(cuts(service, 0, 1)))
        await reached.wait()
        assert await service.undo_step(INCARNATION, 0) == [RUNNING]
        goes_on.set()
        assert (await step).version == 1
        assert await service.undo_step(INCARNATION, 0) == [ENDED]
        assert await saved_weight(service, tmp_path / "tmp-1", 1) == 1.0


async def test_between_two_steps_no_further_one_begins(tmp_path: Path, serving: Serving) -> None:
    async with serving(tmp_path) as service:
        await service.step(cuts(service, 0, 1))
        assert await service.undo_step(INCARNATION, 1) == [UNDONE]
        with pytest.raises(Refused, match=r"cannot train from version 1 .*: the run ends"):
            await service.step(cuts(service, 1, 2))
        assert await saved_weight(service, tmp_path / "tmp-1", 1) == 1.0


async def test_a_step_that_still_reads_its_rows_changes_nothing(
    tmp_path: Path, serving: Serving, monkeypatch: Patch
) -> None:
    read = CountingService.read_rows
    reached = asyncio.Event()
    goes_on = asyncio.Event()

    async def read_late(service: CountingService, samples: object) -> object:
        reached.set()
        await goes_on.wait()
        return await read(service, samples)

    monkeypatch.setattr(CountingService, "read_rows", read_late)
    monkeypatch.setattr(CountingRun, "forgo_updates", lambda run: False)
    async with serving(tmp_path) as service:
        step = asyncio.ensure_future(service.step(cuts(service, 0, 1)))
        await reached.wait()
        assert await service.undo_step(INCARNATION, 0) == [UNDONE]
        goes_on.set()
        with pytest.raises(LostRows, match="the run ends"):
            await step
        assert await saved_weight(service, tmp_path / "tmp-0", 0) == 0.0


async def test_a_step_that_waits_for_samples_learns_that_it_is_undone(
    tmp_path: Path, serving: Serving, monkeypatch: Patch
) -> None:
    waits = waiting_for_samples(monkeypatch)
    async with serving(tmp_path) as service:
        step = asyncio.ensure_future(service.step(cuts(service, 0, 1)))
        await waits.wait()
        assert await service.undo_step(INCARNATION, 0) == [UNDONE]
        assert service._step is not None
        await asyncio.wait([service._step.work])
        step.cancel()
        assert await saved_weight(service, tmp_path / "tmp-0", 0) == 0.0


async def test_a_state_that_cannot_be_copied_beside_a_pass_waits_for_its_end(
    tmp_path: Path, serving: Serving, monkeypatch: Patch
) -> None:
    async with serving(tmp_path, make_compute=ThreadCompute) as service:
        monkeypatch.setattr(type(service._engine), "copy_beside_pass", lambda engine, facts: None)
        reached, goes_on = block_in_pass(1, monkeypatch)
        step = asyncio.ensure_future(service.step(cuts(service, 0, 1)))
        await reached.wait()
        assert await service.undo_step(INCARNATION, 0) == [UNDONE]
        step.cancel()
        copying = asyncio.ensure_future(saved_weight(service, tmp_path / "tmp-0", 0))
        done, _ = await asyncio.wait([copying], timeout=0.1)
        assert not done
        goes_on.set()
        assert await copying == 0.0

"""A rank whose exchange fails in the middle of a step: it gives the state of its version, or says that it does not hold
it any more."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from asyncrl.errors import PeerLost, Refused
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.services.ranks import running_step
from tests.unit.services.counting import (
    INCARNATION,
    CountingRun,
    CountingService,
    cuts,
    published_weight,
    saved,
    served,
    waiting_for_samples,
)

BEFORE_THE_UPDATE, AFTER_THE_UPDATE = 2, 3
Patch = pytest.MonkeyPatch
Serving = Callable[..., AbstractAsyncContextManager[CountingService]]


@pytest.fixture
def serving(worker_context: Callable[..., WorkerContext]) -> Serving:
    return partial(served, worker_context)


def lose_rank_in_pass(number: int, patch: Patch) -> asyncio.Event:
    """Has the other rank die in this pass of every step. Returns what is set then."""
    advance, lost = CountingRun.advance, asyncio.Event()

    def advance_or_lose(run: CountingRun) -> bool:
        if run.passes + 1 == number:
            lost.set()
            raise PeerLost("the 2 training ranks could not exchange")
        return advance(run)

    patch.setattr(CountingRun, "advance", advance_or_lose)
    return lost


async def test_a_rank_that_took_no_update_gives_the_state_before_the_step_and_trains_no_more(
    tmp_path: Path, serving: Serving, monkeypatch: Patch
) -> None:
    async with serving(tmp_path) as service:
        await service.step(cuts(service, 0, 1))
        lost = lose_rank_in_pass(BEFORE_THE_UPDATE, monkeypatch)
        step = asyncio.ensure_future(service.step(cuts(service, 1, 2)))
        await lost.wait()
        await service.leave_ranks(INCARNATION, 1)
        with pytest.raises(PeerLost, match="could not exchange"):
            await step
        with pytest.raises(Refused, match="version 1 of incarnation 3: the trainer has lost other ranks"):
            await service.step(cuts(service, 1, 2))
        made = await saved(service, tmp_path / "tmp-1", 1)
        state = json.loads((tmp_path / "tmp-1" / "state").read_text())
        assert (made.version, state["weight"], state["extra"]["version"]) == (1, 1.0, 1)


async def test_a_rank_that_took_an_update_holds_no_version(
    tmp_path: Path, serving: Serving, monkeypatch: Patch
) -> None:
    async with serving(tmp_path) as service:
        lost = lose_rank_in_pass(AFTER_THE_UPDATE, monkeypatch)
        step = asyncio.ensure_future(service.step(cuts(service, 0, 1)))
        await lost.wait()
        for version in (0, 1):
            with pytest.raises(Refused, match=f"version {version} .* is not held: the trainer is at version 0"):
                await service.leave_ranks(INCARNATION, version)
        with pytest.raises(PeerLost):
            await step


async def test_a_rank_gives_its_version_between_two_steps_and_no_other_one(tmp_path: Path, serving: Serving) -> None:
    async with serving(tmp_path) as service:
        await service.step(cuts(service, 0, 1))
        with pytest.raises(Refused, match="version 0 of incarnation 3 is not held"):
            await service.leave_ranks(INCARNATION, 0)
        await service.leave_ranks(INCARNATION, 1)
        assert (await saved(service, tmp_path / "tmp-1", 1)).version == 1


async def test_a_rank_that_nobody_asks_for_its_state_ends(tmp_path: Path, serving: Serving, monkeypatch: Patch) -> None:
    monkeypatch.setattr(running_step, "KEPT_STATE", 0.0)
    lose_rank_in_pass(BEFORE_THE_UPDATE, monkeypatch)
    with pytest.RaisesGroup(PeerLost):
        async with serving(tmp_path) as service:
            await service.step(cuts(service, 0, 1))


async def test_a_step_that_waits_for_samples_ends_with_them_untrained(
    tmp_path: Path, serving: Serving, monkeypatch: Patch
) -> None:
    waits = waiting_for_samples(monkeypatch)
    async with serving(tmp_path) as service:
        step = asyncio.ensure_future(service.step(cuts(service, 0, 1)))
        await waits.wait()
        await service.leave_ranks(INCARNATION, 0)
        with pytest.raises(PeerLost, match="waited for samples when another rank was lost"):
            await step
        assert (await saved(service, tmp_path / "tmp-0", 0)).version == 0


async def test_a_rank_that_has_left_goes_on_from_the_checkpoint_in_the_next_incarnation(
    tmp_path: Path, serving: Serving
) -> None:
    async with serving(tmp_path) as service:
        facts, folder = service.context.facts, tmp_path / "tmp-1"
        await service.step(cuts(service, 0, 1))
        with pytest.raises(Refused, match="has not left its ranks"):
            await service.renew(facts.renewed(INCARNATION + 1, folder))
        await service.leave_ranks(INCARNATION, 1)
        await saved(service, folder, 1)
        await service.renew(facts.renewed(INCARNATION + 1, folder))
        await service.started()
        published = await service.published()
        assert (published.incarnation, published.version) == (INCARNATION + 1, 1)
        assert await published_weight(service) == 1.0
        report = await service.step(replace(cuts(service, 1, 2), incarnation=INCARNATION + 1))
        assert (report.version, await published_weight(service)) == (2, 2.0)
        with pytest.raises(Refused, match="no copy of version 1"):
            await service.checkpoint(str(folder), INCARNATION + 1, 1)

"""The training service around an engine of a few lines: compare-and-set, chain, leases, cancellation, checkpoints."""

import asyncio
import errno
import json
import math
import os
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.schema import Config
from asyncrl.config.sections.training_config import WeightsConfig
from asyncrl.engines.ranks.rank_mesh import RankMesh
from asyncrl.errors import ConfigError, DeadlineExceeded, LostRows, PeerLost, Refused
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.lanes.data import row_reader
from asyncrl.lanes.weights.handover import WeightHandover
from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.hash_chain import GENESIS, chain
from asyncrl.protocols.messages import Canary
from asyncrl.protocols.service_contracts import ENDED, RUNNING, UNDONE
from asyncrl.services import training
from asyncrl.services.training import TrainingService
from tests.unit.services.counting import (
    INCARNATION,
    CountedCopy,
    CountingEngine,
    CountingRun,
    CountingService,
    config,
    cuts,
    published_weight,
    saved,
    served,
    waiting_for_samples,
)
from tests.virtual_time import on_virtual_time

Serving = Callable[..., AbstractAsyncContextManager[CountingService]]


@pytest.fixture
def serving(worker_context: Callable[..., WorkerContext], tmp_path: Path) -> Serving:
    return partial(served, worker_context, tmp_path)


async def test_version_zero_lies_in_the_arena_before_the_first_step(serving: Serving) -> None:
    async with serving() as service:
        assert ((await service.published()).incarnation, (await service.published()).version) == (INCARNATION, 0)
        assert await published_weight(service) == 0.0


async def test_two_runs_with_one_folder_of_weights_have_their_own_files(tmp_path: Path, serving: Serving) -> None:
    weights = WeightsConfig(transport="file", folder=str(tmp_path / "both"))
    settings = config().model_copy(update={"weights": weights})
    async with (
        serving(config=settings, run="cafe0001") as one,
        serving(config=settings, run="cafe0002") as other,
    ):
        folders = {(await service.published()).arena for service in (one, other)}
    assert folders == {f"file://{tmp_path}/both/{run}" for run in ("cafe0001", "cafe0002")}


@pytest.mark.trap("engines_disagree")
async def test_each_version_has_a_canary_of_its_own_weights(serving: Serving) -> None:
    async with serving() as service:
        first = (await service.published()).canary
        await service.step(cuts(service, 0, 4, 7))
        second = (await service.published()).canary
        assert (first, second) == (Canary((0,), (0,), (0.0,)), Canary((0,), (0,), (-2.0,)))


async def test_weights_without_room_in_shared_memory_say_what_to_do(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.RaisesGroup(
        pytest.RaisesExc(ConfigError, match=r"two versions of the weights .*--shm-size.*model\.dtype")
    ):
        async with serving(config=config(fleet={"wire": "ipc"})):
            pass


async def test_a_step_publishes_the_next_version_and_reports_it(serving: Serving) -> None:
    async with serving() as service:
        report = await service.step(cuts(service, 0, 4, 7))
        assert (report.incarnation, report.version, report.updates, report.skipped) == (INCARNATION, 1, 1, "")
        assert [(s.group, s.trained, s.masked) for s in report.samples] == [(4, 3, 0), (7, 3, 0)]
        assert report.published == await service.published()
        assert await published_weight(service) == 2.0
        (health,) = await service.health()
        assert (health.version, health.counters["samples"], health.counters["tokens"]) == (1, 2, 6)


async def test_the_chain_is_that_of_the_samples_of_every_step(serving: Serving) -> None:
    async with serving() as service:
        await service.step(cuts(service, 0, 1, 2))
        report = await service.step(cuts(service, 1, 3))
        expected = chain(chain(GENESIS, [(1, 0, 0), (2, 0, 0)]), [(3, 0, 0)])
        assert report.chain == expected.hex()


async def test_a_row_that_did_not_enter_the_loss_is_not_in_the_chain(serving: Serving) -> None:
    async with serving() as service:
        trained = cuts(service, 0, 1)
        left_out = cuts(service, 0, 2, advantage=0.0)
        report = await service.step(replace(trained, batch=BatchRef((*trained.batch.rows, *left_out.batch.rows))))
        assert report.chain == chain(GENESIS, [(1, 0, 0)]).hex()


async def test_repeated_steps_get_the_stored_report_and_train_once(serving: Serving) -> None:
    async with serving() as service:
        batch = cuts(service, 0, 1)
        first, second = await asyncio.gather(service.step(batch), service.step(batch))
        service.context.open_rows(0, 0).free([batch.batch.rows[0].places[0]])
        assert await service.step(batch) == first == second
        assert await published_weight(service) == 1.0


@pytest.mark.parametrize(
    ("incarnation", "version", "advantage"),
    [(INCARNATION, 0, 9.0), (INCARNATION, 2, 1.0), (INCARNATION - 1, 1, 1.0), (INCARNATION + 1, 0, 1.0)],
)
async def test_a_step_from_elsewhere_is_refused_with_both_named(
    incarnation: int, version: int, advantage: float, serving: Serving
) -> None:
    async with serving() as service:
        await service.step(cuts(service, 0, 1))
        with pytest.raises(
            Refused,
            match=rf"version {version} of incarnation {incarnation}.* at version 1 of incarnation {INCARNATION}",
        ):
            await service.step(replace(cuts(service, version, 1, advantage=advantage), incarnation=incarnation))
        assert await published_weight(service) == 1.0


async def test_a_cancelled_step_is_finished_and_its_repetition_gets_the_report(
    tmp_path: Path, serving: Serving
) -> None:
    async with serving() as service:
        batch = cuts(service, 0, 1)
        call = asyncio.ensure_future(service.step(batch))
        for _ in range(4):
            await asyncio.sleep(0)
        assert not call.done()
        call.cancel()
        await asyncio.wait([call])
        with pytest.raises(Refused, match="is trained"):
            await service.step(cuts(service, 0, 2))
        with pytest.raises(Refused, match="a checkpoint"):
            await saved(service, tmp_path / "c", 0)
        report = await service.step(batch)
        assert report.version == 1
        assert await published_weight(service) == 1.0


async def test_lost_rows_change_nothing(serving: Serving) -> None:
    async with serving() as service:
        batch = cuts(service, 0, 1)
        service.context.open_rows(0, 0).free([batch.batch.rows[0].places[0]])
        with pytest.raises(LostRows):
            await service.step(batch)
        assert (await service.step(cuts(service, 0, 2))).version == 1


async def test_a_rank_that_lost_another_one_ends(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_rank(run: CountingRun) -> bool:
        raise PeerLost("the 2 training ranks could not exchange")

    monkeypatch.setattr(training, "LOSS_NOTICE", 0.0)
    with pytest.RaisesGroup(pytest.RaisesExc(PeerLost, match="could not exchange")):
        async with serving() as service:
            monkeypatch.setattr(CountingRun, "advance", lose_rank)
            await service.step(cuts(service, 0, 1))


@pytest.mark.trap("not_finite")
async def test_a_skipped_step_keeps_version_and_chain(serving: Serving) -> None:
    async with serving() as service:
        report = await service.step(cuts(service, 0, 1, advantage=float("inf")))
        assert (report.version, report.updates, report.skipped, report.published) == (0, 0, "not finite", None)
        assert report.chain == GENESIS.hex()
        assert (await service.step(cuts(service, 0, 2))).version == 1


@pytest.mark.parametrize("dies", [False, True])
async def test_the_next_version_waits_until_every_reader_has_flipped_or_is_gone(serving: Serving, dies: bool) -> None:
    async with serving() as service:
        await service.using(("fast", "slow"), 0)
        await service.step(cuts(service, 0, 1))
        call = asyncio.ensure_future(service.step(cuts(service, 1, 2)))
        await service.using(("fast",), 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not call.done(), "slow still reads version 0, whose slot version 2 needs"
        await (service.detached("slow") if dies else service.using(("slow",), 1))
        assert (await call).version == 2


async def test_a_slot_that_is_about_to_be_written_is_leased_to_nobody(serving: Serving) -> None:
    """A reader asks for version 0 again and again while version 2, which takes its place, is on its way there."""
    async with serving() as service:
        await service.step(cuts(service, 0, 1))
        call = asyncio.ensure_future(service.step(cuts(service, 1, 2)))
        with pytest.raises(Refused, match="wants to read weights of version 0"):
            await lease_again_and_again(service, "late", 0)
        assert (await call).version == 2


async def lease_again_and_again(service: CountingService, reader: str, version: int) -> None:
    for _ in range(100):
        await service.using((reader,), version)
        await asyncio.sleep(0)
        await service.detached(reader)
        await asyncio.sleep(0)


@on_virtual_time
async def test_a_reader_that_never_flips_is_named_and_the_trained_step_is_not_lost(serving: Serving) -> None:
    async with serving(config=config(staleness={"publish_deadline": 5.0})) as service:
        await service.using(("stuck",), 0)
        await service.step(cuts(service, 0, 1))
        batch = cuts(service, 1, 2)
        began = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded, match="stuck still read"):
            await service.step(batch)
        assert asyncio.get_running_loop().time() - began == pytest.approx(10)
        assert service.context.clock.spent()[1]["sync"] == pytest.approx(10)
        await service.detached("stuck")
        assert (await service.step(batch)).version == 2
        assert await published_weight(service) == 2.0


async def test_a_checkpoint_is_of_the_named_version_and_resumes(tmp_path: Path, serving: Serving) -> None:
    folder = tmp_path / "tmp-1"
    async with serving() as service:
        report = await service.step(cuts(service, 0, 1))
        with pytest.raises(Refused, match=r"version 0 of incarnation 3.* at version 1 of incarnation 3"):
            await saved(service, folder, 0)
        made = await saved(service, folder, 1)
        assert (made.version, made.chain, list(made.files)) == (1, report.chain, ["state"])
    async with serving(checkpoint_dir=folder, incarnation=INCARNATION + 1) as resumed:
        published = await resumed.published()
        assert (published.incarnation, published.version) == (INCARNATION + 1, 1)
        assert await published_weight(resumed) == 1.0
        next_cuts = replace(cuts(resumed, 1, 5), incarnation=INCARNATION + 1)
        assert (await resumed.step(next_cuts)).chain == chain(bytes.fromhex(report.chain), [(5, 0, 0)]).hex()


async def test_a_copy_is_written_while_the_next_step_runs(tmp_path: Path, serving: Serving) -> None:
    folder = tmp_path / "tmp-1"
    async with serving() as service:
        first = await service.step(cuts(service, 0, 1))
        with pytest.raises(Refused, match="no copy of version 1 of incarnation 3 can be written: none is held"):
            await service.checkpoint(str(folder), INCARNATION, 1)
        await service.copy_state(INCARNATION, 1)
        second = asyncio.ensure_future(service.step(cuts(service, 1, 2)))
        made = await service.checkpoint(str(folder), INCARNATION, 1)
        assert (await second).version == 2
        assert (made.version, made.chain) == (1, first.chain)
        assert json.loads((folder / "state").read_text())["weight"] == 1.0
        (folder / "state").unlink()
        assert await service.checkpoint(str(folder), INCARNATION, 1) == made
        assert not list(folder.iterdir()), "a repeated call writes nothing"
        with pytest.raises(Refused, match="version 2 of incarnation 3 can be written: one of version 1 of inc"):
            await service.checkpoint(str(folder), INCARNATION, 2)


async def test_a_copy_that_finds_no_room_can_be_written_again(tmp_path: Path, serving: Serving) -> None:
    async with serving() as service:
        await service.copy_state(INCARNATION, 0)
        CountedCopy.faults.append(OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(OSError, match="No space left"):
            await service.checkpoint(str(tmp_path / "tmp-0"), INCARNATION, 0)
        made = await service.checkpoint(str(tmp_path / "tmp-0"), INCARNATION, 0)
        assert (made.version, made.files) == (0, {"state": "digest"})


async def test_rows_are_trained_at_the_temperature_that_sampled_them(serving: Serving) -> None:
    async with serving(config=config(generation={"temperature": 0.6})) as service:
        temperatures: list[float] = []
        begin = service._engine.begin

        def observed(rows: Any, incarnation: int, version: int) -> Any:
            temperatures.extend(row.temperature for row in rows)
            return begin(rows, incarnation, version)

        service._engine.begin = observed
        await service.step(cuts(service, 0, 4, 7))
    assert temperatures == [0.6, 0.6]


async def test_nothing_that_grows_with_the_batch_is_computed_on_the_event_loop(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_loop: dict[str, bool] = {}

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            on_loop[function.__name__] = asyncio._get_running_loop() is not None
            return function(*args)

        return call

    for module, name in ((training, "batch_digest"), (training, "train_rows")):
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    monkeypatch.setattr(row_reader, "INLINE_TOKENS", 0)
    async with serving(make_compute=ThreadCompute) as service:
        monkeypatch.setattr(CountingEngine, "begin", watched(CountingEngine.begin))
        await service.step(cuts(service, 0, 4, 7))
    assert on_loop == {"batch_digest": False, "train_rows": False, "begin": False}


# ---- a run that ends in the middle of a step: the state of its version is copied, whatever the step computes ---------


async def saved_weight(service: CountingService, folder: Path, version: int) -> float:
    async with asyncio.timeout(60):
        made = await saved(service, folder, version)
    assert made.version == version
    return float(json.loads((folder / "state").read_text())["weight"])


def block_in_pass(number: int, patch: pytest.MonkeyPatch) -> tuple[asyncio.Event, threading.Event]:
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
    tmp_path: Path, serving: Serving, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    async with serving(make_compute=ThreadCompute) as service:
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
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[dict[str, torch.Tensor]] = []
    async with serving(make_compute=ThreadCompute) as service:
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
    tmp_path: Path, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(make_compute=ThreadCompute) as service:
        reached, goes_on = block_in_pass(3, monkeypatch)
        step = asyncio.ensure_future(service.step(cuts(service, 0, 1)))
        await reached.wait()
        assert await service.undo_step(INCARNATION, 0) == [RUNNING]
        goes_on.set()
        assert (await step).version == 1
        assert await service.undo_step(INCARNATION, 0) == [ENDED]
        assert await saved_weight(service, tmp_path / "tmp-1", 1) == 1.0


async def test_between_two_steps_no_further_one_begins(tmp_path: Path, serving: Serving) -> None:
    async with serving() as service:
        await service.step(cuts(service, 0, 1))
        assert await service.undo_step(INCARNATION, 1) == [UNDONE]
        with pytest.raises(Refused, match=r"cannot train from version 1 .*: the run ends"):
            await service.step(cuts(service, 1, 2))
        assert await saved_weight(service, tmp_path / "tmp-1", 1) == 1.0


async def test_a_step_that_still_reads_its_rows_changes_nothing(
    tmp_path: Path, serving: Serving, monkeypatch: pytest.MonkeyPatch
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
    async with serving() as service:
        step = asyncio.ensure_future(service.step(cuts(service, 0, 1)))
        await reached.wait()
        assert await service.undo_step(INCARNATION, 0) == [UNDONE]
        goes_on.set()
        with pytest.raises(LostRows, match="the run ends"):
            await step
        assert await saved_weight(service, tmp_path / "tmp-0", 0) == 0.0


async def test_a_step_that_waits_for_samples_learns_that_it_is_undone(
    tmp_path: Path, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = waiting_for_samples(monkeypatch)
    async with serving() as service:
        step = asyncio.ensure_future(service.step(cuts(service, 0, 1)))
        await waits.wait()
        assert await service.undo_step(INCARNATION, 0) == [UNDONE]
        assert service._step is not None
        await asyncio.wait([service._step.work])
        step.cancel()
        assert await saved_weight(service, tmp_path / "tmp-0", 0) == 0.0


async def test_a_state_that_cannot_be_copied_beside_a_pass_waits_for_its_end(
    tmp_path: Path, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(make_compute=ThreadCompute) as service:
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


# ---- a rank that samples too: the memory of its engine is free in a step, and weights follow each step --------------


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
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    handover = NotedHandover()
    advance = CountingRun.advance

    def noted(run: CountingRun) -> bool:
        handover.noted.append("pass")
        return advance(run)

    monkeypatch.setattr(CountingRun, "advance", noted)
    async with serving(handover=handover) as service:
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


# ---- the model folder that a run began with --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listen", "resumed", "links"), [("", False, True), ("127.0.0.1:7000", False, False), ("", True, False)]
)
async def test_only_a_trainer_on_the_host_of_the_run_links_to_the_model_it_began_with(
    listen: str,
    resumed: bool,
    links: bool,
    folder: Path,
    tmp_path: Path,
    worker_context: Callable[..., WorkerContext],
) -> None:
    config = Config.model_validate({"model": {"name": "tiny"}, "task": {"prompts": "none"}})
    config = config.model_copy(update={"fleet": config.fleet.model_copy(update={"listen": listen})})
    async with asyncio.TaskGroup() as tasks:
        first = TrainingService(worker_context("training", config, tasks, model_dir=folder))
        engine, _ = first.open_engine(RankMesh())
        facts = {"version": 0, "incarnation": 1, "chain": ""}
        engine.save(tmp_path / "0", facts)
        if resumed:
            changes = {"model_dir": folder, "checkpoint_dir": tmp_path / "0"}
            engine, found = TrainingService(worker_context("training", config, tasks, **changes)).open_engine(
                RankMesh()
            )
            assert found == facts
            engine.save(tmp_path / "again", facts)
    weights = tmp_path / ("again" if resumed else "0") / "model" / "model.safetensors"
    assert weights.is_symlink() == links

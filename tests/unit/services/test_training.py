"""The training service around an engine of a few lines: compare-and-set, chain, leases, cancellation, checkpoints."""

import asyncio
import errno
import json
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.sections.training_config import WeightsConfig
from asyncrl.errors import ConfigError, DeadlineExceeded, LostRows, PeerLost, Refused
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.lanes.data import row_reader
from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.hash_chain import GENESIS, chain
from asyncrl.protocols.messages import Canary
from asyncrl.services import training
from asyncrl.simulation.virtual_loop import run
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
)

Serving = Callable[..., AbstractAsyncContextManager[CountingService]]


@pytest.fixture
def serving(worker_context: Callable[..., WorkerContext]) -> Serving:
    return partial(served, worker_context)


async def test_version_zero_lies_in_the_arena_before_the_first_step(tmp_path: Path, serving: Serving) -> None:
    async with serving(tmp_path) as service:
        assert ((await service.published()).incarnation, (await service.published()).version) == (INCARNATION, 0)
        assert await published_weight(service) == 0.0


async def test_two_runs_with_one_folder_of_weights_have_their_own_files(tmp_path: Path, serving: Serving) -> None:
    weights = WeightsConfig(transport="file", folder=str(tmp_path / "both"))
    settings = config().model_copy(update={"weights": weights})
    async with (
        serving(tmp_path, config=settings, run="cafe0001") as one,
        serving(tmp_path, config=settings, run="cafe0002") as other,
    ):
        folders = {(await service.published()).arena for service in (one, other)}
    assert folders == {f"file://{tmp_path}/both/{run}" for run in ("cafe0001", "cafe0002")}


@pytest.mark.trap("engines_disagree")
async def test_each_version_has_a_canary_of_its_own_weights(tmp_path: Path, serving: Serving) -> None:
    async with serving(tmp_path) as service:
        first = (await service.published()).canary
        await service.step(cuts(service, 0, 4, 7))
        second = (await service.published()).canary
        assert (first, second) == (Canary((0,), (0,), (0.0,)), Canary((0,), (0,), (-2.0,)))


async def test_weights_without_room_in_shared_memory_say_what_to_do(
    tmp_path: Path, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.RaisesGroup(
        pytest.RaisesExc(ConfigError, match=r"two versions of the weights .*--shm-size.*model\.dtype")
    ):
        async with serving(tmp_path, config=config(fleet={"wire": "ipc"})):
            pass


async def test_a_device_that_is_not_there_is_refused_before_anything_is_loaded(
    tmp_path: Path, serving: Serving
) -> None:
    settings = config(training={"device": "cuda:99"})
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=r'^training\.device = "cuda:99" cannot be used')):
        async with serving(tmp_path, config=settings):
            pass


async def test_a_step_publishes_the_next_version_and_reports_it(tmp_path: Path, serving: Serving) -> None:
    async with serving(tmp_path) as service:
        report = await service.step(cuts(service, 0, 4, 7))
        assert (report.incarnation, report.version, report.updates, report.skipped) == (INCARNATION, 1, 1, "")
        assert [(s.group, s.trained, s.masked) for s in report.samples] == [(4, 3, 0), (7, 3, 0)]
        assert report.published == await service.published()
        assert await published_weight(service) == 2.0
        (health,) = await service.health()
        assert (health.version, health.counters["samples"], health.counters["tokens"]) == (1, 2, 6)


async def test_the_chain_is_that_of_the_samples_of_every_step(tmp_path: Path, serving: Serving) -> None:
    async with serving(tmp_path) as service:
        await service.step(cuts(service, 0, 1, 2))
        report = await service.step(cuts(service, 1, 3))
        expected = chain(chain(GENESIS, [(1, 0, 0), (2, 0, 0)]), [(3, 0, 0)])
        assert report.chain == expected.hex()


async def test_a_row_that_did_not_enter_the_loss_is_not_in_the_chain(tmp_path: Path, serving: Serving) -> None:
    async with serving(tmp_path) as service:
        trained = cuts(service, 0, 1)
        left_out = cuts(service, 0, 2, advantage=0.0)
        report = await service.step(replace(trained, batch=BatchRef((*trained.batch.rows, *left_out.batch.rows))))
        assert report.chain == chain(GENESIS, [(1, 0, 0)]).hex()


async def test_a_repeated_step_gets_the_stored_report_and_trains_once(tmp_path: Path, serving: Serving) -> None:
    async with serving(tmp_path) as service:
        batch = cuts(service, 0, 1)
        first = await service.step(batch)
        service.context.open_rows(0, 0).free([batch.batch.rows[0].places[0]])
        assert await service.step(batch) == first
        assert await published_weight(service) == 1.0


@pytest.mark.parametrize(
    ("incarnation", "version", "advantage"),
    [(INCARNATION, 0, 9.0), (INCARNATION, 2, 1.0), (INCARNATION - 1, 1, 1.0), (INCARNATION + 1, 0, 1.0)],
)
async def test_a_step_from_elsewhere_is_refused_with_both_named(
    incarnation: int, version: int, advantage: float, tmp_path: Path, serving: Serving
) -> None:
    async with serving(tmp_path) as service:
        await service.step(cuts(service, 0, 1))
        with pytest.raises(
            Refused,
            match=rf"version {version} of incarnation {incarnation}.* at version 1 of incarnation {INCARNATION}",
        ):
            await service.step(replace(cuts(service, version, 1, advantage=advantage), incarnation=incarnation))
        assert await published_weight(service) == 1.0


async def test_two_calls_at_once_train_once(tmp_path: Path, serving: Serving) -> None:
    async with serving(tmp_path) as service:
        batch = cuts(service, 0, 1)
        first, second = await asyncio.gather(service.step(batch), service.step(batch))
        assert first == second
        assert await published_weight(service) == 1.0


async def test_a_cancelled_step_is_finished_and_its_repetition_gets_the_report(
    tmp_path: Path, serving: Serving
) -> None:
    async with serving(tmp_path) as service:
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


async def test_lost_rows_change_nothing(tmp_path: Path, serving: Serving) -> None:
    async with serving(tmp_path) as service:
        batch = cuts(service, 0, 1)
        service.context.open_rows(0, 0).free([batch.batch.rows[0].places[0]])
        with pytest.raises(LostRows):
            await service.step(batch)
        assert (await service.step(cuts(service, 0, 2))).version == 1


async def test_a_rank_that_lost_another_one_ends(
    tmp_path: Path, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_rank(run: CountingRun) -> bool:
        raise PeerLost("the 2 training ranks could not exchange")

    monkeypatch.setattr(training, "LOSS_NOTICE", 0.0)
    with pytest.RaisesGroup(pytest.RaisesExc(PeerLost, match="could not exchange")):
        async with serving(tmp_path) as service:
            monkeypatch.setattr(CountingRun, "advance", lose_rank)
            await service.step(cuts(service, 0, 1))


@pytest.mark.trap("not_finite")
async def test_a_skipped_step_keeps_version_and_chain(tmp_path: Path, serving: Serving) -> None:
    async with serving(tmp_path) as service:
        report = await service.step(cuts(service, 0, 1, advantage=float("inf")))
        assert (report.version, report.updates, report.skipped, report.published) == (0, 0, "not finite", None)
        assert report.chain == GENESIS.hex()
        assert (await service.step(cuts(service, 0, 2))).version == 1


async def test_the_next_version_waits_until_every_reader_has_flipped(tmp_path: Path, serving: Serving) -> None:
    async with serving(tmp_path) as service:
        await service.using(("fast",), 0)
        await service.using(("slow",), 0)
        await service.step(cuts(service, 0, 1))
        call = asyncio.ensure_future(service.step(cuts(service, 1, 2)))
        await service.using(("fast",), 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not call.done(), "slow still reads version 0, whose slot version 2 needs"
        await service.using(("slow",), 1)
        assert (await call).version == 2


async def test_a_dead_reader_holds_nothing_up(tmp_path: Path, serving: Serving) -> None:
    async with serving(tmp_path) as service:
        await service.using(("dead",), 0)
        await service.step(cuts(service, 0, 1))
        call = asyncio.ensure_future(service.step(cuts(service, 1, 2)))
        for _ in range(20):
            await asyncio.sleep(0)
        await service.detached("dead")
        assert (await call).version == 2


async def test_a_slot_that_is_about_to_be_written_is_leased_to_nobody(tmp_path: Path, serving: Serving) -> None:
    """A reader asks for version 0 again and again while version 2, which takes its place, is on its way there."""
    async with serving(tmp_path) as service:
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


def test_a_reader_that_never_flips_is_named_and_the_trained_step_is_not_lost(tmp_path: Path, serving: Serving) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, config=config(staleness={"publish_deadline": 5.0})) as service:
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

    run(scenario())


async def test_a_checkpoint_is_of_the_named_version_and_resumes(tmp_path: Path, serving: Serving) -> None:
    folder = tmp_path / "tmp-1"
    async with serving(tmp_path) as service:
        report = await service.step(cuts(service, 0, 1))
        with pytest.raises(Refused, match=r"version 0 of incarnation 3.* at version 1 of incarnation 3"):
            await saved(service, folder, 0)
        made = await saved(service, folder, 1)
        assert (made.version, made.chain, list(made.files)) == (1, report.chain, ["state"])
    async with serving(tmp_path, checkpoint_dir=folder, incarnation=INCARNATION + 1) as resumed:
        published = await resumed.published()
        assert (published.incarnation, published.version) == (INCARNATION + 1, 1)
        assert await published_weight(resumed) == 1.0
        next_cuts = replace(cuts(resumed, 1, 5), incarnation=INCARNATION + 1)
        assert (await resumed.step(next_cuts)).chain == chain(bytes.fromhex(report.chain), [(5, 0, 0)]).hex()


async def test_a_copy_is_written_while_the_next_step_runs(tmp_path: Path, serving: Serving) -> None:
    folder = tmp_path / "tmp-1"
    async with serving(tmp_path) as service:
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
    async with serving(tmp_path) as service:
        await service.copy_state(INCARNATION, 0)
        CountedCopy.faults.append(OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(OSError, match="No space left"):
            await service.checkpoint(str(tmp_path / "tmp-0"), INCARNATION, 0)
        made = await service.checkpoint(str(tmp_path / "tmp-0"), INCARNATION, 0)
        assert (made.version, made.files) == (0, {"state": "digest"})


async def test_rows_are_trained_at_the_temperature_that_sampled_them(tmp_path: Path, serving: Serving) -> None:
    async with serving(tmp_path, config=config(generation={"temperature": 0.6})) as service:
        temperatures: list[float] = []
        begin = service._engine.begin

        def observed(rows: Any, incarnation: int, version: int) -> Any:
            temperatures.extend(row.temperature for row in rows)
            return begin(rows, incarnation, version)

        service._engine.begin = observed
        await service.step(cuts(service, 0, 4, 7))
    assert temperatures == [0.6, 0.6]


async def test_nothing_that_grows_with_the_batch_is_computed_on_the_event_loop(
    tmp_path: Path, serving: Serving, monkeypatch: pytest.MonkeyPatch
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
    async with serving(tmp_path, make_compute=ThreadCompute) as service:
        monkeypatch.setattr(CountingEngine, "begin", watched(CountingEngine.begin))
        await service.step(cuts(service, 0, 4, 7))
    assert on_loop == {"batch_digest": False, "train_rows": False, "begin": False}

"""A host and its guest: two workers that one launcher starts as one process."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.concurrency import gather
from asyncrl.config.schema import Config
from asyncrl.fleet.launching.launcher import InprocLauncher, InprocWorker, SharedProcesses
from asyncrl.fleet.worker.worker_spec import NOT_BOUND, RunFacts, WorkerSpec
from asyncrl.lanes.control.wire import InprocWire
from asyncrl.protocols.rank_layout import Layout


class OneTaskLauncher(InprocLauncher):
    """Starts a task that waits in place of a worker, and notes what it was asked for."""

    def __init__(self) -> None:
        super().__init__(InprocWire(), InprocWire())
        self.spawned: list[WorkerSpec] = []

    async def spawn(self, spec: WorkerSpec) -> InprocWorker:
        self.spawned.append(spec)
        return InprocWorker(spec, lambda stop: _until(stop), lambda: None)


async def _until(stop: asyncio.Event) -> None:
    await stop.wait()


@pytest.fixture
def spec(tmp_path: Path) -> Callable[[str, int, int], WorkerSpec]:
    config = Config.model_validate({"model": {"name": "tiny"}, "task": {"prompts": "none"}})
    facts = RunFacts("00", tmp_path, tmp_path, 0, "arena", config)

    def make(service: str, replica: int, rank: int) -> WorkerSpec:
        instance = f"{service}{replica}.{rank}-0-0"
        return WorkerSpec(service, replica, rank, Layout(), instance, "module:Class", NOT_BOUND, facts)

    return make


async def test_a_guest_starts_and_ends_with_its_host(spec: Callable[[str, int, int], WorkerSpec]) -> None:
    launcher = OneTaskLauncher()
    shared = SharedProcesses({"generation": ("training", ())})
    ranks = [shared.launcher_of("training", 0, rank, launcher) for rank in (0, 1)]
    guests = [shared.launcher_of("generation", replica, 0, launcher) for replica in (0, 1)]
    assert shared.launcher_of("reward", 0, 0, launcher) is launcher
    started = await gather(
        guests[0].spawn(spec("generation", 0, 0)),
        ranks[1].spawn(spec("training", 0, 1)),
        ranks[0].spawn(spec("training", 0, 0)),
        guests[1].spawn(spec("generation", 1, 0)),
    )
    guest, last, first, other = started
    together = {each.instance: each.guest.instance for each in launcher.spawned if each.guest is not None}
    assert together == {
        "training0.0-0-0": "generation0.0-0-0",
        "training0.1-0-0": "generation1.0-0-0",
    }
    assert [guest.spec.service, other.spec.replica, guest.labels] == ["generation", 1, first.labels]
    guest.kill()
    async with asyncio.timeout(60):
        assert await guest.wait() == await first.wait() == "was killed"
    last.stop()
    async with asyncio.timeout(60):
        assert await other.wait() == "ended"


async def test_a_guest_is_in_the_rank_that_its_service_says(spec: Callable[[str, int, int], WorkerSpec]) -> None:
    launcher = OneTaskLauncher()
    shared = SharedProcesses({"generation": ("training", [[0, 2], [1, 3]])})
    ranks = [shared.launcher_of("training", 0, rank, launcher) for rank in range(4)]
    places = [(replica, rank) for replica in (0, 1) for rank in (0, 1)]
    guests = [shared.launcher_of("generation", *place, launcher).spawn(spec("generation", *place)) for place in places]
    started = await gather(*guests, *(each.spawn(spec("training", 0, rank)) for rank, each in enumerate(ranks)))
    together = {each.rank: (each.guest.replica, each.guest.rank) for each in launcher.spawned if each.guest is not None}
    assert together == {0: (0, 0), 2: (0, 1), 1: (1, 0), 3: (1, 1)}
    async with asyncio.timeout(60):
        for each in started[-4:]:
            each.stop()
            await each.wait()


def test_a_specification_with_a_guest_reaches_its_process(spec: Callable[[str, int, int], WorkerSpec]) -> None:
    from dataclasses import replace

    both = replace(spec("training", 0, 1), guest=spec("generation", 1, 0))
    assert WorkerSpec.from_json(both.to_json()) == both

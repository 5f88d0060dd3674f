"""Workers go into the next incarnation of a run after one that learns died: nobody waits for a host that is cut off."""

import asyncio
from pathlib import Path

from asyncrl.controller.recovery import PROMPT, begin_incarnation, end_learners
from asyncrl.fleet.launching.launcher import LaunchedWorker, Launcher
from asyncrl.fleet.supervisor import Learners, WorkerSlot
from asyncrl.fleet.worker.worker_spec import WorkerSpec
from asyncrl.simulation import virtual_loop
from tests.unit.fleet.test_failure_table import Stage


class JoinPoint:
    """Starts workers with a launcher, but only while a host is there. incarnations: of those that were to start."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.host = asyncio.Event()
        self.incarnations: list[int] = []

    async def spawn(self, spec: WorkerSpec) -> LaunchedWorker:
        self.incarnations.append(spec.facts.incarnation)
        await self.host.wait()
        return await self.launcher.spawn(spec)

    def clean_up(self, spec: WorkerSpec) -> None:
        self.launcher.clean_up(spec)


def slot_of(stage: Stage, name: str) -> WorkerSlot:
    return next(each for each in stage.running.supervisor.slots_of("twin") if each.worker.name == name)


async def go_back(stage: Stage) -> float:
    """Kills the worker that learns, and takes the others into the next incarnation; returns the seconds of it."""
    running = stage.running
    learners = running.supervisor.learners = Learners()
    running.supervisor.kill(stage.alive("training")[0])
    await learners.lost
    await end_learners(running)
    began = asyncio.get_running_loop().time()
    async with asyncio.timeout(100):
        await begin_incarnation(running, running.facts.renewed(1, Path("checkpoint")))
    assert stage.alive("training"), "it is started again"
    return asyncio.get_running_loop().time() - began


def test_a_run_goes_back_without_a_worker_whose_host_is_away(tmp_path: Path) -> None:
    async def play() -> None:
        stage = Stage()
        stage.folder = tmp_path
        async with stage.fleet(joined=2):
            slot, (kept, gone) = slot_of(stage, "twin1.0"), stage.alive()
            slot.launcher = away = JoinPoint(slot.launcher)
            stage.running.supervisor.kill(gone)
            await stage.until(lambda: stage.alive() == [kept])
            await asyncio.sleep(5)
            assert await go_back(stage) < 1
            assert stage.alive() == [kept], "the other one stays what it was"
            assert away.incarnations == [0, 1], "the host that comes starts no worker of the incarnation before"
            away.host.set()
            await stage.until(lambda: len(stage.alive()) == 2)
            assert stage.alive()[1].startswith("twin1.0-1-")

    virtual_loop.run(play())


def test_a_run_goes_back_without_a_worker_that_stands_still(tmp_path: Path) -> None:
    async def play() -> None:
        stage = Stage()
        stage.folder = tmp_path
        async with stage.fleet(joined=2):
            kept, silent = stage.alive()
            await asyncio.sleep(5)
            stage.stopped.add("twin1.0")
            assert await go_back(stage) < PROMPT + 1
            assert kept in stage.alive()
            assert silent not in stage.alive()
            stage.stopped.clear()
            await stage.until(lambda: len(stage.alive()) == 2)
            assert stage.alive()[1].startswith("twin1.0-1-")

    virtual_loop.run(play())

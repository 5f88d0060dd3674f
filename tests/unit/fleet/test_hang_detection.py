"""Hang detection on virtual time: workers that hang are found within the bound, and no others."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest

from asyncrl.errors import DeadlineExceeded
from asyncrl.fleet.hang_detection import ROUNDS, HangDetection, round_seconds
from asyncrl.fleet.health_poller import HealthPoller
from asyncrl.fleet.lifecycle_events import WorkerHung
from asyncrl.fleet.replicas import RemoteWorker, Replicas
from asyncrl.protocols.contracts import Contract, Lane
from asyncrl.protocols.layout import Layout
from asyncrl.simulation import virtual_loop

SECONDS = 20.0
BOUND = SECONDS * (ROUNDS + 1) / ROUNDS
SCORE = Contract.endpoints["release"]
HOUR = 3600.0


class Instance:
    """A worker that answers calls while it is well; health after `slow` seconds. `silent`: from when to when it is."""

    def __init__(self, slow: float = 0.01) -> None:
        self.lost = asyncio.Event()
        self.slow, self.silent = slow, (HOUR, HOUR)

    async def call(self, method: str, args: tuple[Any, ...], deadline: float) -> Any:
        now = asyncio.get_running_loop().time()
        since, until = self.silent
        answered = now + (self.slow if method == "health" else 0.01)
        answered = until if since <= answered < until else answered
        await asyncio.sleep(min(deadline, answered - now))
        if answered > now + deadline:
            raise DeadlineExceeded(f"no {method}")
        return [None]

    def stream(self, method: str, args: tuple[Any, ...], deadline: float) -> AsyncIterator[Any]:
        raise NotImplementedError


class Scene:
    """One worker of each of four services; one that hangs is killed, and replaced a second later."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.loop = cast(virtual_loop.VirtualLoop, asyncio.get_running_loop())
        self.workers = {name: Replicas(name, 1, Layout()) for name in ("generation", "reward", "training", "critic")}
        self.instances = {name: self.started(name) for name in self.workers}
        self.killed: list[tuple[str, float]] = []
        self.hung: list[WorkerHung] = []
        self.poller = HealthPoller(self.workers, round_seconds(SECONDS), tasks)
        self.detection = HangDetection(self.poller, ("generation", "reward", "critic"), SECONDS, self.kill)

    def worker(self, service: str) -> RemoteWorker:
        return self.workers[service].worker(0, 0)

    def started(self, service: str) -> Instance:
        instance = Instance()
        self.worker(service).connected(f"{service}-{self.loop.time():g}", {lane: instance for lane in Lane})
        return instance

    def hang(self, service: str, seconds: float = HOUR) -> None:
        now = self.loop.time()
        self.instances[service].silent = now, now + seconds

    def kill(self, event: WorkerHung) -> None:
        self.hung.append(event)
        self.killed.append((event.instance, self.loop.time()))
        self.worker(event.service).lost("killed", restarting=True)
        self.loop.call_later(1.0, self.started, event.service)


def watched(script: Callable[[Scene], Awaitable[None]]) -> Scene:
    """Runs the script, and ten times the silence after it."""

    async def main() -> Scene:
        async with asyncio.TaskGroup() as tasks:
            scene = Scene(tasks)
            watching = tasks.create_task(scene.detection.run())
            await script(scene)
            await asyncio.sleep(10 * SECONDS)
            watching.cancel()
            scene.poller.close()
        return scene

    return virtual_loop.run(main())


@pytest.mark.parametrize("service", ["generation", "reward", "critic"])
@pytest.mark.parametrize("at", [0.0, 11.0, 14.9])
def test_a_worker_that_hangs_is_found_within_its_bound_and_only_once(service: str, at: float) -> None:
    async def script(scene: Scene) -> None:
        await asyncio.sleep(at)
        scene.hang(service)

    scene = watched(script)
    ((killed, when),) = scene.killed
    assert killed == f"{service}-0"
    assert SECONDS <= when - at <= BOUND + 0.1
    assert scene.hung == [WorkerHung(service, f"{service}-0", SECONDS)]


def test_a_trainer_that_hangs_is_left_to_the_deadline_of_its_calls() -> None:
    async def script(scene: Scene) -> None:
        scene.hang("training")

    assert watched(script).killed == []


def test_a_worker_that_is_slow_to_answer_health_is_left_alone() -> None:
    async def script(scene: Scene) -> None:
        scene.instances["reward"].slow = SECONDS / ROUNDS - 0.1

    assert watched(script).killed == []


def test_a_worker_that_answers_work_but_no_health_is_left_alone() -> None:
    async def script(scene: Scene) -> None:
        scene.instances["reward"].slow = HOUR
        for _ in range(30):
            await scene.worker("reward").call(SCORE, ([], 0), 1.0)
            await asyncio.sleep(SECONDS / ROUNDS - 0.5)
        scene.instances["reward"].slow = 0.01

    assert watched(script).killed == []


def test_a_stop_shorter_than_the_bound_costs_nothing_however_often() -> None:
    async def script(scene: Scene) -> None:
        for _ in range(10):
            scene.hang("reward", SECONDS * 0.7)
            await asyncio.sleep(SECONDS)

    assert watched(script).killed == []


def test_a_silence_of_all_workers_at_once_does_not_count() -> None:
    async def script(scene: Scene) -> None:
        for service in scene.workers:
            scene.hang(service, 4 * SECONDS)

    assert watched(script).killed == []


def test_time_in_which_the_machine_was_suspended_does_not_count() -> None:
    """The machine was suspended again and again, and one worker comes to itself a little later than the others."""

    async def script(scene: Scene) -> None:
        for _ in range(2 * ROUNDS):
            await asyncio.sleep(SECONDS / ROUNDS - 0.1)
            scene.loop.skip(HOUR)
            scene.hang("reward", SECONDS)

    assert watched(script).killed == []


def test_a_starting_worker_is_not_asked() -> None:
    async def script(scene: Scene) -> None:
        scene.worker("reward").lost("killed", restarting=True)
        await asyncio.sleep(10 * SECONDS)

    assert watched(script).killed == []

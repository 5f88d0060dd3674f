"""Workers that hang, on virtual time: found within their bound, and nobody else is."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest

from asyncrl import virtual
from asyncrl.errors import DeadlineExceeded
from asyncrl.protocols.contracts import Contract, Lane
from asyncrl.protocols.layout import Layout
from asyncrl.silence import ROUNDS, Silence
from asyncrl.workers import RemoteWorker, Workers

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

    def stream(self, method: str, args: tuple[Any, ...], deadline: float) -> AsyncIterator[Any]:
        raise NotImplementedError


class Scene:
    """One worker of each of four services; who is evicted is replaced a second later."""

    def __init__(self) -> None:
        self.loop = cast(virtual.VirtualLoop, asyncio.get_running_loop())
        self.workers = {name: Workers(name, 1, Layout()) for name in ("generation", "reward", "training", "critic")}
        self.instances = {name: self.started(name) for name in self.workers}
        self.evicted: list[tuple[str, float]] = []
        self.told: list[str] = []
        restarted = ("generation", "reward")
        self.silence = Silence(self.workers, restarted, ("critic",), SECONDS, self.told.append, self.evict)

    def worker(self, service: str) -> RemoteWorker:
        return self.workers[service].worker(0, 0)

    def started(self, service: str) -> Instance:
        instance = Instance()
        self.worker(service).connected(f"{service}-{self.loop.time():g}", {lane: instance for lane in Lane})
        return instance

    def hang(self, service: str, seconds: float = HOUR) -> None:
        now = self.loop.time()
        self.instances[service].silent = now, now + seconds

    def evict(self, name: str) -> None:
        self.evicted.append((name, self.loop.time()))
        service = name.partition("-")[0]
        self.worker(service).lost("killed", returns=True)
        self.loop.call_later(1.0, self.started, service)


def watched(script: Callable[[Scene], Awaitable[None]]) -> Scene:
    """What comes of this script, and of ten silences' time after it."""

    async def main() -> Scene:
        scene = Scene()
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(scene.silence.run())
            await script(scene)
            await asyncio.sleep(10 * SECONDS)
            watching.cancel()
        return scene

    return virtual.run(main())


@pytest.mark.parametrize(
    ("service", "becomes"),
    [("generation", "and started again"), ("reward", "and started again"), ("critic", ", which ends the run")],
)
@pytest.mark.parametrize("at", [0.0, 11.0, 14.9])
def test_a_worker_that_hangs_is_evicted_within_its_bound_and_only_once(service: str, becomes: str, at: float) -> None:
    async def script(scene: Scene) -> None:
        await asyncio.sleep(at)
        scene.hang(service)

    scene = watched(script)
    ((evicted, when),) = scene.evicted
    assert evicted == f"{service}-0"
    assert SECONDS <= when - at <= BOUND + 0.1
    (told,) = scene.told
    assert told.startswith(f"{service}-0 has said nothing for 20 s, not even how it is; it is killed")
    assert told.endswith(becomes)


def test_a_trainer_that_hangs_is_left_to_its_own_rule() -> None:
    async def script(scene: Scene) -> None:
        scene.hang("training")

    assert watched(script).evicted == []


def test_a_worker_that_is_slow_to_say_how_it_is_is_left_alone() -> None:
    async def script(scene: Scene) -> None:
        scene.instances["reward"].slow = SECONDS / ROUNDS - 0.1

    assert watched(script).evicted == []


def test_a_worker_that_answers_work_but_no_health_is_left_alone() -> None:
    async def script(scene: Scene) -> None:
        scene.instances["reward"].slow = HOUR
        for _ in range(30):
            await scene.worker("reward").call(SCORE, ([], 0), 1.0)
            await asyncio.sleep(SECONDS / ROUNDS - 0.5)
        scene.instances["reward"].slow = 0.01

    assert watched(script).evicted == []


def test_a_stop_shorter_than_the_bound_costs_nothing_however_often() -> None:
    async def script(scene: Scene) -> None:
        for _ in range(10):
            scene.hang("reward", SECONDS * 0.7)
            await asyncio.sleep(SECONDS)

    assert watched(script).evicted == []


def test_when_all_are_silent_at_once_it_is_not_their_fault() -> None:
    async def script(scene: Scene) -> None:
        for service in scene.workers:
            scene.hang(service, 4 * SECONDS)

    assert watched(script).evicted == []


def test_time_that_passed_while_nobody_ran_is_no_silence() -> None:
    """The machine was suspended again and again, and one worker comes to itself a little later than the others."""

    async def script(scene: Scene) -> None:
        for _ in range(2 * ROUNDS):
            await asyncio.sleep(SECONDS / ROUNDS - 0.1)
            scene.loop.skip(HOUR)
            scene.hang("reward", SECONDS)

    assert watched(script).evicted == []


def test_who_is_starting_is_not_asked() -> None:
    async def script(scene: Scene) -> None:
        scene.worker("reward").lost("killed", returns=True)
        await asyncio.sleep(10 * SECONDS)

    assert watched(script).evicted == []

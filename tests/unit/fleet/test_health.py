"""Health on virtual time: workers that hang are found within their bound, and a silent one delays nobody."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from asyncrl.errors import DeadlineExceeded
from asyncrl.fleet.health import (
    HEALTH_TIMEOUT,
    ROUNDS,
    HealthAnswer,
    HealthPoller,
    describe,
    detect_hangs,
    round_seconds,
    watch_for_stalls,
    watch_queues,
)
from asyncrl.fleet.lifecycle_events import WorkerHung
from asyncrl.fleet.remote_worker import RemoteWorker
from asyncrl.fleet.replicas import Replicas
from asyncrl.protocols.messages import Health
from asyncrl.protocols.rank_layout import Layout
from asyncrl.protocols.service_contracts import Contract, Lane
from asyncrl.simulation import virtual_loop
from tests.virtual_time import on_virtual_time, within

SECONDS = 20.0
BOUND = SECONDS * (ROUNDS + 1) / ROUNDS
SCORE = Contract.endpoints["release"]
HOUR = 3600.0


class Instance:
    """A worker that answers calls while it is well; health after `slow` seconds. silent: from when to when it is."""

    silence = None

    def __init__(self, service: str) -> None:
        self.service = service
        self.lost = asyncio.Event()
        self.slow = 0.01
        self.silent = (HOUR, HOUR)
        self.outstanding = 0
        self.most_outstanding = 0

    async def call(self, method: str, args: tuple[Any, ...], deadline: float, *, wants_answer: bool = True) -> Any:
        now = asyncio.get_running_loop().time()
        since, until = self.silent
        answered = now + (self.slow if method == "health" else 0.01)
        answered = until if since <= answered < until else answered
        self.outstanding += 1
        self.most_outstanding = max(self.most_outstanding, self.outstanding)
        await asyncio.sleep(min(deadline, answered - now))
        self.outstanding -= 1
        if answered > now + deadline:
            raise DeadlineExceeded(f"no {method}")
        return [Health(self.service, 0, 0, f"{self.service}-0", (), 0, {}, 1.0)]

    def stream(self, method: str, args: tuple[Any, ...], deadline: float) -> AsyncIterator[Any]:
        raise NotImplementedError


class Scene:
    """One worker of each service; one that hangs is killed, and replaced a second later."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        services: Sequence[str] = ("generation", "reward", "training", "critic"),
        deadline: float = round_seconds(SECONDS),
    ) -> None:
        self.loop = cast(virtual_loop.VirtualLoop, asyncio.get_running_loop())
        self.workers = {name: Replicas(name, 1, Layout()) for name in services}
        self.instances = {name: self.started(name) for name in self.workers}
        self.hanging: list[str] = []
        self.hung: list[WorkerHung] = []
        self.killed_at = 0.0
        self.poller = HealthPoller(self.workers, deadline, tasks)

    def worker(self, service: str) -> RemoteWorker:
        return self.workers[service].worker(0, 0)

    def started(self, service: str) -> Instance:
        instance = Instance(service)
        self.worker(service).connected(f"{service}-{self.loop.time():g}", {lane: instance for lane in Lane})
        return instance

    def hang(self, service: str, seconds: float = HOUR) -> None:
        now = self.loop.time()
        self.instances[service].silent = now, now + seconds

    def kill(self, event: WorkerHung) -> None:
        self.hung.append(event)
        self.killed_at = self.loop.time()
        self.worker(event.service).lost("killed", restarting=True)
        self.loop.call_later(1.0, self.started, event.service)


@within
@asynccontextmanager
async def watched() -> AsyncIterator[Scene]:
    """A scene in which hangs are found, for ten times the silence after the test; nobody is killed wrongly."""
    async with asyncio.TaskGroup() as tasks:
        scene = Scene(tasks)
        watching = tasks.create_task(detect_hangs(scene.poller, SECONDS, scene.kill))
        yield scene
        await asyncio.sleep(10 * SECONDS)
        watching.cancel()
        scene.poller.close()
    assert [event.instance for event in scene.hung] == scene.hanging


@pytest.mark.parametrize(("service", "at"), [("generation", 0.0), ("reward", 11.0), ("training", 14.9)])
@watched
async def test_a_worker_that_hangs_is_found_within_its_bound_and_only_once(
    scene: Scene, service: str, at: float
) -> None:
    await asyncio.sleep(at)
    scene.hang(service)
    scene.hanging = [f"{service}-0"]
    await asyncio.sleep(BOUND + 1)
    assert scene.hung == [WorkerHung(service, f"{service}-0", SECONDS)]
    assert SECONDS <= scene.killed_at - at <= BOUND + 0.1


@watched
async def test_a_worker_that_is_slow_to_answer_health_is_left_alone(scene: Scene) -> None:
    scene.instances["reward"].slow = SECONDS / ROUNDS - 0.1


@watched
async def test_a_worker_that_answers_work_but_no_health_is_left_alone(scene: Scene) -> None:
    scene.instances["reward"].slow = HOUR
    for _ in range(30):
        await scene.worker("reward").call(SCORE, ([], 0), 1.0)
        await asyncio.sleep(SECONDS / ROUNDS - 0.5)
    scene.instances["reward"].slow = 0.01


@watched
async def test_a_stop_shorter_than_the_bound_costs_nothing_however_often(scene: Scene) -> None:
    for _ in range(10):
        scene.hang("reward", SECONDS * 0.7)
        await asyncio.sleep(SECONDS)


@watched
async def test_a_silence_of_all_workers_at_once_does_not_count(scene: Scene) -> None:
    for service in scene.workers:
        scene.hang(service, 4 * SECONDS)


@watched
async def test_time_in_which_the_machine_was_suspended_does_not_count(scene: Scene) -> None:
    """The machine was suspended again and again, and one worker comes to itself a little later than the others."""
    for _ in range(2 * ROUNDS):
        await asyncio.sleep(SECONDS / ROUNDS - 0.1)
        scene.loop.skip(HOUR)
        scene.hang("reward", SECONDS)


@watched
async def test_a_starting_worker_is_not_asked(scene: Scene) -> None:
    scene.worker("reward").lost("killed", restarting=True)
    await asyncio.sleep(10 * SECONDS)


# ---- the poller --------------------------------------------------------------------------------------------


@within
@asynccontextmanager
async def polling() -> AsyncIterator[Scene]:
    async with asyncio.TaskGroup() as tasks:
        scene = Scene(tasks, ("generation", "reward"), deadline=10.0)
        yield scene
        scene.poller.close()


async def answering(scene: Scene) -> list[str]:
    return [health.service for health in await scene.poller.poll()]


@polling
async def test_a_silent_worker_delays_the_metrics_lines_but_a_little_and_is_asked_again(scene: Scene) -> None:
    waited = 0.0
    complete = 0
    scene.instances["reward"].slow = 1000.0
    while scene.loop.time() < 120:
        if scene.loop.time() > 100:
            scene.instances["reward"].slow = 0.01
        began = scene.loop.time()
        answered = await answering(scene)
        assert "generation" in answered
        waited += scene.loop.time() - began
        complete += len(answered) == 2
        await asyncio.sleep(0.2)
    assert waited <= 120 * 0.25
    assert complete >= 40


@polling
async def test_callers_share_one_call_to_a_worker(scene: Scene) -> None:
    scene.instances["reward"].slow = 1.0
    scene.poller.request()
    assert [*await asyncio.gather(answering(scene), answering(scene))] == [["generation", "reward"]] * 2
    assert scene.instances["reward"].most_outstanding == 1


@polling
async def test_the_newest_answer_is_kept_and_an_old_one_is_not_returned_as_new(scene: Scene) -> None:
    await scene.poller.poll()
    answered_at = scene.poller.newest["reward0.0"].received_at
    scene.instances["reward"].slow = 1000.0
    await asyncio.sleep(5)
    assert await answering(scene) == ["generation"]
    assert scene.loop.time() == 5 + 0.01 + HEALTH_TIMEOUT
    assert scene.poller.newest["reward0.0"].received_at == answered_at


# ---- the description of a stalled fleet ---------------------------------------------------------------------

BUSY = Health("generation", 0, 0, "generation0.0-0-a", ("generate (group 3) for 130 s",), 2, {"busy": 9.6}, 140.0)
IDLE = Health("training", 0, 0, "training0.0-0-b", (), 0, {"starved": 139.0, "sync": 0.1}, 140.0)
DEAD = "reward0.0 does not answer: was killed by SIGKILL"


def worker(name: str, instance: str, silent: float, problem: str = "", **calls: float) -> Any:
    """A worker whose last answer came `silent` seconds ago; `calls`: seconds for which each was not answered."""
    now = asyncio.get_running_loop().time()
    outstanding = [SimpleNamespace(method=method, since=now - seconds) for method, seconds in calls.items()]
    return SimpleNamespace(
        name=name,
        instance=instance,
        alive=not problem,
        status=problem,
        last_answer_at=now - silent,
        outstanding=dict(enumerate(outstanding)),
    )


async def described(*workers: Callable[[], Any], newest: dict[str, tuple[Health, float]]) -> str:
    """newest: health of each worker, and how many seconds ago it came; all were asked 2 seconds ago."""
    await asyncio.sleep(1000)
    answers = {name: HealthAnswer(health, 1000 - ago) for name, (health, ago) in newest.items()}
    poller: Any = SimpleNamespace(workers=[make() for make in workers], newest=answers)
    return describe(poller, 998.0, 120.0)


@on_virtual_time
async def test_the_description_names_every_worker_its_activity_and_its_unanswered_calls() -> None:
    text = await described(
        lambda: worker("generation0.0", "generation0.0-0-a", 1.0, generate=130.0, health=2.0),
        lambda: worker("training0.0", "training0.0-0-b", 3.0),
        lambda: worker("reward0.0", "", 44.0, DEAD, score=9.0),
        lambda: worker("critic0.0", "critic0.0-0-c", 31.0),
        newest={"generation0.0": (BUSY, 0.0), "training0.0": (IDLE, 0.0), "critic0.0": (IDLE, 31.0)},
    )
    assert text.splitlines() == [
        "Nothing has moved for 120 s. What every worker does, and which calls it has not answered:",
        "  generation0.0 (generation0.0-0-a): runs generate (group 3) for 130 s; 2 queued; its time so far: busy 10 s",
        "    has not answered generate for 130 s",
        "  training0.0 (training0.0-0-b): waits for calls; 0 queued; its time so far: starved 139 s",
        "  reward0.0 (no instance): reward0.0 does not answer: was killed by SIGKILL; its last answer came 44 s ago",
        "    has not answered score for 9 s",
        "  critic0.0 (critic0.0-0-c): critic0.0 has not answered health, asked 2 s ago; its last answer came 31 s ago; "
        "31 s ago it reported: waits for calls; 0 queued; its time so far: starved 139 s",
        "  The call outstanding for longest is generate: generation0.0 has had it for 130 s.",
    ]


@on_virtual_time
async def test_without_an_outstanding_call_the_description_points_at_the_algorithm() -> None:
    text = await described(lambda: worker("training0.0", "b", 3.0), newest={"training0.0": (IDLE, 0.0)})
    assert "No call is outstanding: the algorithm" in text


@on_virtual_time
async def test_calls_that_wait_for_a_dead_worker_are_no_fault_of_the_algorithm() -> None:
    text = await described(lambda: worker("reward0.0", "", 44.0, DEAD), newest={})
    assert text.endswith("No call is outstanding: calls to reward0.0 wait until it is back.")


# ---- long waits in queues -----------------------------------------------------------------------------------


async def queue_reports(alive: bool = True, **calls: float) -> list[tuple[float, str]]:
    """Watches a worker for 2000 seconds, with calls that came this many seconds before the watch began and are never
    answered; returns after how long something was reported, and what."""
    said: list[tuple[float, str]] = []
    loop = asyncio.get_running_loop()
    began = loop.time()
    busy = worker("reward0.0", "reward0.0-0-a", 0.0, "" if alive else DEAD, **calls)
    busy.service = "reward"
    poller: Any = SimpleNamespace(workers=[busy])
    watch = watch_queues(poller, 600.0, lambda event: said.append((loop.time() - began, event.description)))
    with suppress(TimeoutError):
        async with asyncio.timeout(2000):
            await watch
    return said


@on_virtual_time
async def test_a_long_wait_in_a_queue_is_reported_once_each_deadline() -> None:
    reports = await queue_reports(score=100.0, score_again=0.0, health=0.0)
    assert [when for when, _ in reports] == [600.0, 1200.0, 1800.0]
    assert reports[0][1].startswith("reward0.0 has had score for 700 s, and 2 calls in all: calls wait long")


@on_virtual_time
async def test_a_single_long_call_is_no_queue_and_a_dead_worker_has_none() -> None:
    assert await queue_reports(score=100.0, health=0.0) == []
    assert await queue_reports(alive=False, score=100.0, other=0.0) == []


# ---- stalls ----------------------------------------------------------------------------------------------


@on_virtual_time
async def test_a_fleet_in_which_nothing_moves_is_reported_unless_its_run_is_paused() -> None:
    stalls: list[float] = []
    now = asyncio.get_running_loop().time

    async def poll() -> None:
        pass

    poller: Any = SimpleNamespace(workers=[], poll=poll, newest={})
    watch = watch_for_stalls(poller, SECONDS, lambda event: stalls.append(now()), tuple, lambda: 100 <= now() < 1000)
    with suppress(TimeoutError):
        async with asyncio.timeout(1100):
            await watch
    assert [at for at in stalls if at < 100], "before the pause"
    assert [at for at in stalls if 100 <= at < 1000] == []
    assert min(at for at in stalls if at > 100) >= 1000 + SECONDS / 2, "the time of the pause does not count"

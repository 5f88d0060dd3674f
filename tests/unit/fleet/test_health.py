"""Health on virtual time: workers that hang are found within their bound, and a silent one delays nobody."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
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
from asyncrl.fleet.lifecycle_events import FleetStalled, WorkerHung
from asyncrl.fleet.remote_worker import RemoteWorker
from asyncrl.fleet.replicas import Replicas
from asyncrl.protocols.messages import Health
from asyncrl.protocols.rank_layout import Layout
from asyncrl.protocols.service_contracts import Contract, Lane
from asyncrl.simulation import virtual_loop

SECONDS = 20.0
BOUND = SECONDS * (ROUNDS + 1) / ROUNDS
SCORE = Contract.endpoints["release"]
HOUR = 3600.0


class Instance:
    """A worker that answers calls while it is well; health after `slow` seconds. `silent`: from when to when it is."""

    silence = None

    def __init__(self, slow: float = 0.01) -> None:
        self.lost = asyncio.Event()
        self.slow = slow
        self.silent = (HOUR, HOUR)

    async def call(self, method: str, args: tuple[Any, ...], deadline: float, *, wants_answer: bool = True) -> Any:
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
            watching = tasks.create_task(detect_hangs(scene.poller, SECONDS, scene.kill))
            await script(scene)
            await asyncio.sleep(10 * SECONDS)
            watching.cancel()
            scene.poller.close()
        return scene

    return virtual_loop.run(main())


@pytest.mark.parametrize("service", ["generation", "reward", "training", "critic"])
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


# ---- the poller --------------------------------------------------------------------------------------------

REQUEST_DEADLINE = 10.0


class CountingInstance:
    """Answers health after `slow` seconds, and counts the calls that are outstanding."""

    def __init__(self, service: str, slow: float = 0.01) -> None:
        self.service = service
        self.slow = slow
        self.lost = asyncio.Event()
        self.outstanding = 0
        self.most_outstanding = 0

    async def call(self, method: str, args: tuple[Any, ...], deadline: float, *, wants_answer: bool = True) -> Any:
        self.outstanding += 1
        self.most_outstanding = max(self.most_outstanding, self.outstanding)
        try:
            await asyncio.sleep(min(self.slow, deadline))
        finally:
            self.outstanding -= 1
        if self.slow > deadline:
            raise DeadlineExceeded(f"no {method}")
        return [Health(self.service, 0, 0, f"{self.service}-0", (), 0, {}, 1.0)]

    def stream(self, method: str, args: tuple[Any, ...], deadline: float) -> AsyncIterator[Any]:
        raise NotImplementedError


def polling(script: Callable[[HealthPoller, dict[str, CountingInstance]], Awaitable[None]]) -> None:
    async def main() -> None:
        workers = {name: Replicas(name, 1, Layout()) for name in ("generation", "reward")}
        instances = {name: CountingInstance(name) for name in workers}
        for name, instance in instances.items():
            workers[name].worker(0, 0).connected(f"{name}-0", dict.fromkeys(Lane, instance))
        async with asyncio.TaskGroup() as tasks:
            poller = HealthPoller(workers, REQUEST_DEADLINE, tasks)
            await script(poller, instances)
            poller.close()

    virtual_loop.run(main())


def services(answers: list[Health]) -> list[str]:
    return [health.service for health in answers]


def test_a_silent_worker_delays_the_metrics_lines_but_a_little_and_is_asked_again() -> None:
    async def script(poller: HealthPoller, instances: dict[str, CountingInstance]) -> None:
        loop = asyncio.get_running_loop()
        waited = 0.0
        complete = 0
        instances["reward"].slow = 1000.0
        while loop.time() < 120:
            if loop.time() > 100:
                instances["reward"].slow = 0.01
            began = loop.time()
            answered = services(await poller.poll())
            assert "generation" in answered
            waited += loop.time() - began
            complete += len(answered) == 2
            await asyncio.sleep(0.2)
        assert waited <= 120 * 0.25
        assert complete >= 40

    polling(script)


def test_callers_share_one_call_to_a_worker() -> None:
    async def script(poller: HealthPoller, instances: dict[str, CountingInstance]) -> None:
        instances["reward"].slow = 1.0
        poller.request()
        answers = await asyncio.gather(poller.poll(), poller.poll())
        assert [services(each) for each in answers] == [["generation", "reward"]] * 2
        assert instances["reward"].most_outstanding == 1

    polling(script)


def test_the_newest_answer_is_kept_and_an_old_one_is_not_returned_as_new() -> None:
    async def script(poller: HealthPoller, instances: dict[str, CountingInstance]) -> None:
        await poller.poll()
        answered_at = poller.newest["reward0.0"].received_at
        instances["reward"].slow = 1000.0
        await asyncio.sleep(5)
        assert services(await poller.poll()) == ["generation"]
        assert asyncio.get_running_loop().time() == 5 + 0.01 + HEALTH_TIMEOUT
        assert poller.newest["reward0.0"].received_at == answered_at

    polling(script)


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


def described(*workers: Callable[[], Any], newest: dict[str, tuple[Health, float]]) -> str:
    """`newest`: health of each worker, and how many seconds ago it came; all were asked 2 seconds ago."""

    async def main() -> str:
        await asyncio.sleep(1000)
        answers = {name: HealthAnswer(health, 1000 - ago) for name, (health, ago) in newest.items()}
        poller: Any = SimpleNamespace(workers=[make() for make in workers], newest=answers)
        return describe(poller, 998.0, 120.0)

    return virtual_loop.run(main())


def test_the_description_names_every_worker_its_activity_and_its_unanswered_calls() -> None:
    text = described(
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


def test_without_an_outstanding_call_the_description_points_at_the_algorithm() -> None:
    text = described(lambda: worker("training0.0", "b", 3.0), newest={"training0.0": (IDLE, 0.0)})
    assert "No call is outstanding: the algorithm" in text


def test_calls_that_wait_for_a_dead_worker_are_no_fault_of_the_algorithm() -> None:
    text = described(lambda: worker("reward0.0", "", 44.0, DEAD), newest={})
    assert text.endswith("No call is outstanding: calls to reward0.0 wait until it is back.")


# ---- long waits in queues -----------------------------------------------------------------------------------


def queue_reports(alive: bool = True, **calls: float) -> list[tuple[float, str]]:
    """Watches a worker for 2000 seconds, with calls that came this many seconds before the watch began and are never
    answered; returns when something was reported, and what."""

    async def main() -> list[tuple[float, str]]:
        said: list[tuple[float, str]] = []
        loop = asyncio.get_running_loop()
        busy = worker("reward0.0", "reward0.0-0-a", 0.0, "" if alive else DEAD, **calls)
        busy.service = "reward"
        poller: Any = SimpleNamespace(workers=[busy])
        watching = asyncio.ensure_future(
            watch_queues(poller, 600.0, lambda event: said.append((loop.time(), event.description)))
        )
        await asyncio.sleep(2000)
        watching.cancel()
        return said

    return virtual_loop.run(main())


def test_a_long_wait_in_a_queue_is_reported_once_each_deadline() -> None:
    reports = queue_reports(score=100.0, score_again=0.0, health=0.0)
    assert [when for when, _ in reports] == [600.0, 1200.0, 1800.0]
    assert reports[0][1].startswith("reward0.0 has had score for 700 s, and 2 calls in all: calls wait long")


def test_a_single_long_call_is_no_queue_and_a_dead_worker_has_none() -> None:
    assert queue_reports(score=100.0, health=0.0) == []
    assert queue_reports(alive=False, score=100.0, other=0.0) == []


# ---- stalls ----------------------------------------------------------------------------------------------


def test_a_fleet_in_which_nothing_moves_is_reported_unless_its_run_is_paused() -> None:
    stalls: list[float] = []

    async def poll() -> None:
        pass

    async def main() -> None:
        now = asyncio.get_running_loop().time
        poller: Any = SimpleNamespace(workers=[], poll=poll, newest={})

        def emit(event: FleetStalled) -> None:
            stalls.append(now())

        watch = watch_for_stalls(poller, SECONDS, emit, tuple, lambda: 100 <= now() < 1000)
        task = asyncio.ensure_future(watch)
        await asyncio.sleep(1100)
        task.cancel()

    virtual_loop.run(main())
    assert [at for at in stalls if at < 100], "before the pause"
    assert [at for at in stalls if 100 <= at < 1000] == []
    assert min(at for at in stalls if at > 100) >= 1000 + SECONDS / 2, "the time of the pause does not count"

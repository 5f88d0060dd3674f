"""Watches a running fleet: asks workers for their health, finds workers that hang, and describes a fleet that stalls.

A worker whose compute thread is busy answers from its event loop; a stopped process or a blocked event loop does not
answer. Hang detection counts rounds of asking in place of seconds: a round in which the machine was suspended, our own
event loop came late, or no worker answered at all proves nothing.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.concurrency import start_task
from asyncrl.errors import AsyncrlError, DeadlineExceeded
from asyncrl.fleet.lifecycle_events import CallsWait, FleetStalled, WorkerHung
from asyncrl.fleet.remote_worker import RemoteWorker
from asyncrl.fleet.replicas import Replicas
from asyncrl.protocols.messages import Health
from asyncrl.protocols.service_contracts import Contract

HEALTH = Contract.endpoints["health"]
HEALTH_TIMEOUT = 2.0
"""Seconds that a report waits for health, which a worker with a responsive event loop returns within 50 ms."""
ROUNDS = 4
"""Consecutive rounds without an answer after which a worker counts as hung."""
MIN_SECONDS = 5.0
"""Shortest silence that counts: on a crowded machine a healthy worker may not be scheduled for a second."""
LATE = 1.5
"""A round that took this many times its length does not count."""
CHECKS = 4
"""Checks for progress, and for long waits in queues, per period of a watchdog."""

PACKAGE = Path(__file__).parents[1]
ALGORITHMS = PACKAGE / "algorithms"
NOT_ALGORITHMS = (ALGORITHMS / "algorithm_by_name.py", Path(asyncio.__file__).parent)


class HealthAnswer(NamedTuple):
    """The newest health of a worker. received_at: loop time."""

    health: Health
    received_at: float


class HealthRequest(NamedTuple):
    """A health call that is repeated until it is answered. sent_at: loop time of the first try."""

    sent_at: float
    task: asyncio.Task[None]


class HealthPoller:
    """Keeps the newest health of every worker. At most one health call to an instance is outstanding at a time.

    Hang detection, the stall watchdog and the metrics lines share one poller. services: workers by service. deadline:
    seconds after which a call that is not answered is repeated. tasks: runs the calls; `close` comes before its end.
    """

    def __init__(self, services: Mapping[str, Replicas], deadline: float, tasks: asyncio.TaskGroup) -> None:
        self._services = services
        self.newest: dict[str, HealthAnswer] = {}
        self._deadline = deadline
        self._tasks = tasks
        self._requests: dict[str, HealthRequest] = {}

    @property
    def workers(self) -> tuple[RemoteWorker, ...]:
        """Returns all workers that are to run now."""
        return tuple(worker for replicas in self._services.values() for worker in replicas)

    def request(self) -> None:
        """Asks every live worker until it answers or is lost; returns at once. Asks none while the fleet ends."""
        now = asyncio.get_running_loop().time()
        for worker in self.workers:
            if worker.alive and worker.instance not in self._requests:
                try:
                    task = start_task(self._tasks, self._ask(worker, worker.instance), f"health of {worker.name}")
                except RuntimeError:
                    return
                self._requests[worker.instance] = HealthRequest(now, task)

    async def poll(self) -> list[Health]:
        """Returns the health of every live worker that answers within HEALTH_TIMEOUT. Waits only once for a silent
        worker: later polls leave it out until it has answered."""
        began = asyncio.get_running_loop().time()
        self.request()
        expected = [request.task for request in self._requests.values() if began - request.sent_at < HEALTH_TIMEOUT]
        if expected:
            await asyncio.wait(expected, timeout=HEALTH_TIMEOUT)
        answers = [self.newest[worker.name] for worker in self.workers if worker.alive and worker.name in self.newest]
        return [answer.health for answer in answers if answer.received_at >= began]

    def close(self) -> None:
        for request in self._requests.values():
            request.task.cancel()

    async def _ask(self, worker: RemoteWorker, instance: str) -> None:
        try:
            while True:
                with suppress(DeadlineExceeded):
                    (health,) = await worker.call(HEALTH, (), self._deadline)
                    self.newest[worker.name] = HealthAnswer(health, asyncio.get_running_loop().time())
                    return
        except AsyncrlError:
            return  # The worker is lost; its next instance is asked by the next request.
        finally:
            del self._requests[instance]


def round_seconds(seconds: float) -> float:
    """Returns the length of a round such that a silence of `seconds` spans ROUNDS of them."""
    return max(seconds, MIN_SECONDS) / ROUNDS


async def detect_hangs(poller: HealthPoller, seconds: float, emit: Callable[[WorkerHung], None]) -> None:
    """Emits WorkerHung for a worker that answered nothing for `seconds`, within (ROUNDS + 1) / ROUNDS of them; runs
    until cancelled. Workers that are starting are not asked: they have a start deadline."""
    loop = asyncio.get_running_loop()
    length = round_seconds(seconds)
    silent_rounds: dict[str, int] = {}
    await asyncio.sleep(length)
    while True:
        began = loop.time()
        asked = {worker.instance: worker for worker in poller.workers if worker.alive}
        poller.request()
        await asyncio.sleep(length)
        silent = [
            worker
            for instance, worker in asked.items()
            if worker.alive and worker.instance == instance and worker.last_answer_at < began
        ]
        if loop.time() - began > LATE * length or len(silent) == len(asked):
            silent = []
        silent_rounds = {worker.instance: silent_rounds.get(worker.instance, 0) + 1 for worker in silent}
        for worker in silent:
            if silent_rounds[worker.instance] == ROUNDS:
                emit(WorkerHung(worker.service, worker.instance, ROUNDS * length))


async def watch_for_stalls(
    poller: HealthPoller,
    seconds: float,
    emit: Callable[[FleetStalled], None],
    describe_algorithm: Callable[[], Sequence[str]],
    is_paused: Callable[[], bool] = bool,
) -> None:
    """Emits FleetStalled when no worker has answered a call or sent an item for `seconds`, and again after as long;
    runs until cancelled. Health calls do not count, nor does the time in which the run is paused."""
    loop = asyncio.get_running_loop()
    answers = -1
    since = loop.time()
    while True:
        if (now := sum(worker.answer_count for worker in poller.workers)) != answers or is_paused():
            answers = now
            since = loop.time()
        elif (stalled := loop.time() - since) >= seconds:
            began = loop.time()
            await poller.poll()
            emit(FleetStalled(describe(poller, began, stalled, describe_algorithm())))
            since = loop.time()
        await asyncio.sleep(seconds / CHECKS)


async def watch_queues(poller: HealthPoller, seconds: float, emit: Callable[[CallsWait], None]) -> None:
    """Emits CallsWait for a service of which a live worker, with several calls, has not answered one for `seconds`, and
    again after as long; runs until cancelled. Deadlines count work alone, so none of them ends a wait in a queue."""
    loop = asyncio.get_running_loop()
    reported: dict[str, float] = {}
    while True:
        await asyncio.sleep(seconds / CHECKS)
        now = loop.time()
        for worker in poller.workers:
            calls = [call for call in worker.outstanding.values() if call.method not in ("health", "profile")]
            if not worker.alive or len(calls) < 2 or now - reported.get(worker.service, -seconds) < seconds:
                continue
            oldest = min(calls, key=lambda call: call.since)
            if (waited := now - oldest.since) >= seconds:
                reported[worker.service] = now
                emit(CallsWait(_queue_report(worker, oldest.method, waited, len(calls))))


def _queue_report(worker: RemoteWorker, method: str, waited: float, calls: int) -> str:
    return (
        f"{worker.name} has had {method} for {waited:.0f} s, and {calls} calls in all: calls wait long for their turn, "
        f"and no deadline ends that. More replicas of {worker.service}, or a smaller staleness.limit, shorten its queue"
    )


def describe(poller: HealthPoller, began: float, stalled: float, algorithm: Sequence[str] = ()) -> str:
    """Returns the state of the fleet as text: each worker with its activity and the calls it has not answered.

    began: loop time at which all workers were asked for their health. stalled: seconds since the last answer to a call.
    algorithm: lines about the algorithm that calls the workers.
    """
    now = asyncio.get_running_loop().time()
    lines = [f"Nothing has moved for {stalled:.0f} s. What every worker does, and which calls it has not answered:"]
    calls: list[tuple[float, str, str]] = []
    for worker in poller.workers:
        lines.append(f"  {worker.name} ({worker.instance or 'no instance'}): {_activity(poller, worker, began)}")
        waited = [(now - call.since, call.method) for call in worker.outstanding.values() if call.method != "health"]
        lines += [f"    has not answered {method} for {seconds:.0f} s" for seconds, method in waited]
        calls += [(seconds, worker.name, method) for seconds, method in waited]
    lines += [f"  {line}" for line in algorithm]
    if calls:
        longest, name, method = max(calls)
        lines.append(f"  The call outstanding for longest is {method}: {name} has had it for {longest:.0f} s.")
    elif dead := [worker.name for worker in poller.workers if not worker.alive]:
        lines.append(f"  No call is outstanding: calls to {', '.join(dead)} wait until it is back.")
    else:
        lines.append("  No call is outstanding: the algorithm, which should make the next one, does not.")
    return "\n".join(lines)


def _activity(poller: HealthPoller, worker: RemoteWorker, began: float) -> str:
    """Returns one clause about what the worker does, or why that is unknown and what it reported last."""
    now = asyncio.get_running_loop().time()
    newest = poller.newest.get(worker.name)
    reported = ""
    if newest is not None:
        health = newest.health
        times = ", ".join(f"{state} {spent:.0f} s" for state, spent in health.seconds.items() if spent >= 0.5)
        doing = f"runs {'; '.join(health.doing)}" if health.doing else "waits for calls"
        reported = f"{doing}; {health.queued} queued; its time so far: {times or 'none'}"
    if not worker.alive:
        problem = worker.status
    elif newest is None or newest.received_at < began:
        problem = f"{worker.name} has not answered health, asked {now - began:.0f} s ago"
    else:
        return reported
    problem += f"; its last answer came {now - worker.last_answer_at:.0f} s ago"
    return problem if newest is None else f"{problem}; {now - newest.received_at:.0f} s ago it reported: {reported}"


def where_task_waits(task: "asyncio.Task[Any]") -> str:
    """Returns `FILE, line N` of the innermost call of an algorithm that the task awaits, "" when there is none."""
    found = ""
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame: Any = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
        if frame is not None:
            file = Path(frame.f_code.co_filename)
            ours = file.is_relative_to(PACKAGE) and not file.is_relative_to(ALGORITHMS)
            if not ours and not any(file.is_relative_to(place) for place in NOT_ALGORITHMS):
                found = f"{file}, line {frame.f_lineno}"
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
    return found

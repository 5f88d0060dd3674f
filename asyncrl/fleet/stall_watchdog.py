"""Describes what every worker does, and which calls are outstanding, when no call was answered for a while."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.fleet.health_poller import HealthPoller
from asyncrl.fleet.lifecycle_events import FleetStalled
from asyncrl.fleet.replicas import RemoteWorker
from asyncrl.protocols.messages import Health

CHECKS = 4
"""Checks for progress per period."""

PACKAGE = Path(__file__).parents[1]
ALGORITHMS = PACKAGE / "algorithms"
NOT_ALGORITHMS = (ALGORITHMS / "custom.py", Path(asyncio.__file__).parent)


@dataclass(frozen=True, slots=True)
class UnansweredCall:
    """A call that a worker has not answered for `seconds`."""

    method: str
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """Holds the state of one worker. health: its newest one, None before the first; health_age: seconds since then.
    problem: why it does not answer now, empty when it does. silent: seconds since its last answer to any call."""

    worker: str
    instance: str
    health: Health | None
    health_age: float
    problem: str
    silent: float
    unanswered: tuple[UnansweredCall, ...]


def describe(statuses: list[WorkerStatus], seconds: float, algorithm: Sequence[str] = ()) -> str:
    """Returns the state of the fleet as text: each worker with its activity and the calls it has not answered.

    algorithm: lines about the algorithm that calls the workers.
    """
    lines = [f"Nothing has moved for {seconds:.0f} s. What every worker does, and which calls it has not answered:"]
    for status in statuses:
        lines.append(f"  {status.worker} ({status.instance or 'no instance'}): {_activity(status)}")
        lines += [f"    has not answered {call.method} for {call.seconds:.0f} s" for call in status.unanswered]
    return "\n".join([*lines, *(f"  {line}" for line in algorithm), _longest_call(statuses)])


def _activity(status: WorkerStatus) -> str:
    if not status.problem and status.health is not None:
        return _reported_activity(status.health)
    problem = f"{status.problem}; its last answer came {status.silent:.0f} s ago"
    if status.health is None:
        return problem
    return f"{problem}; {status.health_age:.0f} s ago it reported: {_reported_activity(status.health)}"


def _reported_activity(health: Health) -> str:
    times = ", ".join(f"{state} {spent:.0f} s" for state, spent in health.seconds.items() if spent >= 0.5)
    activity = f"runs {'; '.join(health.doing)}" if health.doing else "waits for calls"
    return f"{activity}; {health.queued} queued; its time so far: {times or 'none'}"


def _longest_call(statuses: list[WorkerStatus]) -> str:
    calls = [(call.seconds, status.worker, call.method) for status in statuses for call in status.unanswered]
    if not calls:
        return "  No call is outstanding: the algorithm, which should make the next one, does not."
    seconds, worker, method = max(calls)
    return f"  The call outstanding for longest is {method}: {worker} has had it for {seconds:.0f} s."


class StallWatchdog:
    """Emits FleetStalled when no worker has answered a call or sent an item for `seconds`, and again after as long.

    Health calls do not count. algorithm: returns lines about the algorithm that calls the workers.
    """

    def __init__(
        self,
        poller: HealthPoller,
        seconds: float,
        emit: Callable[[FleetStalled], None],
        algorithm: Callable[[], Sequence[str]],
    ) -> None:
        self._poller = poller
        self._seconds = seconds
        self._emit = emit
        self._algorithm = algorithm

    async def run(self) -> None:
        """Runs until cancelled."""
        loop = asyncio.get_running_loop()
        answers = self._answers()
        since = loop.time()
        while True:
            await asyncio.sleep(self._seconds / CHECKS)
            if (now := self._answers()) != answers:
                answers = now
                since = loop.time()
            elif loop.time() - since >= self._seconds:
                self._emit(FleetStalled(await self.describe_fleet(loop.time() - since)))
                since = loop.time()

    def _answers(self) -> int:
        return sum(worker.answer_count for worker in self._poller.workers)

    async def describe_fleet(self, seconds: float) -> str:
        """Polls the health of all workers and returns their state as text."""
        began = asyncio.get_running_loop().time()
        await self._poller.poll()
        return describe([self._status(worker, began) for worker in self._poller.workers], seconds, self._algorithm())

    def _status(self, worker: RemoteWorker, began: float) -> WorkerStatus:
        now = asyncio.get_running_loop().time()
        newest = self._poller.newest.get(worker.name)
        problem = ""
        if not worker.alive:
            problem = worker.status
        elif newest is None or newest.received_at < began:
            problem = f"{worker.name} did not answer health within {now - began:.0f} s"
        return WorkerStatus(
            worker=worker.name,
            instance=worker.instance,
            health=newest.health if newest else None,
            health_age=now - newest.received_at if newest else 0.0,
            problem=problem,
            silent=now - worker.last_answer_at,
            unanswered=tuple(
                UnansweredCall(call.method, now - call.since)
                for call in worker.outstanding.values()
                if call.method != "health"
            ),
        )


def where_task_waits(task: "asyncio.Task[Any]") -> str:
    """Returns `FILE, line N` of the innermost call of an algorithm that the task awaits, "" when there is none."""
    found = ""
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame: Any = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
        if frame is not None and _is_algorithm_file(Path(frame.f_code.co_filename)):
            found = f"{frame.f_code.co_filename}, line {frame.f_lineno}"
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
    return found


def _is_algorithm_file(file: Path) -> bool:
    ours = file.is_relative_to(PACKAGE) and not file.is_relative_to(ALGORITHMS)
    return not ours and not any(file.is_relative_to(place) for place in NOT_ALGORITHMS)

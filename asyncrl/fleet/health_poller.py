"""Asks workers for their health. Hang detection, the stall watchdog and the metrics lines share one poller."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from asyncrl.errors import AsyncrlError, DeadlineExceeded
from asyncrl.fleet.replicas import RemoteWorker, Replicas
from asyncrl.protocols.contracts import Contract
from asyncrl.protocols.messages import Health

HEALTH = Contract.endpoints["health"]
HEALTH_TIMEOUT = 2.0
"""Seconds that a report waits for health, which a worker with a responsive event loop returns within 50 ms."""


@dataclass(frozen=True, slots=True)
class HealthAnswer:
    """The newest health of an instance. received_at: loop time."""

    instance: str
    health: Health
    received_at: float


@dataclass(slots=True)
class HealthRequest:
    """A health call that is outstanding, and is repeated when it is not answered. sent_at, until: loop times of the
    first call and of the end of the last one."""

    sent_at: float
    until: float
    task: asyncio.Task[None]


class HealthPoller:
    """Keeps the newest health of every worker. At most one health call to an instance is outstanding at a time.

    Args:
        services: workers by service.
        deadline: seconds for which `request` asks a worker that does not answer.
        tasks: group that runs the calls; call `close` before leaving it.
    """

    def __init__(self, services: Mapping[str, Replicas], deadline: float, tasks: asyncio.TaskGroup) -> None:
        self.workers = tuple(worker for replicas in services.values() for worker in replicas)
        self.newest: dict[str, HealthAnswer] = {}
        self._deadline = deadline
        self._tasks = tasks
        self._requests: dict[str, HealthRequest] = {}

    def request(self) -> None:
        """Asks every live worker until it answers or `deadline` seconds have passed; returns at once."""
        now = asyncio.get_running_loop().time()
        until = now + self._deadline
        for worker in self.workers:
            if worker.alive and worker.instance in self._requests:
                self._requests[worker.instance].until = until
            elif worker.alive:
                task = self._tasks.create_task(self._ask(worker, worker.instance), name=f"health of {worker.name}")
                self._requests[worker.instance] = HealthRequest(now, until, task)

    async def poll(self, timeout: float = HEALTH_TIMEOUT) -> list[Health]:
        """Returns the health of every live worker that answers within `timeout` seconds.

        Waits only once for a silent worker: later polls leave it out until it has answered.
        """
        began = asyncio.get_running_loop().time()
        self.request()
        expected = [request.task for request in self._requests.values() if began - request.sent_at < timeout]
        if expected:
            await asyncio.wait(expected, timeout=timeout)
        answers = [self.newest[worker.name] for worker in self.workers if worker.alive and worker.name in self.newest]
        return [answer.health for answer in answers if answer.received_at >= began]

    def close(self) -> None:
        """Cancels outstanding calls."""
        for request in self._requests.values():
            request.task.cancel()

    async def _ask(self, worker: RemoteWorker, instance: str) -> None:
        now = asyncio.get_running_loop().time
        request = self._requests[instance]
        try:
            while (left := request.until - now()) > 0:
                with suppress(DeadlineExceeded):
                    (health,) = await worker.call(HEALTH, (), left)
                    self.newest[worker.name] = HealthAnswer(instance, health, now())
                    return
        except AsyncrlError:
            return  # The worker is lost; its next instance is asked by the next request.
        finally:
            del self._requests[instance]

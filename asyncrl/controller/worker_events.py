"""Brings the events of workers to the controller."""

import asyncio

from asyncrl.controller.controller import Controller
from asyncrl.fleet.fleet import RunningFleet
from asyncrl.fleet.lifecycle_events import FleetEvent, WorkerCleanedUp, WorkerLost, WorkerStarted


class WorkerEvents:
    """Notifies the controller at once that a worker started or is lost; `follow` does what has to be awaited, in order.

    The queue is bounded by the deaths of workers, each of which is followed by a pause.
    """

    def __init__(self, running: RunningFleet, controller: Controller) -> None:
        self._controller = controller
        self._training = running.fleet.training
        self._workers = running.workers
        self._queue: asyncio.Queue[WorkerStarted | WorkerCleanedUp] = asyncio.Queue()
        for service, workers in running.workers.items():
            for worker in workers:
                if worker.alive:
                    controller.worker_lives(service, worker.instance)
        running.subscribers.append(self._take)

    def _take(self, event: FleetEvent) -> None:
        match event:
            case WorkerStarted(service, instance):
                self._controller.worker_lives(service, instance)
                self._queue.put_nowait(event)
            case WorkerLost(service, instance, reason):
                self._controller.worker_lost(instance, reason, self._workers[service].groups_at(instance))
            case WorkerCleanedUp("generation"):
                self._queue.put_nowait(event)
            case _:
                pass

    async def follow(self) -> None:
        """Runs until cancelled. A generation worker reads no weights any more only once its process was waited for."""
        while True:
            match await self._queue.get():
                case WorkerStarted(service):
                    await self._controller.worker_started(service)
                case WorkerCleanedUp(_, instance):
                    await self._training.detached(instance)

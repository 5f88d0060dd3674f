"""What happens to workers, brought to the controller."""

import asyncio

from asyncrl.controller import Controller
from asyncrl.fleet import RunningFleet

Item = tuple[str, str, str]


class News:
    """Tells the controller at once that a worker is lost; what has to be awaited is done by `follow`, in order.

    What waits here is bounded by the deaths of workers, of which each is followed by a pause.
    """

    def __init__(self, running: RunningFleet, controller: Controller) -> None:
        self._controller, self._training, self._workers = controller, running.fleet.training, running.workers
        self._waiting: asyncio.Queue[Item] = asyncio.Queue()
        for service, workers in running.workers.items():
            for worker in workers:
                if worker.lives:
                    controller.worker_lives(service, worker.instance)
        running.on_lives.append(self._lives)
        running.on_lost.append(self._lost)
        running.on_gone.append(lambda service, instance: self._waiting.put_nowait(("gone", service, instance)))

    def _lives(self, service: str, instance: str) -> None:
        self._controller.worker_lives(service, instance)
        self._waiting.put_nowait(("lives", service, instance))

    def _lost(self, service: str, instance: str, why: str) -> None:
        self._controller.worker_lost(instance, why, self._workers[service].groups_at(instance))

    async def follow(self) -> None:
        """For ever. Only a process that was waited for surely reads no weights any more."""
        while True:
            kind, service, instance = await self._waiting.get()
            if kind == "lives":
                await self._controller.worker_started(service)
            elif service == "generation":
                await self._training.detached(instance)

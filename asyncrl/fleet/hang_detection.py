"""Finds workers that hang: their process is alive, but they answer no call, not even for their health.

Every worker is asked for its health all the time. A worker whose compute thread is busy answers from its event loop; a
stopped process or a blocked event loop does not answer. Rounds of asking are counted in place of seconds: a round in
which the machine was suspended, our own event loop came late, or no worker answered at all proves nothing.
"""

import asyncio
from collections.abc import Callable, Collection

from asyncrl.fleet.health_poller import HealthPoller
from asyncrl.fleet.lifecycle_events import WorkerHung
from asyncrl.fleet.replicas import RemoteWorker

ROUNDS = 4
"""Consecutive rounds without an answer after which a worker counts as hung."""
MIN_SECONDS = 5.0
"""Shortest silence that counts: on a crowded machine a healthy worker may not be scheduled for a second."""
LATE = 1.5
"""A round that took this many times its length does not count."""


def round_seconds(seconds: float) -> float:
    """Returns the length of a round such that a silence of `seconds` spans ROUNDS of them."""
    return max(seconds, MIN_SECONDS) / ROUNDS


class HangDetection:
    """Emits WorkerHung for a worker of one of `services` that answered nothing for `seconds`.

    A hung worker is found within (ROUNDS + 1) / ROUNDS of `seconds`. Workers that are starting are not asked: they have
    a start deadline.
    """

    def __init__(
        self, poller: HealthPoller, services: Collection[str], seconds: float, emit: Callable[[WorkerHung], None]
    ) -> None:
        self._poller = poller
        self._services = services
        self._round = round_seconds(seconds)
        self._emit = emit
        self._silent_rounds: dict[str, int] = {}

    async def run(self) -> None:
        """Runs until cancelled."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._round)
        while True:
            began = loop.time()
            asked = {worker.instance: worker for worker in self._poller.workers if worker.alive}
            self._poller.request()
            await asyncio.sleep(self._round)
            silent = [worker for instance, worker in asked.items() if _is_silent(worker, instance, began)]
            if loop.time() - began > LATE * self._round or len(silent) == len(asked):
                silent = []
            self._count(silent)

    def _count(self, silent: Collection[RemoteWorker]) -> None:
        self._silent_rounds = {worker.instance: self._silent_rounds.get(worker.instance, 0) + 1 for worker in silent}
        for worker in silent:
            if self._silent_rounds[worker.instance] == ROUNDS and worker.service in self._services:
                self._emit(WorkerHung(worker.service, worker.instance, ROUNDS * self._round))


def _is_silent(worker: RemoteWorker, instance: str, since: float) -> bool:
    return worker.alive and worker.instance == instance and worker.last_answer_at < since

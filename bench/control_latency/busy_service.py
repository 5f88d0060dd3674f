"""Serves the worker that `asyncrl-bench lanes` loads: work calls that train, and control calls that overtake them.

Worker processes import this module.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable

import numpy as np

from asyncrl.fleet.worker.service import Service
from asyncrl.protocols.distribute_collect import ONE_OF, ONE_TO_ALL
from asyncrl.protocols.messages import Boundary
from asyncrl.protocols.service_contracts import Contract, Lane, endpoint

ROWS = 32
PROMPT = 16
RESPONSE = 48
"""A training step of about a quarter of a second on one core with the quickstart's model."""
BUSY_SECONDS = 0.25


class Busy(Contract):
    """Declares endpoints of the work lane and of the control lane."""

    @endpoint(ONE_OF)
    async def step(self) -> None:
        """Runs one step on the compute thread, after the steps that were queued before."""
        raise NotImplementedError

    @endpoint(ONE_OF, stream=True)
    def samples(self, number: int) -> AsyncIterator[int]:
        """Yields `number` once and then waits until the caller closes the stream."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL)
    async def aborted(self, number: int) -> Boundary:
        """Returns once stream `number` is closed."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL)
    async def pause(self) -> Boundary:
        """Begins no further step."""
        raise NotImplementedError

    @endpoint(ONE_TO_ALL, lane=Lane.CONTROL)
    async def resume(self) -> Boundary:
        raise NotImplementedError


class BusyService(Service, Busy):
    """Runs queued steps. options: `load`: "torch" for steps of the training engine, "python" for a thread that does not
    release the GIL."""

    async def start(self) -> None:
        self._steps = 0
        self._may_run = threading.Event()
        self._may_run.set()
        self._closed: dict[int, asyncio.Event] = {}
        make = {"torch": self._training, "python": lambda: _busy}[self.context.spec.options["load"]]
        self._work: Callable[[int], None] = await self.context.compute.run(make)

    def _training(self) -> Callable[[int], None]:
        """Makes a function that runs one step of the training engine on random rows."""
        from asyncrl.engines.training.policy_trainer import PolicyTrainer
        from asyncrl.engines.training.train_rows import TrainRow
        from asyncrl.engines.training.training_step import run_step

        engine = PolicyTrainer(self.context.config, self.context.facts.model_dir)
        tokens = np.random.default_rng(0).integers(1, 8, (ROWS, PROMPT + RESPONSE))

        def step(number: int) -> None:
            logprobs = np.full(RESPONSE, -2.0, np.float32)
            versions = np.full(RESPONSE, number)
            rows = [
                TrainRow(index, 0, 0, 0, row[:PROMPT], row[PROMPT:], logprobs, versions, float(index % 2) - 0.5)
                for index, row in enumerate(tokens)
            ]
            run_step(engine, rows, 0, number)

        return step

    async def step(self) -> None:
        def run() -> None:
            self._may_run.wait(timeout=10.0)
            self._work(self._steps)
            self._steps += 1

        await self.context.compute.run(run)

    async def samples(self, number: int) -> AsyncIterator[int]:
        closed = self._closed[number] = asyncio.Event()
        try:
            yield number
            await asyncio.Event().wait()
        finally:
            closed.set()

    async def aborted(self, number: int) -> Boundary:
        await self._closed[number].wait()
        del self._closed[number]
        return Boundary("call", self._steps)

    async def pause(self) -> Boundary:
        self._may_run.clear()
        return Boundary("training step", self._steps)

    async def resume(self) -> Boundary:
        self._may_run.set()
        return Boundary("training step", self._steps)


def _busy(number: int) -> None:
    """Computes in Python, so that the thread holds the GIL until the interpreter switches threads."""
    until = time.monotonic() + BUSY_SECONDS
    while time.monotonic() < until:
        number = number * 5 % 7

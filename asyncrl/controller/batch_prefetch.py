"""Prefetch of the next batch: the trainer reads rows while it still trains, instead of waiting for them later.

The prefetch is a guess and binds no one: after the iteration the gate picks as it would have picked without. The
trainer looks for the rows of a step among those that it has read, and reads again what is not among them.
"""

import asyncio

from asyncrl.controller.iterations import Iterations
from asyncrl.controller.observers.events import PrefetchFailed
from asyncrl.controller.sample_tracker import SampleTracker
from asyncrl.errors import AsyncrlError, DeadlineExceeded, PeerLost
from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.contracts import Training


class BatchPrefetch:
    """Has the trainer prefetch once in an iteration, as soon as the samples of the next batch are ready.

    An error of the trainer ends the prefetch, never the run.
    """

    def __init__(self, training: Training, tracker: SampleTracker, iterations: Iterations) -> None:
        self._training = training
        self._tracker = tracker
        self._iterations = iterations
        self._changed = asyncio.Event()
        self._wanted = False

    def iteration_began(self) -> None:
        """Wants the batch after the one that trains now."""
        self._wanted = True
        self._changed.set()

    def state_changed(self) -> None:
        """Looks again whether enough samples are ready."""
        if self._wanted:
            self._changed.set()

    async def run(self) -> None:
        """Runs until cancelled, or until the trainer fails to prefetch."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            running = self._iterations.cuts is not None
            if not (self._wanted and running and (rows := self._tracker.preview())):
                continue
            self._wanted = False
            try:
                await self._training.prefetch(BatchRef(tuple(rows)))
            except (PeerLost, DeadlineExceeded):
                continue  # The loss of the trainer ends the run elsewhere; a slow trainer reads the rows in its step.
            except AsyncrlError as error:
                self._tracker.observe(PrefetchFailed(str(error)))
                return

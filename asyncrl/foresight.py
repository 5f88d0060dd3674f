"""What trains next, told to the trainer while it still trains: it reads rows then that it would wait for later.

A guess that binds nobody: what trains is what the gate picks once the iteration is over. When it is what was foreseen,
the step is asked for without saying where its rows lie, for the trainer has them.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from asyncrl.a_moment import a_moment
from asyncrl.errors import DeadlineExceeded, LostRows, PeerLost
from asyncrl.protocols.batch import BatchRef, Cuts
from asyncrl.protocols.contracts import Training
from asyncrl.protocols.messages import StepReport

Held = tuple[BatchRef, BatchRef]
"""A batch that the trainer has read, and the same without places."""


class Foresight:
    """Foresees once in an iteration, as soon as enough samples are ready. foresee: see Iterations.

    training: the trainer for a page, whose `step` sends no more than is needed.
    """

    def __init__(self, training: Training, foresee: Callable[[], BatchRef | None]) -> None:
        self.training = cast(Training, _Training(training, self))
        self._trainer, self._foresee = training, foresee
        self._changed = asyncio.Event()
        self._waiting = False
        self._held: Held | None = None

    def began(self) -> None:
        """Another iteration: look out for the one after it."""
        self._waiting = True
        self._changed.set()

    def moved(self) -> None:
        """Perhaps enough samples are ready now."""
        if self._waiting:
            self._changed.set()

    async def run(self) -> None:
        """For ever."""
        while True:
            await self._changed.wait()
            await a_moment()
            self._changed.clear()
            if self._waiting and (batch := self._foresee()) is not None:
                self._waiting = False
                await self._tell(batch)

    async def _tell(self, batch: BatchRef) -> None:
        self._held = None
        try:
            held = await self._trainer.foresee(batch)
        except (PeerLost, DeadlineExceeded):
            return  # A trainer that is lost ends the run elsewhere; a slow one reads in its step.
        if all(held):
            self._held = batch, BatchRef(tuple([row.lying_at(()) for row in batch]))

    def shortened(self, cuts: Cuts) -> Cuts | None:
        """The cuts by name, if the trainer has read this batch."""
        if self._held is None or cuts.batch is not self._held[0]:
            return None
        return replace(cuts, batch=self._held[1])


class _Training:
    """A trainer's handle with a `step` that knows what was foreseen."""

    def __init__(self, trainer: Training, foresight: Foresight) -> None:
        self._trainer, self._foresight = trainer, foresight

    def __getattr__(self, name: str) -> object:
        return getattr(self._trainer, name)

    async def step(self, cuts: Cuts) -> StepReport:
        if (shortened := self._foresight.shortened(cuts)) is None:
            return await self._trainer.step(cuts)
        try:
            return await self._trainer.step(shortened)
        except LostRows:
            return await self._trainer.step(cuts)

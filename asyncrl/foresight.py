"""What trains next, told to the trainer while it still trains: it reads rows then that it would wait for later.

A guess that binds nobody: what trains is what the gate picks once the iteration is over. When it is what was foreseen,
the step is asked for without saying where its rows lie, for the trainer has them.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from asyncrl.books import Books
from asyncrl.errors import DeadlineExceeded, LostRows, PeerLost
from asyncrl.page_checks import refuse_other_cuts
from asyncrl.protocols.batch import BatchRef, Cuts, SampleName
from asyncrl.protocols.contracts import Training
from asyncrl.protocols.messages import Checkpointed, Health, Published, StepReport

Held = tuple[SampleName, ...]


class Foresight:
    """Foresees once in an iteration, as soon as enough samples are ready. cuts: of the one that runs, None without one.

    training: the trainer for a page, whose `step` sends no more than is needed.
    """

    def __init__(self, training: Training, books: Books, cuts: Callable[[], Cuts | None]) -> None:
        self.training: Training = ForeseeingTraining(training, self, cuts)
        self._trainer, self._books, self._cuts = training, books, cuts
        self._changed = asyncio.Event()
        self._waiting = False
        self._held: Held = ()

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
            self._changed.clear()
            if self._waiting and self._cuts() is not None and (rows := self._books.foreseen()):
                self._waiting = False
                await self._tell(BatchRef(tuple(rows)))

    async def _tell(self, samples: BatchRef) -> None:
        self._held = ()
        try:
            held = await self._trainer.foresee(samples)
        except (PeerLost, DeadlineExceeded):
            return  # A trainer that is lost ends the run elsewhere; a slow one reads in its step.
        if held and all(held):
            self._held = _names(samples)

    def known(self, cuts: Cuts) -> bool:
        """Whether the trainer has read all of this batch."""
        return bool(self._held) and _names(cuts.batch) == self._held

    def forget(self) -> None:
        """The trainer has not read anything ahead."""
        self._held = ()


class ForeseeingTraining(Training):
    """A trainer with a `step` that knows what was foreseen; all else is the trainer's own. running: its cuts."""

    def __init__(self, trainer: Training, foresight: Foresight, running: Callable[[], Cuts | None]) -> None:
        self._trainer, self._foresight, self._running = trainer, foresight, running

    async def step(self, cuts: Cuts) -> StepReport:
        """Raises PageError: these are not the cuts of the iteration that runs, so no journal would know of them."""
        refuse_other_cuts("fleet.training.step", cuts, self._running())
        if not self._foresight.known(cuts):
            return await self._trainer.step(cuts)
        try:
            return await self._trainer.step(_without_places(cuts))
        except LostRows:
            self._foresight.forget()
            return await self._trainer.step(cuts)

    async def foresee(self, samples: BatchRef) -> list[bool]:
        return await self._trainer.foresee(samples)

    async def published(self) -> Published:
        return await self._trainer.published()

    async def using(self, reader: str, version: int) -> None:
        await self._trainer.using(reader, version)

    async def detached(self, reader: str) -> None:
        await self._trainer.detached(reader)

    async def checkpoint(self, directory: str, epoch: int, version: int) -> Checkpointed:
        return await self._trainer.checkpoint(directory, epoch, version)

    async def started(self) -> None:
        await self._trainer.started()

    async def health(self) -> list[Health]:
        return await self._trainer.health()

    async def release(self, samples: list[SampleName], oldest: int) -> None:
        await self._trainer.release(samples, oldest)

    async def idle_because(self, state: str) -> None:
        await self._trainer.idle_because(state)


def _names(samples: BatchRef) -> Held:
    return tuple([row.name for row in samples])


def _without_places(cuts: Cuts) -> Cuts:
    return replace(cuts, batch=BatchRef(tuple([row.lying_at(()) for row in cuts.batch])))

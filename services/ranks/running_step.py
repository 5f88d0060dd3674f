"""Holds the step that a trainer runs, from its first call to its report, or to the loss of rows or ranks."""

import asyncio
from dataclasses import dataclass, field

import torch

from asyncrl.engines.training.training_step import AdvancingStep, StepOutcome
from asyncrl.errors import LostRows, PeerLost

KEPT_STATE = 60.0
"""Seconds for which a rank that lost another one stays, so that its state can be saved: as long as the controller may
take to notice the death, and to end what it does."""


@dataclass(slots=True)
class StepInProgress:
    """Holds a running step. digest: of its batch. rows_checked: set once all ranks have read their rows or reported
    lost rows. run: of the engine, once it is begun. work: the task up to the outcome of the engine; its result is None
    when rows, or other ranks, are lost. random: state of torch's generator before it."""

    digest: str
    run: AdvancingStep | None = None
    work: "asyncio.Task[StepOutcome | None]" = field(init=False)
    rows_checked: asyncio.Event = field(default_factory=asyncio.Event)
    random: torch.Tensor = field(default_factory=torch.get_rng_state)
    lost: LostRows | PeerLost | None = None

    async def keep_state(self, lost: PeerLost, left_ranks: asyncio.Event) -> None:
        """Returns once this rank has left the others, of which one is lost. Raises the loss when nobody asks for that
        in KEPT_STATE: then the death of the other rank was reported before the end of this one."""
        try:
            async with asyncio.timeout(KEPT_STATE):
                await left_ranks.wait()
        except TimeoutError:
            raise lost from None
        self.lost = lost

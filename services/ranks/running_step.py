"""Holds the step that a trainer runs, from its first call to its report, or to the loss of rows."""

import asyncio
from dataclasses import dataclass, field

import torch

from asyncrl.engines.training.training_step import AdvancingStep, StepOutcome
from asyncrl.errors import LostRows

LOSS_NOTICE = 60.0
"""Seconds for which a rank that lost another one stays, so that the death of the other one is reported first: as long
as the controller may take to notice it. All ranks end then, and the run goes on from its newest checkpoint."""


@dataclass(slots=True)
class StepInProgress:
    """Holds a running step. digest: of its batch. rows_checked: set once all ranks have read their rows or reported
    lost rows. run: of the engine, once it is begun. work: the task up to the outcome of the engine; its result is None
    when rows are lost. random: state of torch's generator before it."""

    digest: str
    run: AdvancingStep | None = None
    work: "asyncio.Task[StepOutcome | None]" = field(init=False)
    rows_checked: asyncio.Event = field(default_factory=asyncio.Event)
    random: torch.Tensor = field(default_factory=torch.get_rng_state)
    lost: LostRows | None = None

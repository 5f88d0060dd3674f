"""The events of a run, which the controller passes to its observers. An observer must not block.

Observers also get the records of the journal about draws, new attempts, generated samples and drops.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from asyncrl.controller.journal.ledger import AttemptStarted, Drawn, Dropped, Generated
from asyncrl.protocols.batch import Cuts, RowRef
from asyncrl.protocols.messages import Score, StepReport

Prompt: TypeAlias = str | list[dict[str, Any]]
"""Text, or chat messages ({"role", "content"})."""


@dataclass(frozen=True, slots=True)
class SampleScored:
    """A sample was scored. sample: with its reward inline."""

    sample: RowRef
    score: Score


@dataclass(frozen=True, slots=True)
class DroppedByAlgorithm:
    """An algorithm handed samples to `control.drop`; follows the record `Dropped`."""

    group: int
    members: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class GroupPoisoned:
    """A group is dropped because its attempts failed or because it crashes workers. reason: of the last failure."""

    group: int
    prompt: Prompt
    reason: str


@dataclass(frozen=True, slots=True)
class GroupFinished:
    """Every member was trained or dropped. poison: whether the last members were dropped as poison."""

    group: int
    poison: bool = False


@dataclass(frozen=True, slots=True)
class StepBegan:
    """A step begins. cuts: what the trainer gets; their rows live until the step is done. recorded: the samples whose
    texts are written."""

    cuts: Cuts
    recorded: tuple[RowRef, ...] = ()


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step ended after `seconds`; `report.skipped` is not empty when it trained nothing."""

    cuts: Cuts
    report: StepReport
    staleness: Mapping[str, float]
    seconds: float


@dataclass(frozen=True, slots=True)
class StepLost:
    """The trainer could not read some rows: nothing was trained, and the groups roll out again."""

    cuts: Cuts
    reason: str


@dataclass(frozen=True, slots=True)
class Warned:
    """Something that the user should know, and that does not end the run."""

    text: str


@dataclass(frozen=True, slots=True)
class WeightsHandedOver:
    """A reader reads only `version` from now on. seconds: duration of the handover. canary: as in `Using`."""

    version: int
    reader: str
    seconds: float
    canary: float | None = None


Event: TypeAlias = (
    Drawn
    | AttemptStarted
    | Generated
    | Dropped
    | SampleScored
    | DroppedByAlgorithm
    | GroupPoisoned
    | GroupFinished
    | StepBegan
    | StepDone
    | StepLost
    | Warned
    | WeightsHandedOver
)
Observe: TypeAlias = Callable[[Event], None]

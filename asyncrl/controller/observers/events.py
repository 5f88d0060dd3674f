"""The events of a run, which the controller passes to its observers. An observer must not block."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from asyncrl.protocols.batch import Cuts, RowRef
from asyncrl.protocols.messages import Score, StepReport

Prompt: TypeAlias = str | list[dict[str, Any]]
"""Text, or chat messages ({"role", "content"})."""


class Event:
    """Base of all events."""

    __slots__ = ()


Observe: TypeAlias = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class GroupDrawn(Event):
    """A group is in flight. version: the trainer's at that moment."""

    group: int
    version: int


@dataclass(frozen=True, slots=True)
class AttemptFailed(Event):
    """An attempt at a group failed. failures: failed attempts so far; members: samples to draw again."""

    group: int
    failures: int
    members: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class SampleScored(Event):
    """A sample was scored. sample: with its reward inline."""

    sample: RowRef
    score: Score


@dataclass(frozen=True, slots=True)
class SamplesDropped(Event):
    """Samples left untrained.

    reason: "stale", "unscorable", "no_baseline", "no_signal", "greedy_unscorable", "truncated", "not finite", "poison",
    or a word of the user's algorithm.
    """

    group: int
    members: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class DroppedByAlgorithm(Event):
    """An algorithm handed samples to `control.drop`; follows their SamplesDropped."""

    group: int
    members: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class GroupPoisoned(Event):
    """A group is dropped because its attempts failed or because it crashes workers. reason: of the last failure."""

    group: int
    prompt: Prompt
    reason: str


@dataclass(frozen=True, slots=True)
class GroupFinished(Event):
    """Every member was trained or dropped. poison: whether the last members were dropped as poison."""

    group: int
    poison: bool = False


@dataclass(frozen=True, slots=True)
class StepBegan(Event):
    """A step begins. cuts: what the trainer gets; their rows live until the step is done."""

    cuts: Cuts


@dataclass(frozen=True, slots=True)
class StepDone(Event):
    """A step ended; `report.skipped` is not empty when it trained nothing.

    waited: seconds from the end of the previous step to the beginning of this one. seconds: duration of the step.
    """

    cuts: Cuts
    report: StepReport
    staleness: Mapping[str, float]
    waited: float
    seconds: float


@dataclass(frozen=True, slots=True)
class StepLost(Event):
    """The trainer could not read some rows: nothing was trained, and the groups roll out again."""

    cuts: Cuts
    reason: str


@dataclass(frozen=True, slots=True)
class Warned(Event):
    """Something that the user should know, and that does not end the run."""

    text: str


@dataclass(frozen=True, slots=True)
class WeightsHandedOver(Event):
    """A reader reads only `version` from now on. seconds: duration of the handover. canary: as in `Using`."""

    version: int
    reader: str
    seconds: float
    canary: float | None = None

"""The events of a run, which the controller passes to its observers. An observer must not block."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from asyncrl.protocols.batch import Cuts, RowRef
from asyncrl.protocols.messages import PromptGroup, Score, StepReport

Prompt: TypeAlias = str | list[dict[str, Any]]
"""Text, or chat messages ({"role", "content"})."""


@dataclass(frozen=True, slots=True)
class GroupDrawn:
    """A group is in flight. version: the trainer's at that moment."""

    group: int
    version: int


@dataclass(frozen=True, slots=True)
class AttemptBegan:
    """An attempt at a group began. prompts: the request for generation."""

    prompts: PromptGroup


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """An attempt at a group failed. failures: failed attempts so far; members: samples to draw again."""

    group: int
    failures: int
    members: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class SampleScored:
    """A sample was scored. sample: with its reward inline."""

    sample: RowRef
    score: Score


@dataclass(frozen=True, slots=True)
class SamplesDropped:
    """Samples left untrained.

    reason: "stale", "unscorable", "no_baseline", "no_signal", "greedy_unscorable", "truncated", "not finite", "poison",
    or a word of the user's algorithm.
    """

    group: int
    members: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class DroppedByAlgorithm:
    """An algorithm handed samples to `control.drop`; follows their SamplesDropped."""

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
    """A step begins. cuts: what the trainer gets; their rows live until the step is done."""

    cuts: Cuts


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step ended; `report.skipped` is not empty when it trained nothing.

    waited: seconds from the end of the previous step to the beginning of this one. seconds: duration of the step.
    """

    cuts: Cuts
    report: StepReport
    staleness: Mapping[str, float]
    waited: float
    seconds: float


@dataclass(frozen=True, slots=True)
class PoliciesApart:
    """A bound of the section `[mismatch]` that warns was crossed. warning: the text for the user."""

    warning: str


@dataclass(frozen=True, slots=True)
class StepLost:
    """The trainer could not read some rows: nothing was trained, and the groups roll out again."""

    cuts: Cuts
    reason: str


@dataclass(frozen=True, slots=True)
class PrefetchFailed:
    """The trainer could not prefetch rows; from now on it reads them in its steps."""

    reason: str


@dataclass(frozen=True, slots=True)
class WeightsHandedOver:
    """A reader reads only `version` from now on. seconds: duration of the handover. canary: as in `Using`."""

    version: int
    reader: str
    seconds: float
    canary: float | None = None


@dataclass(frozen=True, slots=True)
class WeightsOverdue:
    """A reader did not take over `version` in time, and so keeps the trainer from its next slot."""

    version: int
    reader: str
    seconds: float


Event: TypeAlias = (
    GroupDrawn
    | AttemptBegan
    | AttemptFailed
    | SampleScored
    | SamplesDropped
    | DroppedByAlgorithm
    | GroupPoisoned
    | GroupFinished
    | StepBegan
    | StepDone
    | PoliciesApart
    | StepLost
    | PrefetchFailed
    | WeightsHandedOver
    | WeightsOverdue
)
Observe: TypeAlias = Callable[[Event], None]

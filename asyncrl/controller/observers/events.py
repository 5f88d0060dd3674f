"""What the controller tells its observers. Plain values; an observer must not block."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from asyncrl.protocols.batch import Cuts, RowRef
from asyncrl.protocols.messages import PromptGroup, Score, StepReport
from asyncrl.staleness_report import StepStaleness

Prompt: TypeAlias = str | list[dict[str, Any]]
"""Text, or chat messages ({"role", "content"})."""


@dataclass(frozen=True, slots=True)
class GroupDrawn:
    """version: the trainer's at that moment."""

    group: int
    version: int


@dataclass(frozen=True, slots=True)
class AttemptBegan:
    """prompts: what generation was asked for; its attempt is 0 unless the group was restarted."""

    prompts: PromptGroup


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """failures: how many attempts at this group failed so far. members: those to sample again."""

    group: int
    failures: int
    members: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class SampleScored:
    """sample: with its reward inline."""

    sample: RowRef
    score: Score


@dataclass(frozen=True, slots=True)
class SamplesDropped:
    """reason: "stale", "unscorable", "no_baseline", "no_signal", "greedy_unscorable", "truncated", "not finite",
    "poison", or a word of a page's own."""

    group: int
    members: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class DroppedByPage:
    """Samples that a page handed to `gate.drop`; told after their SamplesDropped."""

    group: int
    members: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class GroupPoisoned:
    """A group whose attempts failed, or that kills workers; its remaining members are dropped. reason: the last one."""

    group: int
    prompt: Prompt
    reason: str


@dataclass(frozen=True, slots=True)
class GroupFinished:
    """Every member was trained or dropped; the rows are freed. poison: the last members were dropped as that."""

    group: int
    poison: bool = False


@dataclass(frozen=True, slots=True)
class StepBegan:
    """cuts: sent to the trainer now; their rows live until the step is done."""

    cuts: Cuts


@dataclass(frozen=True, slots=True)
class StepDone:
    """waited: seconds from the previous step's end to this one's beginning; seconds: of the step itself.

    report.skipped is not empty when nothing was trained.
    """

    cuts: Cuts
    report: StepReport
    staleness: StepStaleness
    waited: float
    seconds: float


@dataclass(frozen=True, slots=True)
class PoliciesApart:
    """What a user is told when a bound of the section `[mismatch]` that warns was crossed."""

    warning: str


@dataclass(frozen=True, slots=True)
class StepLost:
    """The trainer could not read some rows; nothing was trained and the groups roll out again."""

    cuts: Cuts
    reason: str


@dataclass(frozen=True, slots=True)
class WeightsHandedOver:
    """This reader reads only `version` from now on. seconds: since it was about to be told. canary: as in `Using`."""

    version: int
    reader: str
    seconds: float
    canary: float | None = None


@dataclass(frozen=True, slots=True)
class WeightsOverdue:
    """This reader did not take over `version` in time; it keeps the trainer from its next slot."""

    version: int
    reader: str
    seconds: float


Event: TypeAlias = (
    GroupDrawn
    | AttemptBegan
    | AttemptFailed
    | SampleScored
    | SamplesDropped
    | DroppedByPage
    | GroupPoisoned
    | GroupFinished
    | StepBegan
    | StepDone
    | PoliciesApart
    | StepLost
    | WeightsHandedOver
    | WeightsOverdue
)
Observe: TypeAlias = Callable[[Event], None]

"""The state of groups and samples in flight, and the values that the gate answers with."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

from asyncrl.protocols.batch import RowRef

Cut = tuple[int, tuple[int, ...]]
"""A group and those of its members that train together."""


def mean(rewards: Mapping[int, float]) -> float:
    """Returns the mean reward over members."""
    return sum(rewards.values()) / len(rewards)


def whole_cuts(cuts: Iterable[Cut], batch: int) -> list[Cut]:
    """Returns as many of these cuts, in order, as make a full batch."""
    taken, samples = list[Cut](), 0
    for cut in cuts:
        if samples >= batch:
            break
        taken.append(cut)
        samples += len(cut[1])
    return taken


class Stage(Enum):
    """The stages of a sample's life."""

    RUNNING = "running"
    SCORING = "scoring"
    READY = "ready"
    TRAINING = "training"
    TRAINED = "trained"
    DROPPED = "dropped"


OPEN = (Stage.RUNNING, Stage.SCORING)
DROPPABLE = (*OPEN, Stage.READY)
IN_FLIGHT = (*DROPPABLE, Stage.TRAINING)
STILL_COMPARED = ("stale", "truncated", "no_signal")
"""Reasons of a drop that leave the sample's reward in the baseline of its siblings."""


@dataclass(slots=True)
class SampleState:
    """The state of one sample.

    since: the gate's version when the sample's attempt began. first, last: versions of its first and last token, from
    the engine; tokens: how many were sampled; all three are known from SCORING on. reason: why it was dropped. row:
    reference to its columns, from SCORING on until they are freed; kept for the sample tracker.
    """

    stage: Stage = Stage.RUNNING
    attempt: int = 0
    since: int = 0
    first: int = 0
    last: int = 0
    tokens: int = 0
    reward: float | None = None
    reason: str = ""
    row: RowRef | None = None

    def begin_again(self, attempt: int, version: int) -> None:
        """Begins a new attempt at this version and forgets the results of the earlier one."""
        self.attempt = attempt
        self.since = version
        self.tokens = 0
        self.reward = None
        self.row = None


class StageCounts:
    """Counts samples by stage. running_since: RUNNING samples by the version at which their attempt began."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(Stage, 0)
        self.running_since: dict[int, int] = {}

    def __getitem__(self, stage: Stage) -> int:
        return self._counts[stage]

    def leave(self, sample: SampleState) -> None:
        """Uncounts a sample that is about to leave its stage."""
        self._counts[sample.stage] -= 1
        if sample.stage is Stage.RUNNING:
            left = self.running_since.pop(sample.since) - 1
            if left:
                self.running_since[sample.since] = left

    def enter(self, sample: SampleState, stage: Stage) -> None:
        """Moves a sample to `stage` and counts it there."""
        self._counts[stage] += 1
        if stage is Stage.RUNNING:
            self.running_since[sample.since] = self.running_since.get(sample.since, 0) + 1
        sample.stage = stage


@dataclass(slots=True)
class GroupState:
    """The state of one group.

    drawn_at: the gate's version when the group was drawn. attempt: number of the newest attempt at its members.
    baselines: mean rewards of the cuts that trained while other members were open. awaits: whether the reward of its
    greedy answer is needed and not known yet; greedy: that reward.
    """

    id: int
    drawn_at: int
    samples: list[SampleState]
    attempt: int = 0
    baselines: list[float] = field(default_factory=list)
    awaits: bool = False
    greedy: float | None = None

    @property
    def finished(self) -> bool:
        """Returns whether every member is TRAINED or DROPPED."""
        return not self.members(*IN_FLIGHT)

    def members(self, *stages: Stage) -> tuple[int, ...]:
        """Returns the members that are in one of these stages, rising."""
        return tuple(member for member, sample in enumerate(self.samples) if sample.stage in stages)

    @property
    def has_signal(self) -> bool:
        """Returns whether the rewards known so far differ; equal rewards make every advantage 0."""
        known = {*self.rewards().values(), *(() if self.greedy is None else (self.greedy,))}
        return len(known) > 1

    def rewards(self) -> dict[int, float]:
        """Returns the reward of every member in the baseline.

        A member that was dropped for its age, or because all rewards were equal then, stays in the baseline.
        """
        return {
            member: sample.reward
            for member, sample in enumerate(self.samples)
            if sample.reward is not None and (sample.stage is not Stage.DROPPED or sample.reason in STILL_COMPARED)
        }


@dataclass(frozen=True, slots=True)
class RestoredGroup:
    """A group in flight when a run is resumed.

    attempt: number of the attempt that begins now. running: members to sample again. trained: rewards of the members
    trained before. dropped: reason, and reward if there was one, of the members dropped before. greedy: reward of the
    greedy answer, if it was known.
    """

    id: int
    attempt: int
    running: tuple[int, ...]
    trained: Mapping[int, float] = field(default_factory=dict)
    dropped: Mapping[int, tuple[str, float | None]] = field(default_factory=dict)
    greedy: float | None = None


@dataclass(frozen=True, slots=True)
class Drop:
    """A sample that left without being trained. state: its group, which the gate forgets with its last sample."""

    state: GroupState
    member: int
    reason: str

    @property
    def group(self) -> int:
        return self.state.id


@dataclass(frozen=True, slots=True)
class Pick:
    """The answer of `Gate.pick`.

    cuts: what to train now, sorted by group, members sorted; None: wait. dropped: samples that were dropped on the way.
    early: the groups among the cuts that have members still open. short: fewer samples than a full batch.
    """

    cuts: tuple[Cut, ...] | None
    dropped: tuple[Drop, ...] = ()
    early: tuple[int, ...] = ()
    short: bool = False

    @property
    def samples(self) -> int:
        return sum(len(members) for _, members in self.cuts or ())


@dataclass(frozen=True, slots=True)
class EndedSample:
    """A sample that was trained or dropped. version: the gate's when its training began, or when it was dropped.

    reason: why it was dropped; empty when it was trained. early: it was in a cut of a group with open members. attempt:
    of its group; over 0, it was sampled again. trained: how many of its tokens entered the loss.
    """

    group: int
    member: int
    tokens: int
    first: int
    last: int
    version: int
    reason: str = ""
    early: bool = False
    attempt: int = 0
    trained: int = 0

    @classmethod
    def of(cls, sample: SampleState, group: int, member: int, version: int, early: bool) -> Self:
        tokens, first, last = sample.tokens, sample.first, sample.last
        return cls(group, member, tokens, first, last, version, sample.reason, early, sample.attempt)

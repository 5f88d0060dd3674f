"""The state of groups and samples in flight, and the values that the gate answers with."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import compress
from operator import attrgetter
from typing import NamedTuple

from asyncrl.objectives.advantages import rewards_to_go
from asyncrl.protocols.batch import RowRef
from asyncrl.protocols.messages import LEFT_OUT

Cut = tuple[int, tuple[int, ...]]
"""A group and those of its members that train together."""


class Stage(StrEnum):
    RUNNING = "running"
    SCORING = "scoring"
    READY = "ready"
    TRAINING = "training"
    TRAINED = "trained"
    DROPPED = "dropped"


OPEN = (Stage.RUNNING, Stage.SCORING)
DROPPABLE = (*OPEN, Stage.READY)
IN_FLIGHT = (*DROPPABLE, Stage.TRAINING)
STILL_COMPARED = ("stale", "truncated", "no_signal", "rejected", "not finite", LEFT_OUT)
"""Reasons of a drop that leave the sample's reward in the baseline of its siblings."""


@dataclass(slots=True)
class SampleState:
    """The state of one sample.

    since: the gate's version when its attempt began. From SCORING on are known first, last: versions of its first and
    last token, tokens: how many were sampled, and row: kept for the sample tracker until the row is freed.
    turn_rewards: the reward in parts, of a sample with several turns; a resume forgets those of samples without a row.
    answered: of an episode that goes on, the row up to the newest turn that the environment answered.
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
    turn_rewards: tuple[float, ...] = ()
    answered: RowRef | None = None


_stage_of = attrgetter("stage")
"""The gate asks for the stages of a group at each score. Loops without bytecode save 1,000 of 13,000 instructions that
the controller executes for a sample, in groups of 16."""


@dataclass(slots=True)
class GroupState:
    """The state of one group.

    drawn_at: the gate's version then. attempt: number of the newest one. baselines: mean rewards of the cuts that
    trained while other members were open. awaits: whether the reward of its greedy answer is needed and not known yet.
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
        return not self.has(*IN_FLIGHT)

    def has(self, *stages: Stage) -> bool:
        """Returns whether some member is in one of these stages."""
        return not {*stages}.isdisjoint(map(_stage_of, self.samples))  # Stops at the first one.

    def members(self, *stages: Stage) -> tuple[int, ...]:
        wanted = map(stages.__contains__, map(_stage_of, self.samples))
        return tuple(compress(range(len(self.samples)), wanted))

    @property
    def oldest_ready(self) -> int | None:
        """Returns the oldest version of a last token among the READY members; None without any."""
        ready = Stage.READY
        return min([sample.last for sample in self.samples if sample.stage is ready], default=None)

    def has_signal(self, turn_discount: float | None = None) -> bool:
        """Returns whether the rewards known so far differ; equal rewards make every advantage 0. turn_discount: of
        advantages by turn, where it is the rewards from each turn on that have to differ."""
        if turn_discount is None:
            return len({*self.rewards().values(), *(() if self.greedy is None else (self.greedy,))}) > 1
        parts = (self.samples[member].turn_rewards or (reward,) for member, reward in self.rewards().items())
        return turns_differ(parts, turn_discount)

    def rewards(self) -> dict[int, float]:
        """Returns the reward of every member in the baseline, some that were dropped (STILL_COMPARED) included."""
        dropped = Stage.DROPPED
        return {
            member: sample.reward
            for member, sample in enumerate(self.samples)
            if sample.reward is not None and (sample.stage is not dropped or sample.reason in STILL_COMPARED)
        }


def turns_differ(by_turn: Iterable[Sequence[float]], discount: float) -> bool:
    """Returns whether two samples of a group earn different rewards from some turn on: whether `turn_advantages` gives
    one that is not 0. by_turn: the rewards of each sample in parts."""
    first: dict[int, float] = {}
    to_go = (rewards_to_go(rewards, discount) for rewards in by_turn)
    return any(value != first.setdefault(turn, value) for values in to_go for turn, value in enumerate(values))


@dataclass(frozen=True, slots=True)
class Drop:
    """Members of a group that left without being trained. The gate forgets a group with its last sample."""

    group: GroupState
    members: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Pick:
    """The answer of `Gate.pick`. cuts: what to train now, sorted; None: wait. dropped: on the way."""

    cuts: tuple[Cut, ...] | None
    dropped: tuple[Drop, ...] = ()


class EndedSample(NamedTuple):
    """A sample that was trained or dropped. version: the gate's when its training began, or when it was dropped.

    reason: empty when it was trained. early: it was in a cut of a group with open members. trained: tokens in the loss.
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
